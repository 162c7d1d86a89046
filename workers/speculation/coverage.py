"""Which tokens a drafter's KV cache holds.

The cache has the blocks of the model's own, by the same ids, but a drafter runs only when drafts are wanted, so it
may lack what the model has computed long ago. Slots know how far their own sequence is held. Blocks know whether
all of their tokens are: a block keeps its tokens until it is given out again, so that holds for every sequence
that finds it in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagewire.ipc.wire.worker_messages import StepPlan
from pagewire.workers.batch.slots import Slots


class Coverage:
    """The tokens of each slot that a drafter's KV cache holds.

    num_held: int64 [max_num_seqs], the slot's first tokens that are held. is_full: bool [num_blocks], the blocks
    that are held as a whole.
    """

    def __init__(self, slots: Slots, num_blocks: int) -> None:
        self._slots = slots
        self.num_held: NDArray[np.int64] = np.zeros(len(slots.num_tokens), np.int64)
        self.is_full: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._drafts: dict[int, Sequence[int]] = {}  # by slot, held behind `num_held`: some may be right

    def apply(self, plan: StepPlan) -> None:
        """Forget what is held of slots and blocks that a plan gives out."""
        starts = {row.slot: row.start for row in plan.rows} if plan.inits else {}
        for init in plan.inits:
            self.num_held[init.slot] = 0
            self._drafts.pop(init.slot, None)
            num_cached = starts.get(init.slot, 0) // self._slots.block_size
            self.is_full[init.block_ids[num_cached:]] = False
        for row in plan.rows:
            if row.new_block_ids:
                self.is_full[row.new_block_ids] = False

    def first_missing(self, slot: int) -> int:
        """The first token of a slot that is to be computed; the last one always is, since its logits are wanted."""
        slots, held = self._slots, int(self.num_held[slot])
        last = int(slots.num_tokens[slot]) - 1
        for draft in self._drafts.pop(slot, ()):
            if held == last or slots.tokens[slot, held] != draft:
                break
            held += 1
        blocks = slots.block_table[slot, : slots.num_blocks[slot]]
        while (block := held // slots.block_size) < len(blocks) and self.is_full[blocks[block]]:
            held = (block + 1) * slots.block_size
        return min(held, last)

    def extend(self, slot: int, end: int) -> None:
        """Note that tokens up to `end` are being computed; those behind the slot's blocks do not stay."""
        size, num_blocks = self._slots.block_size, int(self._slots.num_blocks[slot])
        held = min(end, num_blocks * size)
        blocks = self._slots.block_table[slot, : held // size]
        self.num_held[slot] = held
        self.is_full[blocks] = True

    def keep_drafts(self, slot: int, drafts: Sequence[int]) -> None:
        """Note that these drafts have been computed behind the slot's last token."""
        num_tokens = int(self._slots.num_tokens[slot])
        if self.num_held[slot] == num_tokens:
            room = int(self._slots.num_blocks[slot]) * self._slots.block_size - num_tokens
            self._drafts[slot] = drafts[:room]
