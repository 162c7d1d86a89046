"""The states of recurrent layers: where each part of a batch reads and writes them.

A *state slot* is memory for the states of all recurrent layers, after one token of one sequence. Each layer has
tensors [num_states, ...] in float32, whose first axis is the slot. Channels, or the columns of values, are the last
axis: the kernels compute them side by side.

The functions here check what compiled kernels get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The tokens that a step computes for each row, and the slots that their states are read from and written to.

    A row's tokens are computed one after the other. Its spans divide them where states are kept: each starts with
    the states of the slot that it reads, and leaves those after its last token in the slot that it writes. A slot
    that a span writes is read by no other row of the batch, and written once.
    """

    row_starts: Tensor
    """int32 [R + 1]: the first span of each row, and in the end the number of spans; never decreases."""
    spans: Tensor
    """int32 [S, 4]: first token, token after the last, slot read (-1: zeros), slot written. Those after the last
    row's are not read.

    A span has a token at least. Spans follow each other without a gap from token 0 on. A span after another one of
    its row reads the slot that this one writes. Tokens after the last span are padding, whose results are 0."""


@dataclass(frozen=True, slots=True)
class MixerStates:
    """What the mixers of a stack's layers take of a step."""

    batch: StateBatch
    of_layers: Sequence[Sequence[Tensor]]
    """Of each layer: float32 [num_states, *shape] for each state of its mixer; empty where it keeps none."""


def check_states(state: Tensor, shape: tuple[int, ...], batch: StateBatch) -> None:
    """Refuse states of a layer and a batch of another form, see `check_state` and `check_spans`.

    Raises:
        TypeError, ValueError: why.
    """
    check_state(state, shape)
    check_spans(batch)


def check_state(state: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse states of a layer that are not float32 [S, *shape] with contiguous slots.

    Raises:
        ValueError: they are not.
    """
    if state.shape[1:] != shape or state.dtype != torch.float32 or not _dense_after_first(state):
        raise ValueError(f"states float32 {['S', *shape]} expected, not {state.dtype} {tuple(state.shape)}")


def check_spans(batch: StateBatch) -> None:
    """Refuse a batch of another form.

    Raises:
        TypeError: a tensor is not int32.
        ValueError: a shape is wrong.
    """
    for indices in (batch.row_starts, batch.spans):
        if indices.dtype != torch.int32:
            raise TypeError(f"spans and their rows are int32, not {indices.dtype}")
    starts, spans = batch.row_starts.shape, batch.spans.shape
    if len(starts) != 1 or starts[0] == 0 or len(spans) != 2 or spans[1] != 4:
        raise ValueError(f"rows {tuple(starts)} of spans {tuple(spans)}")


def check_shared(groups: int, heads: int) -> None:
    """Refuse heads that do not share groups evenly.

    Raises:
        ValueError: why.
    """
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups}")


def token_rows(x: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of tokens, or a copy in which all axes but the first are contiguous.

    Raises:
        ValueError: it has another shape or dtype.
    """
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"{dtype} {list(shape)} expected, not {x.dtype} {tuple(x.shape)}")
    return x if _dense_after_first(x) else x.contiguous()


def factors(x: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape as contiguous float32.

    Raises:
        ValueError: it has another shape.
    """
    if x.shape != shape:
        raise ValueError(f"{list(shape)} expected, not {tuple(x.shape)}")
    return x.to(torch.float32).contiguous()


def _dense_after_first(x: Tensor) -> bool:
    return len(x) == 0 or x[0].is_contiguous()
