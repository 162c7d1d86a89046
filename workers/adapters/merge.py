"""Adds an adapter to a model's weights while they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.quoting import quoted
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.workers.adapters.config import AdapterConfig
from pagewire.workers.adapters.files import file_bytes, read_config, read_files
from pagewire.workers.adapters.names import Kind, Parts, by_module, kinds_of
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.module.matrices import is_linear, is_transposed
from pagewire.workers.module.weights import Quantise

LOW_RANK = ({Kind.A, Kind.B}, {Kind.A, Kind.B, Kind.MAGNITUDE}, {Kind.EMBEDDING_A, Kind.EMBEDDING_B})


class Merge:
    """The weights of a model with those of an adapter added, by the names of their modules."""

    @classmethod
    def of(cls, path: str) -> Merge:
        """The adapter in a folder.

        Raises:
            LoadError: its configuration cannot be read.
        """
        try:
            settings = read_config(Path(path))
            return cls(settings, AdapterConfig.parse(settings), path)
        except (ValueError, OSError) as error:
            raise LoadError(f"cannot merge the adapter {quoted(path)}: {error}") from error

    def __init__(self, settings: bytes, config: AdapterConfig, path: str) -> None:
        self._settings, self._config, self._path = settings, config, path
        self._modules: Mapping[str, Parts] = {}
        self._transposed: set[str] = set()

    def _read(self, max_bytes: int) -> Mapping[str, Parts]:
        """The tensors of each module.

        Raises:
            OSError: they cannot be read. ValueError: likewise, or they change more than weights.
        """
        files = read_files(Path(self._path), self._settings, allow_pickle=False, max_bytes=max_bytes)
        modules, config = by_module(files.tensors()), self._config
        for module, parts in modules.items():
            if parts.keys() not in (*LOW_RANK, {Kind.WEIGHT}):
                text = f"{quoted(module)} has {kinds_of(parts)}, which cannot be merged; serve it with enable_lora"
                raise ValueError(text)
            if parts.keys() == {Kind.WEIGHT} and not config.saves(module):
                raise ValueError(f"{quoted(module)} has a whole weight, but modules_to_save does not name it")
        return modules

    def check(self, causal: Any) -> None:
        """Read the adapter, and refuse one of modules that a model does not have, before its weights are read.

        Raises:
            LoadError: it cannot be read, is of another model, or changes more than weights.
        """
        linears = {name: module for name, module in causal.named_modules() if is_linear(module)}
        self._transposed = {name for name, module in linears.items() if is_transposed(module)}
        weighted = (*linears.values(), causal.get_input_embeddings())
        shapes = [tuple(module.weight.shape) for module in weighted]
        try:
            self._modules = self._read(file_bytes(self._config.max_rank, shapes, shapes))
        except (ValueError, OSError) as error:
            raise LoadError(f"cannot merge the adapter {quoted(self._path)}: {error}") from error
        served = set(linears)
        served |= {name for name, module in causal.named_modules() if module is causal.get_input_embeddings()}
        if unknown := sorted(set(self._modules) - served):
            raise LoadError(
                f"cannot merge the adapter {quoted(self._path)}: {quoted(unknown[0])} is no linear layer of this "
                "model; what changes experts is served with enable_lora"
            )

    def before(self, quantise: Quantise) -> Quantise:
        """A `Quantise` that adds the adapter to each weight before it is quantised."""
        return lambda name, weight: quantise(name, self.apply(name, weight))

    def apply(self, module: str, weight: Weight) -> Weight:
        """The weight [N, K] of a linear layer or an embedding, with what the adapter changes in it.

        Raises:
            LoadError: they do not fit each other.
        """
        if (parts := self._modules.get(module)) is None:
            return weight
        try:
            changed = self._changed(module, weight.dense().float(), parts)
        except (ValueError, RuntimeError) as error:
            text = f"merging {quoted(self._path)} into {module} {weight.shape}: {first_line(error)}"
            raise LoadError(text) from error
        if not bool(torch.isfinite(changed).all()):
            raise LoadError(f"merging {quoted(self._path)} makes numbers of {module} that are not finite")
        return dense_weight(changed.to(weight.dtype))

    def _changed(self, module: str, own: Tensor, parts: Parts) -> Tensor:
        if Kind.WEIGHT in parts:
            weight = parts[Kind.WEIGHT].float()
            weight = weight.T if module in self._transposed else weight
            if weight.shape != own.shape:
                raise ValueError(f"a weight of shape {tuple(weight.shape)}")
            return weight
        scale = self._config.scale(module)
        if Kind.EMBEDDING_A in parts:
            added = (parts[Kind.EMBEDDING_B].float() @ parts[Kind.EMBEDDING_A].float()).T
        else:
            added = parts[Kind.B].float() @ parts[Kind.A].float()
        if added.shape != own.shape:
            raise ValueError(f"matrices whose product is of shape {tuple(added.shape)}")
        changed = own + scale * added
        if (magnitude := parts.get(Kind.MAGNITUDE)) is not None:
            changed = changed * (magnitude.float().reshape(-1) / changed.norm(dim=1))[:, None]
        return changed
