"""A pool of KV blocks or state slots, with reference counts and least-recently-used eviction. O(1) per block.

Free blocks form a doubly linked list through the blocks themselves:

    front                                                     back
    [ blocks without a name | least recently used ... most recently used ]

Blocks are allocated from the front. Until then a free block keeps its content and can be looked up by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pagewire.engine_core.schedule.block_changes import CLEARED, Change, Removed
from pagewire.ipc.wire.block_names import ROOT


class Block:
    """One KV block, or one state slot.

    num_refs: sequences that use it. name: see `ipc.block_names`; None until the block is full, its tokens known.
    parent: the name of the block before it, while it has a name itself.
    """

    __slots__ = ("block_id", "name", "next", "num_refs", "parent", "prev")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_refs = 0
        self.name: bytes | None = None
        self.parent = ROOT
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.num_refs}, named={self.name is not None})"


class EvictedBlock(NamedTuple):
    """A block that was allocated while its content could still be found under its name."""

    block_id: int
    name: bytes
    parent: bytes


class BlockPool:
    """All blocks of a cache, ids 0 to num_blocks - 1.

    Attributes:
        changes: a list that gets what becomes of names, in order; None while nothing reads it.
        evicted: a list that gets the blocks that lose their content; None if nothing reads it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.named: dict[bytes, Block] = {}
        self.num_free = 0
        self.num_evictions = 0
        self.changes: list[Change] | None = None
        self.evicted: list[EvictedBlock] | None = None
        self._ends = Block(-1)  # sentinel: next is the front, prev the back
        self._ends.prev = self._ends.next = self._ends
        for block in self.blocks:
            self._link(self._ends.prev, block)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_used(self) -> int:
        """Number of blocks that sequences use."""
        return len(self.blocks) - self.num_free

    def find(self, name: bytes) -> Block | None:
        """The block with this name, in use or free; None if there is none."""
        return self.named.get(name)

    def allocate(self, count: int) -> list[Block]:
        """Take `count` free blocks, each with one reference; their old content is lost.

        Raises:
            ValueError: fewer blocks are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks requested, {self.num_free} free")
        return [self._take_front() for _ in range(count)]

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each block; free ones leave the free list."""
        for block in blocks:
            if block.num_refs == 0:
                self._unlink(block)
            block.num_refs += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop a reference to each block, in the given order; blocks without references become free.

        Pass a sequence's blocks last first: the end of its prefix is then evicted before the beginning, which
        more sequences can share.
        """
        for block in blocks:
            block.num_refs -= 1
            assert block.num_refs >= 0, f"{block} freed twice"
            if block.num_refs == 0:
                self._link(self._ends if block.name is None else self._ends.prev, block)

    def register(self, block: Block, name: bytes, parent: bytes = ROOT) -> bool:
        """Give `block` a name, unless another block already has it. Returns True if the block was given it."""
        if block.name is not None or name in self.named:
            return False
        block.name, block.parent = name, parent
        self.named[name] = block
        return True

    def unname(self, block: Block) -> None:
        """Drop the name of a block; if it is free, it is the next to be allocated."""
        self._drop_name(block)
        if block.num_refs == 0:
            self._unlink(block)
            self._link(self._ends, block)

    def forget(self) -> None:
        """Drop all names, so that no block computed so far is shared again."""
        for block in self.named.values():
            block.name = None
        self.named.clear()
        if self.changes is not None:
            self.changes.append(CLEARED)
        if self.evicted is not None:
            self.evicted.clear()

    def free_order(self) -> Iterator[int]:
        """Ids of the free blocks, in the order of allocation."""
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block.block_id
            block = block.next

    def _take_front(self) -> Block:
        block = self._ends.next
        assert block is not None and block is not self._ends
        self._unlink(block)
        if block.name is not None:
            if self.evicted is not None:
                self.evicted.append(EvictedBlock(block.block_id, block.name, block.parent))
            self._drop_name(block)
            self.num_evictions += 1
        block.num_refs = 1
        return block

    def _drop_name(self, block: Block) -> None:
        assert block.name is not None
        del self.named[block.name]
        if self.changes is not None:
            self.changes.append(Removed(block.name))
        block.name = None

    def _link(self, before: Block | None, block: Block) -> None:
        assert before is not None and before.next is not None
        block.prev, block.next = before, before.next
        before.next.prev = block
        before.next = block
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        assert block.prev is not None and block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_free -= 1
