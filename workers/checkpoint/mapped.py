"""The weights of a checkpoint that has names of its own, under those of the module that runs in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from pagewire.ipc.families.family import ForeignModel, Rows
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.workers.checkpoint.source import WeightSource
from pagewire.workers.errors import LoadError


class MappedCheckpoint(WeightSource):
    """The weights of a module, each of them a tensor of another source, or some of its rows."""

    def __init__(self, source: WeightSource, model: ForeignModel) -> None:
        """Find the tensor of each weight.

        Raises:
            LoadError: the configuration gives a tensor rows that no model has.
        """
        super().__init__()
        self._source = source
        try:
            self._excerpts = model.excerpts(source.names)
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise LoadError(f"the weights of a {model.family.name} model: {error}") from error

    @property
    def names(self) -> Iterable[str]:
        """See `WeightSource.names`: as the module has them."""
        return self._excerpts.keys()

    def on_meta(self, name: str) -> Tensor:
        """See `WeightSource.on_meta`."""
        excerpt = self._excerpts[name]
        whole = self._source.on_meta(excerpt.tensor)
        if excerpt.rows is None:
            return whole
        if (last := max(rows.stop for rows in excerpt.rows)) > len(whole):
            raise LoadError(
                f"{excerpt.tensor} of the checkpoint has {len(whole)} rows, and by its configuration {last} or more"
            )
        return whole.new_empty(sum(map(len, excerpt.rows)), *whole.shape[1:])

    def read(self, name: str) -> Tensor:
        """See `WeightSource.read`."""
        excerpt = self._excerpts[name]
        whole = self._source.read(excerpt.tensor)
        if excerpt.unit_rows:
            return F.normalize(whole.float(), dim=1)
        if excerpt.rows is None:
            return whole
        parts = [whole[rows.start : rows.stop] for rows in excerpt.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """See `WeightSource.weight`."""
        excerpt = self._excerpts[name]
        if excerpt.unit_rows:
            return dense_weight(self.read(name), dtype)
        whole = self._source.weight(excerpt.tensor, dtype)
        return whole if excerpt.rows is None else _rows(whole, excerpt.rows)

    def stacked(self, name: str, dtype: torch.dtype, transposed: bool) -> Iterator[Weight]:
        """See `WeightSource.stacked`: only for weights that are whole tensors."""
        excerpt = self._excerpts[name]
        if excerpt.rows is not None:
            raise LoadError(f"{excerpt.tensor} of the checkpoint holds no stack of matrices")
        return self._source.stacked(excerpt.tensor, dtype, transposed)

    def let_go(self) -> None:
        """See `WeightSource.let_go`."""
        self._source.let_go()


def _rows(whole: Weight, parts: Rows) -> Weight:
    """These rows of a matrix; every scheme holds whole rows."""
    if len(parts) == 1:
        return whole.slice(parts[0].start, parts[0].stop)
    return whole.take(torch.cat([torch.arange(rows.start, rows.stop) for rows in parts]))
