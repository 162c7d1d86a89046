"""Gives blocks to other cores that ask for them by name: those in memory, and those on disk.

    find_blocks --> find()
    fetch_blocks --> fetch() --> MoveBlocks(lend) --> workers --> LentBlocks --> answer

The workers copy one part at a time between two steps, and read, hash and join it in a thread beside them. What
others have not read yet is bounded: a caller shows by the ticket of an answer that it has read it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.block_names import ROOT, split_names
from pagewire.ipc.wire.calls import TICKET_BYTES
from pagewire.ipc.wire.tier_messages import (
    MAX_PARTS,
    NOT_IN_MEMORY,
    PART_BYTES,
    BlockOut,
    LentBlocks,
    MoveBlocks,
    state_name,
)

MAX_CALLERS = 16  # that have any


class BlockCaller(Protocol):
    """A call for blocks; see `FrontendCall`. identity: of the caller's connection."""

    @property
    def identity(self) -> bytes:
        """The caller's connection."""

    def reply(self, result: bytes) -> None:
        """Answer with a result."""


@dataclass(slots=True)
class BlockOrder:
    """Blocks that a caller waits for. ticket: of the answer."""

    caller: BlockCaller
    names: list[bytes]
    ticket: bytes = field(default_factory=lambda: os.urandom(TICKET_BYTES))


class BlockLending:
    """What this core gives to others.

    kv: the caches. on_disk: the names of blocks on disk. attached: the connections that there are.
    block_bytes, state_bytes: of a KV block, and of a state slot.

    Attributes:
        identity: of the blocks: model, layout and code; empty: not known, and nothing is given.
        num_lent: blocks that were given. bytes_lent: of the answers with them.
    """

    def __init__(
        self,
        kv: KVCache,
        on_disk: set[bytes],
        worker: WorkerGroup,
        attached: Container[bytes],
        block_bytes: int,
        state_bytes: int,
    ) -> None:
        self.identity = b""
        self.num_lent = self.bytes_lent = 0
        self._kv, self._on_disk, self._worker, self._attached = kv, on_disk, worker, attached
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self._orders: deque[BlockOrder] = deque()
        self._lending: tuple[int, BlockOrder] | None = None  # the workers have it
        self._unread: dict[bytes, list[bytes]] = {}  # by connection: tickets, in order
        self._next_number = 1

    def find(self, identity: bytes, names: bytes) -> bytes:
        """Which blocks are there: a byte for each name. identity: as the caller's blocks have it.

        Raises:
            ValueError: these are no names.
        """
        asked = list(split_names(names))
        if not self._gives(identity):
            return bytes(len(asked))
        return bytes(self._located(name) is not None for name in asked)

    def fetch(self, caller: BlockCaller, identity: bytes, names: bytes, ticket: bytes) -> None:
        """Answer with blocks, now or later. ticket: of the last answer that the caller has read.

        Raises:
            ValueError: these are no names. EngineBusyError: too many answers are not read.
        """
        order = BlockOrder(caller, list(split_names(names)))
        if not self._gives(identity):
            caller.reply(b"")
            return
        for connection in [each for each in self._unread if each not in self._attached]:
            del self._unread[connection]
        unread = self._unread.get(caller.identity, [])
        if ticket in unread:
            del unread[: unread.index(ticket) + 1]
        if len(unread) >= MAX_PARTS:
            raise EngineBusyError(f"{MAX_PARTS} answers with blocks are not read yet")
        if caller.identity not in self._unread and len(self._unread) >= MAX_CALLERS:
            raise EngineBusyError(f"blocks go to {MAX_CALLERS} other cores at a time")
        unread.append(order.ticket)
        self._unread[caller.identity] = unread
        self._orders.append(order)
        self._lend_next()

    def lent(self, lent: LentBlocks) -> None:
        """Answer with what the workers have made."""
        if self._lending is None or self._lending[0] != lent.number:
            return  # asked before the workers were lost
        order, self._lending = self._lending[1], None
        self.num_lent += lent.num_blocks
        self.bytes_lent += len(lent.entries.data)
        order.caller.reply(b"".join([order.ticket, lent.entries.data]))
        self._lend_next()

    def worker_lost(self) -> None:
        """Answer those that wait: there is nothing."""
        waiting = [*([self._lending[1]] if self._lending is not None else []), *self._orders]
        self.identity, self._lending = b"", None
        self._orders.clear()
        for order in waiting:
            order.caller.reply(order.ticket)

    def _gives(self, identity: bytes) -> bool:
        return bool(self.identity) and identity == self.identity and self._worker.accepting

    def _located(self, name: bytes) -> BlockOut | None:
        """Where a block is; None if it is not there."""
        if (block := self._kv.pool.find(name)) is not None:
            return BlockOut(block.block_id, name, block.parent)
        slots = self._kv.group(StateSlots)
        if slots is not None and (slot := slots.pool.find(state_name(name))) is not None:
            return BlockOut(slot.block_id, name, slot.parent, True)
        return BlockOut(NOT_IN_MEMORY, name, ROOT) if name in self._on_disk else None

    def _lend_next(self) -> None:
        """Have the workers make the next answer, unless they make one."""
        while self._orders and self._lending is None:
            order = self._orders.popleft()
            if blocks := list(self._first_of(order.names)):
                self._lending = self._next_number, order
                self._next_number += 1
                self._worker.send(MoveBlocks(self._lending[0], lend=blocks))
            else:
                order.caller.reply(order.ticket)

    def _first_of(self, names: list[bytes]) -> Iterator[BlockOut]:
        """The blocks that are there, as many as an answer may have; one at least."""
        num_bytes = 0
        for name in names:
            if (block := self._located(name)) is not None:
                size = self._state_bytes if block.is_state else self._block_bytes
                if num_bytes and num_bytes + size > PART_BYTES:
                    return
                num_bytes += size
                yield block
