"""The caches of each sequence in groups, with cached prefixes shared between sequences.

The first group are token blocks: KV blocks, which also carry the names of prefixes. A model without attention has
them, too; they take no memory there. The other groups keep something else of a prefix under the names of its blocks
(`cache_group`). A sequence is admitted if it fits all groups, and a cached prefix ends where all of them have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from itertools import takewhile
from typing import TypeVar

from pagewire.engine_core.schedule.block_changes import Stored
from pagewire.engine_core.schedule.blocks import Block, BlockPool
from pagewire.engine_core.schedule.cache_group import CacheGroup
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.wire.block_names import ROOT
from pagewire.ipc.wire.steps import Row, StepPlan

G = TypeVar("G", bound=CacheGroup)


class KVCache:
    """The block pool, and the groups beside it, in terms of sequences and tokens."""

    def __init__(self, num_blocks: int, block_size: int, groups: Iterable[CacheGroup] = ()) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.groups = tuple(groups)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return self.pool.num_used / len(self.pool)

    def begin(self, running: Sequence_[Sequence], limited: bool) -> None:
        """Begin a plan; see `CacheGroup.begin`."""
        for group in self.groups:
            group.begin(running, limited)

    def chunk(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` tokens a row may run in this plan."""
        for group in self.groups:
            count = group.chunk(sequence, count)
        return count

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def cached_prefix(self, sequence: Sequence) -> list[Block]:
        """Full blocks that already hold the beginning of the sequence, without its last token.

        The last token must always be computed, as its logits give the next one. For the same reason there are none
        if the result needs the hidden states of the whole prompt. A prefix never ends within a medium, and only
        where every group can go on.
        """
        usable = prefix_names(sequence, self.block_size)
        blocks = takewhile(lambda block: block is not None, map(self.pool.find, usable))
        cached = [block for block in blocks if block is not None]
        end = sequence.shared_end = sequence.prefix_end(len(cached) * self.block_size, self.block_size)
        while (shorter := self._reach(sequence, end)) != end:
            end = shorter
        del cached[end // self.block_size :]
        return cached

    def _reach(self, sequence: Sequence, end: int) -> int:
        for group in self.groups:
            end = group.reach(sequence, end)
        return sequence.prefix_end(end, self.block_size)

    def admit(self, sequence: Sequence, watermark: int) -> bool:
        """Give a sequence its cached prefix and new blocks for the rest.

        Returns False, and does nothing, if a group lacks room, or fewer than `watermark` blocks would stay free.
        """
        cached = self.cached_prefix(sequence)
        if not self._fit(sequence, cached, watermark):
            return False
        self.pool.share(cached)
        num_new = self._num_new(sequence, cached)
        sequence.blocks, sequence.num_registered = cached, len(cached)
        sequence.computed = len(cached) * self.block_size
        self.grow(sequence, num_new)
        for group in self.groups:
            group.admit(sequence, sequence.computed)
        return True

    def fits(self, sequence: Sequence, watermark: int) -> bool:
        """True if `admit` would succeed."""
        return self._fit(sequence, self.cached_prefix(sequence), watermark)

    def _num_new(self, sequence: Sequence, cached: list[Block]) -> int:
        return self.blocks_for(len(sequence.token_ids)) - len(cached)

    def _fit(self, sequence: Sequence, cached: list[Block], watermark: int) -> bool:
        num_idle = sum(block.num_refs == 0 for block in cached)
        if self._num_new(sequence, cached) + num_idle + watermark > self.pool.num_free:
            return False
        return all(group.fits(sequence, len(cached) * self.block_size) for group in self.groups)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of blocks that the sequence still needs for its first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.blocks))

    def grow(self, sequence: Sequence, count: int) -> list[int]:
        """Append `count` new blocks to the sequence and return their ids.

        Raises:
            ValueError: fewer blocks are free.
        """
        blocks = self.pool.allocate(count)
        sequence.blocks += blocks
        sequence.room = len(sequence.blocks) * self.block_size
        return [block.block_id for block in blocks]

    def num_places(self, sequence: Sequence, missing: int, num_others: int) -> int:
        """Number of tokens for which a sequence may have blocks if a row of it has drafts; 0: it may have none.

        missing: blocks that it needs in any case. num_others: sequences, each of which may need a free block.
        """
        if not all(group.takes_drafts(sequence) for group in self.groups):
            return 0
        num_spare = max(0, self.pool.num_free - missing - num_others)
        return (len(sequence.blocks) + missing + num_spare) * self.block_size

    def fill(self, sequence: Sequence, row: Row) -> None:
        """Give a row that a sequence has just launched what it needs, say in it what that is, and name full blocks.

        Raises:
            ValueError: there are too few free blocks.
        """
        if sequence.computed > sequence.room:
            row.new_block_ids = self.grow(sequence, self.missing(sequence, sequence.computed))
        for group in self.groups:
            group.fill(sequence, row)
        if len(sequence.token_ids) // self.block_size > sequence.num_registered:
            self.register(sequence)

    def verify(self, sequence: Sequence, row: Row, num_rejected: int) -> None:
        """Take `computed` back after a row with drafts, of which the last `num_rejected` were wrong.

        Where a group goes back further, the next row runs the tokens between again.
        """
        sequence.recomputed_end = sequence.computed - num_rejected
        ends = [group.verify(sequence, row, num_rejected) for group in self.groups]
        sequence.computed = min([sequence.recomputed_end, *ends])

    def settle(self, plan: StepPlan) -> None:
        """End a plan, after which the next one can use all that it names and gives back."""
        for group in self.groups:
            group.settle(plan)

    def register(self, sequence: Sequence) -> None:
        """Name the blocks whose tokens are all known and computed (or launched), so that others can share them.

        Rows of the same plan can, since each layer writes all KV before it reads any.
        """
        computed = max(sequence.computed, sequence.recomputed_end)
        num_full = min(computed, len(sequence.token_ids)) // self.block_size
        if num_full <= sequence.num_registered:
            return
        sequence.name_blocks(self.block_size)
        for i in range(sequence.num_registered, num_full):
            self.name(sequence.blocks[i], sequence, i)
        sequence.num_registered = num_full

    def name(self, block: Block, sequence: Sequence, index: int) -> None:
        """Give a block that holds a sequence's block `index` that one's name, unless another one has it."""
        names = sequence.block_names
        named = self.pool.register(block, names[index], names[index - 1] if index else ROOT)
        if named and self.pool.changes is not None:
            self.pool.changes.append(stored(sequence, index, self.block_size))

    def free(self, sequence: Sequence) -> None:
        """Return what the sequence has to the groups. It has no row in the plan that is being made."""
        self.pool.free(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.room = sequence.computed = sequence.num_registered = sequence.recomputed_end = 0
        sequence.plain_end = 0
        for group in self.groups:
            group.free(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Name all that can be shared of a sequence that ends, between two plans."""
        self.register(sequence)
        for group in self.groups:
            group.register(sequence)

    def forget(self) -> None:
        """Drop all cached prefixes."""
        self.pool.forget()
        for group in self.groups:
            group.forget()

    def lose(self) -> None:
        """Drop all that the caches hold, because the workers are lost; no sequence runs."""
        self.pool.forget()
        for group in self.groups:
            group.lose()

    def group(self, kind: type[G]) -> G | None:
        """The group of a class; None if the model needs none."""
        return next((group for group in self.groups if isinstance(group, kind)), None)


def prefix_names(sequence: Sequence, block_size: int) -> list[bytes]:
    """The names of the blocks of which a cached prefix of a sequence may consist; see `KVCache.cached_prefix`."""
    if sequence.needs_all_positions:
        return []
    sequence.name_blocks(block_size)
    return sequence.block_names[: (len(sequence.token_ids) - 1) // block_size]


def stored(sequence: Sequence, index: int, block_size: int) -> Stored:
    """The event for routers that a block of a sequence now has its name."""
    names, begin = sequence.block_names, index * block_size
    parent = names[index - 1] if index else ROOT
    token_ids, source = sequence.token_ids[begin : begin + block_size], sequence.request.adapter
    if source is None:
        return Stored(names[index], parent, token_ids)
    return Stored(names[index], parent, token_ids, source.adapter_id, source.name)
