"""Quantised checkpoints: several tensors make a weight, which a `Format` knows how to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pagewire.kernels.data.joining import with_rounded_rows
from pagewire.kernels.data.weight import Weight
from pagewire.kernels.linear import dense
from pagewire.workers.checkpoint.formats.format import (
    FloatFormat,
    Format,
    StackFormat,
    Tensors,
    parts_by_weight,
)
from pagewire.workers.checkpoint.formats.reexpress import kept_fp8_weight
from pagewire.workers.checkpoint.source import Checkpoint, WeightSource
from pagewire.workers.errors import LoadError, first_line


class QuantisedCheckpoint(WeightSource):
    """The weights of a quantised checkpoint, by the names that they would have in a dense one.

    What belongs to no quantised matrix (norms, biases, modules that were left out) is read as it is.
    """

    def __init__(self, files: Checkpoint, form: Format, keeps_floats: bool = False) -> None:
        """Find the tensors of each matrix.

        keeps_floats: matrices of 8-bit floats stay as they are (`floats.Floats`) where kernels multiply with them;
            else all are held as integers.

        Raises:
            LoadError: the format refuses the checkpoint.
        """
        super().__init__()
        self._files, self._form, self._keeps_floats = files, form, keeps_floats
        with _named(f"a checkpoint in format {form.name}"):
            form.check(files.names)
        plain, self._parts = parts_by_weight(form, map(files.header, files.names))
        self._plain = {tensor.name for tensor in plain}

    @property
    def names(self) -> Iterable[str]:
        """See `WeightSource.names`."""
        return self._plain | self._parts.keys()

    def on_meta(self, name: str) -> Tensor:
        """See `WeightSource.on_meta`."""
        if name in self._plain:
            return self._files.on_meta(name)
        with _named(name):
            shape, _ = self._form.stored(_module(name), self._parts[name])
        return torch.empty(shape, dtype=torch.float32, device="meta")

    def read(self, name: str) -> Tensor:
        """See `WeightSource.read`."""
        if name in self._plain:
            return self._files.read(name)
        if self._is_stack(name):
            transposed = isinstance(self._form, StackFormat) and self._form.transposed
            matrices = [dense(matrix) for matrix in self.stacked(name, torch.float32, transposed)]
            return torch.stack([matrix.T for matrix in matrices] if transposed else matrices)
        return dense(self.weight(name, torch.float32))

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """See `WeightSource.weight`."""
        if name in self._plain:
            return self._files.weight(name, dtype)
        with _named(name):
            module, tensors = _module(name), self._tensors(name)
            if self._keeps_floats and (kept := _kept(self._form, module, tensors, dtype)) is not None:
                return kept
            return self._form.weight(module, tensors, dtype)

    def stacked(self, name: str, dtype: torch.dtype, transposed: bool) -> Iterator[Weight]:
        """See `WeightSource.stacked`."""
        if name in self._plain:
            yield from self._files.stacked(name, dtype, transposed)
            return
        form = self._form
        if not isinstance(form, StackFormat) or form.transposed != transposed:
            raise LoadError(f"{name}: format {form.name} holds no stacks of matrices of this form")
        with _named(name):
            yield from form.stacked(_module(name), self._tensors(name), dtype)

    def let_go(self) -> None:
        """See `WeightSource.let_go`."""
        self._files.let_go()

    def _tensors(self, name: str) -> dict[str, Tensor]:
        return {suffix: self._files.read(part.name) for suffix, part in self._parts[name].items()}

    def _is_stack(self, name: str) -> bool:
        return all(suffix.startswith("_") for suffix in self._parts[name])


def _kept(form: Format, name: str, tensors: Tensors, dtype: torch.dtype) -> Weight | None:
    """A matrix of 8-bit floats as they are; None if it holds others, or no kernel multiplies with them."""
    floats = form.floats(name, tensors) if isinstance(form, FloatFormat) else None
    if floats is None:
        return None
    kept = kept_fp8_weight(floats.values, floats.scales, dtype, floats.block)
    return kept if kept is None else with_rounded_rows(kept, floats.rounds_rows)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """A context whose errors of reading become LoadErrors that say what was read."""
    try:
        yield
    except LoadError:
        raise
    except KeyError as error:
        raise LoadError(f"{what}: its tensor {error.args[0]!r} is missing") from error
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise LoadError(f"{what}: {first_line(error)}") from error
