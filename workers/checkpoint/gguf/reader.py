"""The weights of a GGUF file under the names of a transformers checkpoint, each in its own type."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.gguf.file import BLOCKS, GgufError, TensorInfo, read_gguf
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.linear import dense
from pagewire.workers.checkpoint.gguf.blocks import BLOCK_TYPES, quantised
from pagewire.workers.checkpoint.gguf_names import MODELS, WeightPlace, places
from pagewire.workers.checkpoint.source import WeightSource
from pagewire.workers.errors import LoadError

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_BYTES = {name: (values, size) for name, values, size in BLOCKS.values()}
MAX_EXPERTS = 1 << 12


class GgufCheckpoint(WeightSource):
    """The tensors of a GGUF file, or of all parts of a split one, which are mapped and not to be written to.

    A matrix of quantised blocks is a weight of integers (`blocks.py`), unless it is read as floats.
    """

    def __init__(self, path: str | Path, config: Any) -> None:
        """Map the files, and find the weights of a model.

        config: the model's configuration in transformers.

        Raises:
            LoadError: a file is missing or broken, has tensors of types that are not read, or is of another model.
        """
        super().__init__()
        try:
            file = read_gguf(path)
        except GgufError as error:
            raise LoadError(str(error)) from error
        if config.model_type not in MODELS:
            raise LoadError(
                f"{path}: {config.model_type} is not served from GGUF files, but {', '.join(MODELS)}"
            )
        self._tensors = file.tensors
        _check_types(path, file.tensors.values())
        shapes = {name: info.shape for name, info in file.tensors.items()}
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", heads)
        try:
            self._places = places(config.model_type, shapes, heads, kv_heads)
        except KeyError as error:
            raise LoadError(f"{path} has tensors that {config.model_type} has no use for: {error}") from error
        self._files = {info.path: _mapped(info.path) for info in file.tensors.values()}

    @property
    def names(self) -> Iterable[str]:
        """The names of all weights, as transformers has them."""
        return self._places.keys()

    def on_meta(self, name: str) -> Tensor:
        """The shape of a weight, on the meta device; quantised ones are float32, as which they are read.

        Raises:
            LoadError: a matrix of queries or keys whose rows are not those of the model's heads.
        """
        place = self._places[name]
        info = self._tensors[place.tensor]
        shape = info.shape if place.expert is None else info.shape[1:]
        if place.heads and shape[0] % (2 * place.heads):
            raise LoadError(f"{info.name} of the GGUF file has {shape[0]} rows for {place.heads} heads")
        shape = (1, *shape) if place.is_row else shape[::-1] if place.transposed else shape
        return torch.empty(shape, dtype=FLOATS.get(info.type, torch.float32), device="meta")

    def read(self, name: str) -> Tensor:
        """A weight as floats: quantised ones are float32."""
        place = self._places[name]
        info = self._tensors[place.tensor]
        if info.type in FLOATS:
            tensor = self._floats(info, place)
            if place.heads:
                tensor = tensor[_order(len(tensor), place.heads)]
        else:
            tensor = dense(self.weight(name, torch.float32))
        if place.plus:
            tensor = tensor.float() - place.plus
        return tensor[None] if place.is_row else tensor.T if place.transposed else tensor

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """A matrix [N, K] in its own scheme; dtype: of the product's inputs and outputs."""
        place = self._places[name]
        info = self._tensors[place.tensor]
        if info.type in FLOATS:
            return dense_weight(self.read(name), dtype)
        values, size = BLOCK_BYTES[info.type]
        blocks = self._bytes(info, place).view(-1, info.shape[-1] // values, size)
        weight = quantised(blocks, info.type, dtype)
        return weight.take(_order(weight.shape[0], place.heads)) if place.heads else weight

    def _floats(self, info: TensorInfo, place: WeightPlace) -> Tensor:
        shape = info.shape if place.expert is None else info.shape[1:]
        return self._bytes(info, place).view(FLOATS[info.type]).view(shape)

    def _bytes(self, info: TensorInfo, place: WeightPlace) -> Tensor:
        """The bytes of a tensor, or of one matrix of a stack."""
        start, size = info.offset, info.num_bytes
        if place.expert is not None:
            size //= info.shape[0]
            start += place.expert * size
        return self._noted(self._files[info.path][start : start + size])


def _mapped(path: Path) -> Tensor:
    """A file as bytes uint8, which are read when they are used."""
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise LoadError(f"cannot load {path}: {error}") from error


def _check_types(path: str | Path, tensors: Iterable[TensorInfo]) -> None:
    """Refuse types that are not read, and stacks of the wrong form, before anything is read.

    Raises:
        LoadError: there are some.
    """
    for info in tensors:
        if info.type not in FLOATS and (info.type not in BLOCK_TYPES or len(info.shape) == 1):
            raise LoadError(
                f"{path}: the tensor {info.name} is of type {info.type}; matrices are read of the types "
                f"{', '.join((*FLOATS, *BLOCK_TYPES))}, vectors of {', '.join(FLOATS)}"
            )
        stacked = "_exps." in info.name
        if len(info.shape) != 3 if stacked else len(info.shape) > 2:
            raise LoadError(f"{path}: the tensor {info.name} is of shape {info.shape}")
        if stacked and info.shape[0] > MAX_EXPERTS:
            raise LoadError(f"{path}: {info.name} has {info.shape[0]} experts, of at most {MAX_EXPERTS}")


def _order(num_rows: int, heads: int) -> Tensor:
    """The index that puts rows of `heads` heads into transformers' order.

    llama.cpp's converter puts the two rows of a rotated pair side by side, transformers half a head apart.
    """
    return torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()
