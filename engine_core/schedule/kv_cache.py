"""Which blocks hold a request's keys and values, and which of them it shares by prefix."""

from __future__ import annotations

from itertools import takewhile

from pagewire.engine_core.schedule.block_hash import ROOT, hash_block
from pagewire.engine_core.schedule.blocks import Block, BlockPool
from pagewire.engine_core.schedule.sequence import Sequence


class KVCache:
    """The block pool, in terms of requests and tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def cached_prefix(self, request: Sequence) -> list[Block]:
        """Blocks that already hold the beginning of the request, at most all but its last token.

        A request that wants log probabilities of its prompt gets none: they come from computing it.
        """
        if request.wants_prompt_logprobs:
            return []
        self._name_blocks(request)
        usable = request.block_names[: (len(request.token_ids) - 1) // self.block_size]
        blocks = takewhile(lambda block: block is not None, map(self.pool.find, usable))
        return [block for block in blocks if block is not None]

    def admit(self, request: Sequence, watermark: int) -> bool:
        """Give the request its cached prefix and new blocks for the rest, if then `watermark` stay free."""
        cached = self.cached_prefix(request)
        num_new = self.blocks_for(len(request.token_ids)) - len(cached)
        num_idle = sum(block.num_refs == 0 for block in cached)
        if num_new + num_idle + watermark > self.pool.num_free:
            return False
        self.pool.share(cached)
        request.blocks = cached + self.pool.allocate(num_new)
        request.computed = len(cached) * self.block_size
        request.num_registered = len(cached)
        return True

    def missing(self, request: Sequence, num_tokens: int) -> int:
        """Blocks that the request lacks for its first `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(request.blocks))

    def grow(self, request: Sequence, count: int) -> list[int]:
        """Give the request `count` more blocks; their ids.

        Raises:
            ValueError: fewer are free.
        """
        blocks = self.pool.allocate(count)
        request.blocks += blocks
        return [block.block_id for block in blocks]

    def register(self, request: Sequence) -> None:
        """Name the request's blocks that are full, known and launched, so that others may share them."""
        num_full = min(request.computed, len(request.token_ids)) // self.block_size
        if num_full <= request.num_registered:
            return
        self._name_blocks(request)
        for i in range(request.num_registered, num_full):
            self.pool.register(request.blocks[i], request.block_names[i])
        request.num_registered = num_full

    def free(self, request: Sequence) -> None:
        """Give the request's blocks back, last first."""
        self.pool.free(reversed(request.blocks))
        request.blocks = []
        request.computed = request.num_registered = 0

    def _name_blocks(self, request: Sequence) -> None:
        names, size = request.block_names, self.block_size
        for i in range(len(names), len(request.token_ids) // size):
            parent = names[-1] if names else ROOT
            extra = b"" if names else request.namespace
            names.append(hash_block(parent, request.token_ids[i * size : (i + 1) * size], extra))
