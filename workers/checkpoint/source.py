"""The tensors of a checkpoint by name. Its safetensors files are memory-mapped, and their pages can be let go."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.quoting import quoted
from pagewire.kernels.cpu import arena
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.workers.checkpoint.headers import DTYPES, TensorHeader, safetensors_header, weight_files
from pagewire.workers.checkpoint.read_progress import WEIGHTS
from pagewire.workers.errors import LoadError


class WeightSource(ABC):
    """The weights of a model, by the names that they have in a dense checkpoint: `...q_proj.weight`."""

    def __init__(self) -> None:
        self._mapped: list[tuple[int, int]] = []

    @property
    @abstractmethod
    def names(self) -> Iterable[str]:
        """The names of all weights."""

    @abstractmethod
    def on_meta(self, name: str) -> Tensor:
        """A weight of this shape on the meta device.

        Raises:
            LoadError: it is of a dtype that is not read, or its tensors do not fit each other.
        """

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """A weight as plain numbers: in its own dtype, or dequantised, in float32."""

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """A matrix [N, K] as it is held. dtype: of its product's inputs and outputs.

        Raises:
            LoadError: its tensors do not fit each other.
        """
        return dense_weight(self.read(name), dtype)

    def stacked(self, name: str, dtype: torch.dtype, transposed: bool) -> Iterator[Weight]:
        """The matrices [N, K] of a weight [E, N, K], one by one; [E, K, N] if it is transposed."""
        for matrix in self.read(name):
            yield dense_weight(matrix.T if transposed else matrix, dtype)

    def let_go(self) -> None:
        """Give back the memory of weights read since the last call. One in use comes from its file again."""
        for address, size in self._mapped:
            start = address & -mmap.PAGESIZE
            arena.give_back(start, address + size - start)
        self._mapped.clear()

    def _noted(self, tensor: Tensor) -> Tensor:
        """A tensor of a mapped file, whose memory is given back by `let_go`."""
        self._mapped.append((tensor.data_ptr(), tensor.nbytes))
        WEIGHTS.done += tensor.nbytes
        return tensor


class Checkpoint(WeightSource):
    """The tensors of the safetensors files in a model folder: views of the mapped files, not to be written to."""

    def __init__(self, folder: str | Path, paths: Iterable[Path] | None = None) -> None:
        """Open the files: those with the weights of a model, or these.

        Raises:
            LoadError: there are none, or one of them is missing or broken.
        """
        from safetensors import safe_open

        super().__init__()
        self._files: dict[str, Any] = {}
        self._headers: dict[str, TensorHeader] = {}
        for path in weight_files(Path(folder)) if paths is None else paths:
            # Its shapes are checked first; the library takes those of any length.
            self._headers |= {tensor.name: tensor for tensor in safetensors_header(path)}
            try:
                file: Any = safe_open(path, framework="pt")
            except Exception as error:
                raise LoadError(f"cannot load {path}: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._files.keys()

    def header(self, name: str) -> TensorHeader:
        """What its file's header says about a tensor."""
        return self._headers[name]

    def read(self, name: str) -> Tensor:
        """A tensor in its own dtype."""
        return self._noted(self._files[name].get_tensor(name))

    def on_meta(self, name: str) -> Tensor:
        """The shape and dtype of a tensor, on the meta device.

        Raises:
            LoadError: PyTorch has no such dtype.
        """
        header = self.header(name)
        if header.dtype not in DTYPES:
            raise LoadError(f"{name} of the checkpoint is of an unknown dtype: {quoted(header.dtype)}")
        return torch.empty(header.shape, dtype=getattr(torch, DTYPES[header.dtype]), device="meta")
