"""The interface of a drafter: a part of the worker that proposes tokens to follow those that were sampled.

The core puts them into the sequence's next row, where each counts only if it is the token that is sampled in its
place. So drafts never change an output, and a drafter may round, lag behind or be wrong; only speed depends on it.
(Where typical acceptance is chosen, outputs depend on drafts: `sample/typical.py`.)

In a group of ranks each has a drafter, and all of them propose the same: what the ranks compute together in
`propose`, they compute in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan
from pagewire.kernels.data.paging import Cache
from pagewire.workers.network.loaded import LoadedModel


class RowOver(NamedTuple):
    """A row of a step that is over; its tokens and what was sampled after them are in its slot.

    start: the position of its first token. num_tokens: how many of its tokens count; drafts that were wrong do not.
    first: the index of its first token in the batch. num_drafts: wanted to follow the slot's tokens.
    hidden: the model's final hidden state [H] from which the last of them was sampled; None if none was.
    """

    slot: int
    start: int
    num_tokens: int
    first: int
    num_drafts: int
    hidden: Tensor | None


class Drafter(Protocol):
    """Proposes drafts."""

    name: str | None
    """Of its architecture; None if there is no drafter."""
    follows: bool
    """True if `propose` must see every row of every step; else those that want drafts."""
    block_bytes: int
    """Bytes that it adds to a block of the KV cache; 0 if it has no KV cache."""
    spare_bytes: int
    """Bytes of its KV cache beside: for drafts whose places belong to no block yet."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights; 0 while they are dropped."""

    @property
    def caches(self) -> Sequence[Cache]:
        """Of each of its layers; empty while their memory is released."""

    def features(self, hidden: Tensor) -> Tensor | None:
        """What it takes from the model for each token [T, F] of the step that was just launched.

        hidden: the model's final hidden states [T or more, H].
        """

    def load(self, target: LoadedModel) -> None:
        """Load the weights, if they are dropped. target: the model, whose weights are loaded.

        Raises:
            LoadError: they cannot be loaded, or do not fit the model.
        """

    def unload(self) -> None:
        """Drop the weights."""

    def allocate(self, num_blocks: int) -> None:
        """Take memory for its KV cache, for as many blocks as the model's own has.

        Raises:
            OSError: there is not enough.
        """

    def free(self) -> None:
        """Give the memory of its KV cache back, and forget every sequence."""

    def apply(self, plan: StepPlan) -> None:
        """Note which slots and blocks a plan gives out. Called for every plan, before it is launched."""

    def propose(self, rows: Sequence[RowOver], features: Tensor | None) -> list[list[int]]:
        """Drafts for each row, at most as many as it wants, and perhaps none.

        features: of this step.
        """


class NoDrafter:
    """Stands in for a drafter where the worker has none; methods as in `Drafter`."""

    name: str | None = None
    follows = False
    block_bytes = spare_bytes = weight_bytes = 0
    caches: Sequence[Cache] = ()

    def features(self, hidden: Tensor) -> Tensor | None:
        """Nothing."""
        return None

    def load(self, target: LoadedModel) -> None:
        """Nothing to do."""

    def unload(self) -> None:
        """Nothing to do."""

    def allocate(self, num_blocks: int) -> None:
        """Nothing to do."""

    def free(self) -> None:
        """Nothing to do."""

    def apply(self, plan: StepPlan) -> None:
        """Nothing to do."""

    def propose(self, rows: Sequence[RowOver], features: Tensor | None) -> list[list[int]]:
        """No drafts."""
        return [[] for _ in rows]
