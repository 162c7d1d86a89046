"""How a weight is divided over the ranks of a stage: plain data, by the names of weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from pagewire.kernels.data.joining import column_slice
from pagewire.kernels.data.weight import Weight
from pagewire.workers.errors import LoadError


class Axis(Enum):
    """What of a linear layer is divided."""

    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Cut:
    """How a weight is divided.

    spans: for each rank, its rows or columns, which are one below the other in its part.
    dim: of a vector, the dimension that rows are counted in.
    """

    axis: Axis
    spans: tuple[tuple[range, ...], ...]
    rank: int
    dim: int = 0

    @property
    def is_added_elsewhere(self) -> bool:
        """True if a bias is added once for all ranks, by another rank than this one."""
        return self.axis is Axis.COLUMNS and self.rank > 0

    @property
    def own(self) -> tuple[range, ...]:
        """The spans of this rank."""
        return self.spans[self.rank]

    @property
    def places(self) -> tuple[range, ...]:
        """The span of each rank, where each has a single one."""
        return tuple(span for (span,) in self.spans)

    def rows(self, weight: Weight) -> Weight:
        """This rank's rows of a matrix [N, K]; the whole matrix if its columns are divided."""
        if self.axis is Axis.COLUMNS:
            return weight
        parts = [weight.slice(span.start, span.stop) for span in self.own]
        return parts[0] if len(parts) == 1 else Weight.joined(parts)

    def columns(self, weight: Weight) -> Weight:
        """This rank's columns of a matrix [N, K]; the whole matrix if its rows are divided.

        Raises:
            LoadError: they cut a group of a quantised weight in a way that no group of 16 columns or more can have.
        """
        if self.axis is Axis.ROWS:
            return weight
        (span,) = self.own
        try:
            return column_slice(weight, span.start, span.stop)
        except ValueError as error:
            raise LoadError(
                f"a weight {list(weight.shape)} of scheme {weight.scheme.name} cannot be divided over "
                f"{len(self.spans)} ranks: {error}; each rank's columns must be a multiple of 16"
            ) from error

    def vector(self, tensor: Tensor) -> Tensor | None:
        """This rank's part of a bias, or of numbers for each row; what belongs to all rows is rank 0's."""
        if self.axis is Axis.COLUMNS:
            return None if self.is_added_elsewhere else tensor
        parts = [tensor.narrow(self.dim, span.start, len(span)) for span in self.own]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)
