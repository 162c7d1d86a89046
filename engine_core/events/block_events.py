"""Sends the frontends that follow KV blocks which names come and go: a snapshot, then changes in numbered batches.

    pool.changes --(every INTERVAL_SECONDS)--> Blocks(0, 1, 2, ...) --> each follower

While there is no follower, and nothing is published (`kv_events`), the pool records nothing. What a follower does
not read is not kept for it: its numbers go on, so it notices the gap, and calls `follow_blocks` again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from pagewire.engine_core.clients.clients import AttachedClient, Clients
from pagewire.engine_core.events.kv_events import KVPublisher
from pagewire.engine_core.schedule.block_changes import net_effect
from pagewire.engine_core.schedule.blocks import BlockPool
from pagewire.engine_core.wings.wing import Wing
from pagewire.ipc.wire.messages import Blocks

INTERVAL_SECONDS = 0.02  # between two batches: by as much a router knows less than the core
NAMES_AT_ONCE = 1 << 15  # of a snapshot, in one message: a megabyte


@dataclass(slots=True)
class BlockFollower:
    """A frontend that follows blocks. number: of its next message. behind: its last message could not be sent."""

    client: AttachedClient
    number: int = 0
    behind: bool = False


class BlockEvents(Wing):
    """The followers of the blocks of a pool. publisher: gets all changes, too; None if nothing is published."""

    def __init__(self, clients: Clients, pool: BlockPool, publisher: KVPublisher | None = None) -> None:
        self._clients, self._pool, self._publisher = clients, pool, publisher
        if publisher is not None:
            pool.changes = []
        self._followers: dict[bytes, BlockFollower] = {}
        self._next = 0.0  # time of the next batch

    def follow(self, client: AttachedClient) -> None:
        """Send a frontend all names, and from now on what comes and goes."""
        if self._pool.changes is None:
            self._pool.changes = []
        follower = self._followers[client.identity] = BlockFollower(client)
        for message in snapshot(self._pool):
            self._send(follower, message)

    def wait(self, now: float) -> float:
        """Seconds after which `flush` has something to do; infinite if nothing is to be sent."""
        behind = any(follower.behind for follower in self._followers.values())
        return max(0.0, self._next - now) if self._pool.changes or behind else math.inf

    def flush(self, now: float) -> None:
        """Send what has changed, unless the last batch is only a moment ago."""
        if self._pool.changes is None or now < self._next:
            return
        attached = self._clients.attached
        for identity, follower in list(self._followers.items()):
            if attached.get(identity) is not follower.client:
                del self._followers[identity]
        if not self._followers and self._publisher is None:
            self._pool.changes = None
            return
        changes, self._pool.changes = self._pool.changes, []
        if not changes and not any(follower.behind for follower in self._followers.values()):
            return
        self._next = now + INTERVAL_SECONDS
        if changes and self._publisher is not None:
            self._publisher.publish(changes)
        reset, came, went = net_effect(changes)
        batch = Blocks(0, reset, b"".join(came), b"".join(went))
        for follower in self._followers.values():
            if changes or follower.behind:  # an empty batch shows a follower its gap
                self._send(follower, batch)

    def _send(self, follower: BlockFollower, message: Blocks) -> None:
        message.number = follower.number
        follower.number += 1
        follower.behind = not self._clients.send(follower.client.identity, message)


def snapshot(pool: BlockPool) -> Iterator[Blocks]:
    """All names of a pool, in messages of limited size; the first one resets what was known before."""
    names = iter(list(pool.named))
    reset = True
    while (joined := b"".join(islice(names, NAMES_AT_ONCE))) or reset:
        yield Blocks(0, reset, joined)
        reset = False
