"""Sends each request to the core that suits it best, and knows on which core it is until it has ended.

submit --(placement)--> Ledger --> Replica 0 ... n --> CoreClient --> core
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from itertools import compress
from typing import Any

from pagewire.frontend.client import CoreClient
from pagewire.frontend.route.adapters import RouterAdapters
from pagewire.frontend.route.ledger import Ledger, Work
from pagewire.frontend.route.members import Members
from pagewire.frontend.route.placement import Policy
from pagewire.frontend.route.replica import Placement, Replica, ReplicaState
from pagewire.ipc.errors import EngineAsleepError, EngineBusyError, EngineDeadError, EngineStalledError
from pagewire.ipc.wire.block_names import split_names
from pagewire.ipc.wire.messages import Blocks, Deltas, Request

BUSY_SECONDS = 1.0  # for which a core that refuses requests, such as one that shuts down, gets none
# Another core may take such a request.
BUSY = tuple(kind.__name__ for kind in (EngineBusyError, EngineStalledError, EngineAsleepError))


class Dispatcher:
    """The requests on the cores of a router. Thread-safe; uses the lock of the members.

    wake: set when a core that drains may have no requests left.

    Attributes:
        ledger: where each request is. adapters: those that the cores know.
    """

    def __init__(self, members: Members, policy: Policy, wake: threading.Event) -> None:
        self.ledger = Ledger(policy)
        self.adapters = RouterAdapters(members.lock, members.up)
        self._members, self._lock, self._wake = members, members.lock, wake

    def submit(self, requests: Sequence[Request]) -> list[tuple[Request, ValueError]]:
        """Send each request to the core that suits it best. Otherwise as `CoreClient.submit`."""
        refused, _ = self._submit([self._work(request) for request in requests])
        return refused

    def _submit(
        self, works: Sequence[Work], excluded: Iterable[int] = ()
    ) -> tuple[list[tuple[Request, ValueError]], list[Placement]]:
        """Send requests, all or none. excluded: numbers of cores that shall not get them."""
        tried: dict[int, Exception] = {
            number: EngineBusyError("all engine cores are busy") for number in excluded
        }
        refused: list[tuple[Request, ValueError]] = []
        sent: list[Placement] = []
        with self._lock:
            while works:
                batches: dict[int, list[Work]] = {}
                try:
                    for work in works:
                        placement = self.ledger.put(work, self._pick(work, tried), time.monotonic())
                        sent.append(placement)
                        batches.setdefault(placement.replica.number, []).append(work)
                except BaseException:
                    self.abort([placement.request.key for placement in sent])
                    raise
                works = []
                for number, batch in batches.items():
                    try:
                        replica = self._members.get(number)
                        refused += self._send(replica, replica.client, batch)
                    except (EngineDeadError, EngineBusyError) as error:  # another core may take them
                        tried[number] = error
                        works += batch
                        keys = {work.request.key for work in batch}
                        sent = [placement for placement in sent if placement.request.key not in keys]
        return refused, sent

    def _send(
        self, replica: Replica, client: CoreClient, works: Sequence[Work]
    ) -> list[tuple[Request, ValueError]]:
        """Send requests that are in the ledger to one core; those that it does not get are taken out again."""
        now = time.monotonic()
        try:
            refused = client.submit([self.adapters.addressed(work.request, replica) for work in works])
        except BaseException:
            for work in works:
                self.ledger.drop(work.request.key, now)
            raise
        for request, _ in refused:
            self.ledger.drop(request.key, now)
        return refused

    def _pick(self, work: Work, tried: dict[int, Exception]) -> Replica:
        """The core for a request, none of the `tried`; one that is busy only if all others are as well.

        Raises:
            EngineBusyError, EngineDeadError: there is none.
        """
        now = time.monotonic()
        candidates = [replica for replica in self._members.up() if replica.number not in tried]
        candidates = self.adapters.able(work.request, candidates)
        calm = [replica for replica in candidates if replica.busy_until <= now]
        if not candidates:
            busy = [error for error in tried.values() if isinstance(error, EngineBusyError)]
            raise next(
                iter(busy or tried.values()), self._members.dead or EngineDeadError("no engine core is up")
            )
        return self.ledger.pick(work, calm or candidates)

    def submit_to(
        self, replica: Replica, client: CoreClient, requests: Sequence[Request]
    ) -> list[tuple[Request, ValueError]]:
        """Send requests to this core. client: of the core that is meant, which may be lost by now."""
        works = [self._work(request) for request in requests]
        with self._lock:
            for work in works:
                self.ledger.put(work, replica, time.monotonic())
            return self._send(replica, client, works)

    def abort(self, keys: Sequence[int] = (), sequences: Sequence[tuple[int, int]] = ()) -> None:
        """Drop requests, or single sequences (key, index) of them, wherever they are."""
        now = time.monotonic()
        by_core: dict[Replica, tuple[list[int], list[tuple[int, int]]]] = {}
        with self._lock:
            for key, index in sequences:
                if (placement := self.ledger.placed.get(key)) is not None:
                    by_core.setdefault(placement.replica, ([], []))[1].append((key, index))
                    self.ledger.end_sequence(key, index, now)
            for key in keys:
                if (placement := self.ledger.drop(key, now)) is not None:
                    by_core.setdefault(placement.replica, ([], []))[0].append(key)
            for replica, (whole, single) in by_core.items():
                replica.client.abort(whole, single)
                self._check_drained(replica)

    def take_back(self, replica: Replica, keys: Sequence[int]) -> list[int]:
        """Take requests off a core, to go on elsewhere. Returns the keys of those that were still there."""
        now = time.monotonic()
        with self._lock:
            moved = [key for key in keys if self.ledger.is_on(key, replica)]
            for key in moved:
                self.ledger.drop(key, now)
            replica.num_moved += len(moved)
            return moved

    def forget(self, replica: Replica) -> list[int]:
        """Forget the requests and blocks of a core that is lost. Returns the keys of the requests."""
        with self._lock:
            keys = self.ledger.forget(replica, time.monotonic())
            replica.num_moved += len(keys)
            return keys

    def drop(self, keys: Sequence[int]) -> None:
        """Forget requests that a core could not read."""
        with self._lock:
            for key in keys:
                self.ledger.drop(key, time.monotonic())

    def _work(self, request: Request) -> Work:
        assert self._members.info is not None  # a core was reached before the first request
        return Work.of(request, self._members.info)

    def num_requests(self, replica: Replica) -> int:
        """The number of requests on a core."""
        with self._lock:
            return len(self.ledger.on(replica))

    def num_blocks(self, replica: Replica) -> int:
        """The number of cached blocks that a core has reported."""
        with self._lock:
            return self.ledger.index.num_names(replica.number)

    def take_deltas(self, replica: Replica, message: Deltas) -> Deltas:
        """Record new output of a core. Returns what is to be handed on.

        Requests that the core is too busy for go to another one, and are not handed on.
        """
        now = time.monotonic()
        busy: set[int] = set()
        with self._lock:
            placed = self.ledger.placed
            # Output of a request that went elsewhere since would change what the other core generates.
            deltas = [delta for delta in message.deltas if self.ledger.is_on(delta.key, replica)]
            here = [self.ledger.record_output(key, replica) for key in message.keys]
            for delta in deltas:
                refused = delta.error_type in BUSY and delta.finish_reason == "error"
                if refused and (placement := placed.get(delta.key)) is not None and not placement.started:
                    busy.add(delta.key)
                elif delta.key not in busy:
                    self.ledger.output(replica, delta, now)
            refused_by_all = {key for key in busy if not self._elsewhere(replica, placed[key], now)}
            self._check_drained(replica)
        return Deltas(
            [delta for delta in deltas if delta.key not in busy or delta.key in refused_by_all],
            list(compress(message.keys, here)),
            list(compress(message.token_ids, here)),
        )

    def _elsewhere(self, replica: Replica, placement: Placement, now: float) -> bool:
        """Send a request that a core has refused to another one; False if there is none that takes it."""
        replica.busy_until = now + BUSY_SECONDS
        request = placement.request
        self.ledger.drop(request.key, now)
        tried = placement.refused_by | {replica.number}
        try:
            refused, sent = self._submit([self._work(request)], tried)
        except (EngineBusyError, EngineDeadError):
            return False
        for again in sent:
            again.refused_by = tried
        replica.num_moved += 1
        return not refused

    def take_blocks(self, replica: Replica, blocks: Blocks) -> None:
        """Record which names came and went; after a gap, begin anew."""
        with self._lock:
            if blocks.number != replica.next_blocks and blocks.number != 0:
                if replica.next_blocks is not None:
                    replica.num_gaps += 1
                    replica.follow_blocks()
                return
            replica.next_blocks = blocks.number + 1
            index = self.ledger.index
            if blocks.reset:
                index.reset(replica.number)
            index.remove(replica.number, split_names(blocks.removed))
            index.store(replica.number, split_names(blocks.stored))

    def drained(self) -> Collection[Replica]:
        """The cores to leave: drained ones without requests."""
        with self._lock:
            draining = [each for each in self._members if each.state is ReplicaState.DRAINING]
            drained = [replica for replica in draining if not self.ledger.on(replica)]
            for replica in drained:
                self._members.give_up(replica)
                self.ledger.forget(replica, time.monotonic())
            return drained

    def _check_drained(self, replica: Replica) -> None:
        if replica.state is ReplicaState.DRAINING:
            self._wake.set()


class OneCore:
    """Takes requests for one core of a fleet, as long as that core lives."""

    def __init__(self, dispatcher: Dispatcher, replica: Replica) -> None:
        self._dispatcher, self._replica, self._client = dispatcher, replica, replica.client

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the core is lost; None while it is not."""
        return self._client.dead

    def submit(self, requests: Sequence[Request]) -> list[tuple[Request, ValueError]]:
        """Send requests to this core."""
        return self._dispatcher.submit_to(self._replica, self._client, requests)

    def abort(self, keys: Sequence[int] = (), sequences: Sequence[tuple[int, int]] = ()) -> None:
        """Drop requests, or sequences of them. Until they go on elsewhere, whole ones count as on this core.

        So they are among its requests if it dies before it has read this.
        """
        self._dispatcher.abort(sequences=sequences)
        self._client.abort(keys)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of this core."""
        return self._client.call(method, *args, **kwargs)
