"""The swap space: places in the workers' host memory for what their KV memory has evicted. Pure: no IO, no clock.

A place holds a block or the states behind one. They are found by name, and the least recently used give way, as in
the KV cache itself: so a pool of places is a `BlockPool`. What is copied is decided here alone, and the workers
obey in order. So nothing that is named here is ever missing, but all of it is lost with the workers.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagewire.engine_core.schedule.blocks import Block, BlockPool
from pagewire.ipc.wire.tier_messages import BlockBack, BlockOut, SwapCopy


class SwapSpace:
    """The places for blocks and for states, by name (`state_name` for states). It has none before `open`.

    Attributes:
        num_out, num_back: blocks and states that were copied there, and back, since the core started.
    """

    def __init__(self) -> None:
        self._blocks, self._states = BlockPool(0), BlockPool(0)
        self.num_out = self.num_back = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks.named or name in self._states.named

    def __len__(self) -> int:
        return len(self._blocks.named) + len(self._states.named)

    @property
    def usage(self) -> float:
        """Fraction of the places for blocks that hold one, 0 to 1."""
        return len(self._blocks.named) / max(1, len(self._blocks))

    def open(self, num_blocks: int, num_states: int) -> None:
        """Begin with this many empty places: new workers have allocated them, and nothing reads from one yet."""
        self._blocks, self._states = BlockPool(num_blocks), BlockPool(num_states)

    def take(self, block: BlockOut) -> SwapCopy | None:
        """How to copy what was just evicted; None: it is here already, or all places are being read.

        A place that is taken is used from then on, and so is one that has the content already.
        """
        pool = self._pool(block.is_state)
        if (known := pool.find(block.name)) is not None:
            pool.share([known])
            pool.free([known])
            return None
        if not pool.num_free:
            return None
        places = pool.allocate(1)
        pool.register(places[0], block.name, block.parent)
        pool.free(places)
        self.num_out += 1
        return SwapCopy(block.block_id, places[0].block_id, block.is_state)

    def pin(self, back: BlockBack) -> tuple[SwapCopy, Block]:
        """How to copy what is here into the KV memory, and its place, which keeps it until `unpin`."""
        pool = self._pool(back.is_state)
        place = pool.named[back.name]
        pool.share([place])
        return SwapCopy(back.block_id, place.block_id, back.is_state), place

    def unpin(self, copies: Iterable[SwapCopy], places: Iterable[Block]) -> None:
        """Let places go that were pinned for these copies."""
        for copy, place in zip(copies, places, strict=True):
            self._pool(copy.is_state).free([place])

    def forget(self) -> None:
        """Drop all names. Places that are pinned stay so."""
        self._blocks.forget()
        self._states.forget()

    def _pool(self, is_state: bool) -> BlockPool:
        return self._states if is_state else self._blocks
