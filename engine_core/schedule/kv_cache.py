"""The KV blocks of each sequence, with cached prefixes shared between sequences."""

from __future__ import annotations

from itertools import takewhile

from pagewire.engine_core.schedule.block_changes import Stored
from pagewire.engine_core.schedule.blocks import Block, BlockPool
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.wire.block_names import ROOT, name_blocks


class KVCache:
    """The block pool in terms of sequences and tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return 1.0 - self.pool.num_free / len(self.pool)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def cached_prefix(self, sequence: Sequence) -> list[Block]:
        """Full blocks that already hold the beginning of the sequence, without its last token.

        The last token must always be computed, as its logits give the next one. For the same reason there are none
        if the result needs the hidden states of the whole prompt. A prefix never ends within a medium.
        """
        if sequence.needs_all_positions:
            return []
        self._name_blocks(sequence)
        usable = sequence.block_names[: (len(sequence.token_ids) - 1) // self.block_size]
        blocks = takewhile(lambda block: block is not None, map(self.pool.find, usable))
        cached = [block for block in blocks if block is not None]
        while (end := len(cached) * self.block_size) != (start := sequence.boundary(end)):
            del cached[start // self.block_size :]
        return cached

    def admit(self, sequence: Sequence, watermark: int) -> bool:
        """Give a sequence its cached prefix and new blocks for the rest.

        Returns False, and does nothing, if fewer than `watermark` blocks would stay free.
        """
        cached = self.cached_prefix(sequence)
        num_new = self._num_new(sequence, cached)
        if not self._fit(num_new, cached, watermark):
            return False
        self.pool.share(cached)
        sequence.blocks = cached + self.pool.allocate(num_new)
        sequence.computed = len(cached) * self.block_size
        sequence.num_registered = len(cached)
        return True

    def fits(self, sequence: Sequence, watermark: int) -> bool:
        """True if `admit` would succeed."""
        cached = self.cached_prefix(sequence)
        return self._fit(self._num_new(sequence, cached), cached, watermark)

    def _num_new(self, sequence: Sequence, cached: list[Block]) -> int:
        return self.blocks_for(len(sequence.token_ids)) - len(cached)

    def _fit(self, num_new: int, cached: list[Block], watermark: int) -> bool:
        num_idle = sum(block.num_refs == 0 for block in cached)
        return num_new + num_idle + watermark <= self.pool.num_free

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
        return [block.block_id for block in blocks]

    def register(self, sequence: Sequence) -> None:
        """Name the blocks whose tokens are all known and computed (or launched), so that others can share them."""
        num_full = min(sequence.computed, len(sequence.token_ids)) // self.block_size
        if num_full <= sequence.num_registered:
            return
        self._name_blocks(sequence)
        for i in range(sequence.num_registered, num_full):
            named = self.pool.register(sequence.blocks[i], sequence.block_names[i])
            if named and self.pool.changes is not None:
                self.pool.changes.append(self._stored(sequence, i))
        sequence.num_registered = num_full

    def free(self, sequence: Sequence) -> None:
        """Return the sequence's blocks to the pool."""
        self.pool.free(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = sequence.num_registered = 0

    def _name_blocks(self, sequence: Sequence) -> None:
        name_blocks(sequence.block_names, sequence.token_ids, self.block_size, sequence.block_keys)

    def _stored(self, sequence: Sequence, index: int) -> Stored:
        names, begin = sequence.block_names, index * self.block_size
        parent = names[index - 1] if index else ROOT
        token_ids, source = sequence.token_ids[begin : begin + self.block_size], sequence.request.adapter
        if source is None:
            return Stored(names[index], parent, token_ids)
        return Stored(names[index], parent, token_ids, source.adapter_id, source.name)
