"""The states of recurrent layers: where each part of a batch reads and writes them.

A *state slot* is memory for the states of all recurrent layers, after one token of one sequence. Each layer has
tensors [num_states, ...] in float32, whose first axis is the slot. Channels, or the columns of values, are the last
axis: the kernels compute them side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """int32 [S, 4]: first token, token after the last, slot read (-1: zeros), slot written.

    A span has a token at least. Spans follow each other without a gap from token 0 on. A span after another one of
    its row reads the slot that this one writes. Tokens after the last span are padding, whose results are 0."""
