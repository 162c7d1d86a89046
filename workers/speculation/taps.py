"""Keeps the states between some layers of a decoder stack, which EAGLE-3 heads start from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.data.layer import Angles
from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.stack import Stack


class TappedStack(Stack):
    """A stack in parts, between which states are kept. Its results are, to the bit, those of the whole one.

    The norm before a part is the one that ended the part before it, of the same sum, rounded in the same way.

    states: [T, H] of each place for the tokens of the last call.
    """

    def __init__(self, stack: Stack, after: Sequence[int]) -> None:
        """after: the numbers of layers after which states are kept, each from 1 to that of all layers less one."""
        self.input_norm, self.layers, self.compiled = stack.input_norm, stack.layers, stack.compiled
        self.states: list[Tensor] = []
        self._after = after
        ends = sorted({*after, len(stack.layers)})
        self._parts = []
        for start, end in zip([0, *ends], ends, strict=False):
            norm = stack.layers[start - 1].output_norm if start else stack.input_norm
            self._parts.append((start, end, Stack(norm, stack.layers[start:end])))

    def __call__(
        self,
        states: Tensor,
        batch: AttentionBatch,
        caches: Sequence[Cache],
        angles: Sequence[Angles] = (),
    ) -> Tensor:
        """See `Stack.__call__`."""
        found: dict[int, Tensor] = {}
        out = states
        for start, end, part in self._parts:
            out = part(states, batch, caches[start:end], angles)
            if end in self._after:
                found[end] = states.clone()
        self.states = [found[place] for place in self._after]
        return out


def features_of(stack: TappedStack) -> Tensor:
    """The kept states of each token side by side [T, 3 H]."""
    return torch.cat(stack.states, -1)
