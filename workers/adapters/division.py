"""The part of an adapter that a rank keeps: of each tensor what belongs to the rank's part of the model's weight.

Where the outputs of a layer are divided, so are the rows of an adapter's second matrix B, and every rank has all of
the first, A. Where the inputs are, so are the columns of A: a rank adds B (A_i x_i) to its part of the product, and
since B is linear, the sum of these parts, which the ranks form anyway, has B (A x) in it. No rank waits more often
than without adapters, and a row's bits depend on no other row, as those of the sum do not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagewire.workers.ranks.cut import Axis, Cut


def whole_shape(own: tuple[int, int], cut: Cut | None) -> tuple[int, int]:
    """The outputs and inputs of a whole layer. own: those of this rank's part."""
    if cut is None:
        return own
    size = max(span.stop for spans in cut.spans for span in spans)
    return (size, own[1]) if cut.axis is Axis.ROWS else (own[0], size)


def part_of(cut: Cut | None, first: int, size: int) -> Cut | None:
    """How some outputs of a layer are divided over the ranks: `size` from `first` on. cut: of the whole layer."""
    if cut is None or cut.axis is Axis.COLUMNS:
        return cut
    within = range(first, first + size)
    spans = (
        tuple(
            range(max(span.start, first) - first, min(span.stop, within.stop) - first)
            for span in own
            if span.start < within.stop and span.stop > first
        )
        for own in cut.spans
    )
    return replace(cut, spans=tuple(spans))


def own_rows(tensor: Tensor, cut: Cut | None) -> Tensor:
    """This rank's rows of a tensor [N, ...] with one for each output; all if the inputs are divided."""
    if cut is None or cut.axis is Axis.COLUMNS:
        return tensor
    parts = [tensor[span.start : span.stop] for span in cut.own]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def own_columns(matrix: Tensor, cut: Cut | None) -> Tensor:
    """This rank's columns of a matrix [n, K] with one for each input; all if the outputs are divided."""
    if cut is None or cut.axis is Axis.ROWS:
        return matrix
    (span,) = cut.own
    return matrix[:, span.start : span.stop]


def own_tokens(matrix: Tensor, num_tokens: int, cut: Cut | None) -> Tensor:
    """This rank's rows of a matrix with one for each token: of the model's `num_tokens`, and all behind them."""
    if cut is None or len(matrix) <= num_tokens:
        return own_rows(matrix, cut)
    return torch.cat([own_rows(matrix, cut), matrix[num_tokens:]])


def own_shift(shift: Tensor, cut: Cut | None) -> Tensor | None:
    """This rank's shift of the outputs that it has; None: there is none.

    A sum over the ranks is shifted once, by the rank that has the model's own bias.
    """
    is_elsewhere = cut is not None and cut.is_added_elsewhere
    return None if is_elsewhere or not shift.any() else shift
