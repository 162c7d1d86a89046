"""Several engine cores of the same model, which a session uses as if they were one.

    OpenRequests --submit--> Fleet --(placement)--> Replica 0 ... n --> CoreClient --> core
                 <-deltas--       <----------------

A core that is lost is waited for at its place, and its requests go on elsewhere meanwhile; those that may have
killed it are tried one by one first, on one core (`OpenRequests.core_attached`). One thread, the supervisor, sees
to that. Locks are taken in this order: that of `OpenRequests`, the fleet's, that of a client.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from pagewire.frontend.client import CoreClient
from pagewire.frontend.connection import Owner
from pagewire.frontend.route.adapters import RouterAdapters
from pagewire.frontend.route.engines import check_same
from pagewire.frontend.route.gathering import Answers, checked, gather, merged
from pagewire.frontend.route.ledger import Ledger, Work
from pagewire.frontend.route.members import Members
from pagewire.frontend.route.metrics import router_rows
from pagewire.frontend.route.placement import Policy
from pagewire.frontend.route.places import running
from pagewire.frontend.route.replica import Place, Placement, Replica, State
from pagewire.frontend.spawn import SpawnedCore
from pagewire.ipc.block_names import split_names
from pagewire.ipc.errors import EngineBusyError, EngineDeadError, EngineStoppedError
from pagewire.ipc.messages import Blocks, EngineInfo, Request, TokenDelta

logger = logging.getLogger("pagewire.route")

BUSY_SECONDS = 1.0  # for which a core that refuses requests, such as one that shuts down, gets none
PROBE_SECONDS = 10.0  # between two calls that show whether a core still answers


class Fleet:
    """Connections to cores that serve the same model, and the requests on them.

    places: where the cores are. patience: seconds for which requests wait when no core is left.
    place_at: the place of a core that is added, by its address.

    Attributes:
        members: the cores. info: of the first one. dead: the error with which the last core was lost; None while
            there is one.

    Raises:
        EngineDeadError: no core answers. ValueError: two serve different models. And as `CoreSource.connect`.
    """

    spawned: SpawnedCore | None = None  # as a `Connection` has it; several are not one

    def __init__(
        self,
        places: Sequence[Place],
        owner: Owner,
        *,
        patience: float = 30.0,
        policy: Policy = "prefix",
        place_at: Callable[[str], Place] = running,
    ) -> None:
        self.dead: EngineDeadError | None = EngineDeadError("no engine core was reached yet")
        self.members = Members(self, self._set_up)
        self._owner, self._patience, self._place_at = owner, patience, place_at
        self._lock = self.members.lock  # guards all below
        self._ledger = Ledger(policy)
        self._adapters = RouterAdapters(self._lock, self.members.up)
        self._dead_since = math.inf
        self._next_probe = time.monotonic() + PROBE_SECONDS
        self._trial: Replica | None = None  # the core on which suspects are tried
        self._closing = threading.Event()
        self._wake = threading.Event()
        try:
            self.info: EngineInfo = self.members.start(places)
        except BaseException:
            self.members.close()
            raise
        self._supervisor = threading.Thread(target=self._supervise, name="pagewire-fleet", daemon=True)
        self._supervisor.start()

    # -------------------------------------------------------------- cores that come and go

    def add(self, address: str) -> Replica:
        """Attach to one more core. As `Members.add`, and:

        Raises:
            ValueError: a bad address, or one of which a core is here already.
        """
        for replica in self.members:
            if replica.place.label == address:
                raise ValueError(f"core {replica.number} is the core at {address} already")
        return self.members.add(self._place_at(address))

    def drain(self, number: int, move: bool = False) -> Replica:
        """Send a core no further requests, and leave it once it has none; a core that was spawned here stops then.

        move: its requests go on elsewhere at once, rather than end there.

        Raises:
            ValueError: there is no such core, or no other one is up.
        """
        with self._lock:
            replica = self.members.get(number)
            was_up = replica.state is State.UP
            if was_up and len(self.members.up()) == 1:
                raise ValueError(f"core {number} is the only one that is up: add another one first")
            replica.state = State.DRAINING
        if move and was_up:
            self._move(replica)
        self._wake.set()
        return replica

    def _move(self, replica: Replica) -> None:
        """Take the requests of a core back, once all their output so far has come, and let them go on elsewhere."""
        client = replica.client
        with self._lock:
            keys = self._ledger.on(replica)
        try:
            client.abort(keys)
            client.call("status").result()  # its answer comes after all output
        except (EngineDeadError, EngineBusyError) as error:
            logger.error("core %d is lost while it is drained: %s", replica.number, error)
            return  # its connection says so, too
        now = time.monotonic()
        with self._lock:
            moved = [
                key for key in keys if self._ledger.is_on(key, replica)
            ]  # some have ended, or gone elsewhere
            for key in moved:
                self._ledger.drop(key, now)
            replica.num_moved += len(moved)
        self.core_failing(replica)  # a suspect that was tried there is among those moved
        self._owner.core_lost(EngineStoppedError(f"core {replica.number} is drained"), moved)

    def _set_up(self, replica: Replica) -> None:
        """Use a core that was reached. Called with the lock."""
        replica.state, replica.problem, self.dead = State.UP, None, None
        replica.follow_blocks()
        self._adapters.equip(replica)
        self._wake.set()

    def num_requests(self, replica: Replica) -> int:
        """How many requests a core has."""
        with self._lock:
            return len(self._ledger.on(replica))

    def num_blocks(self, replica: Replica) -> int:
        """How many cached blocks a core has reported."""
        with self._lock:
            return self._ledger.index.num_names(replica.number)

    # -------------------------------------------------------------- as a connection

    @property
    def client(self) -> Fleet:
        """Takes requests."""
        return self

    def check(self) -> None:
        """Check that there is a core.

        Raises:
            EngineDeadError: there is none; the text is the cause.
        """
        if (dead := self.dead) is not None:
            raise EngineDeadError(*dead.args)

    def close(self) -> None:
        """Detach from all cores, and stop those that were spawned here. May be called twice."""
        self._closing.set()
        self._wake.set()
        self.members.close()
        self._supervisor.join()
        self.dead = self.dead or EngineDeadError("the engine was shut down")

    # -------------------------------------------------------------- as a client

    def submit(self, requests: Sequence[Request]) -> list[tuple[Request, ValueError]]:
        """Send each request to the core that suits it best. Otherwise as `CoreClient.submit`."""
        refused, _ = self._submit([Work.of(request, self.info) for request in requests])
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
                        placement = self._ledger.put(work, self._pick(work, tried), time.monotonic())
                        sent.append(placement)
                        batches.setdefault(placement.replica.number, []).append(work)
                except BaseException:
                    self.abort([placement.request.key for placement in sent])
                    raise
                works = []
                for number, batch in batches.items():
                    try:
                        replica = self.members.get(number)
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
            refused = client.submit([self._adapters.addressed(work.request, replica) for work in works])
        except BaseException:
            for work in works:
                self._ledger.drop(work.request.key, now)
            raise
        for request, _ in refused:
            self._ledger.drop(request.key, now)
        return refused

    def _pick(self, work: Work, tried: dict[int, Exception]) -> Replica:
        """The core for a request, none of the `tried`; one that is busy only if all others are as well.

        Raises:
            EngineBusyError, EngineDeadError: there is none.
        """
        now = time.monotonic()
        candidates = [replica for replica in self.members.up() if replica.number not in tried]
        candidates = self._adapters.able(work.request, candidates)
        calm = [replica for replica in candidates if replica.busy_until <= now]
        if not candidates:
            busy = [error for error in tried.values() if isinstance(error, EngineBusyError)]
            raise next(iter(busy or tried.values()), self.dead or EngineDeadError("no engine core is up"))
        return self._ledger.pick(work, calm or candidates)

    def submit_to(
        self, replica: Replica, client: CoreClient, requests: Sequence[Request]
    ) -> list[tuple[Request, ValueError]]:
        """Send requests to this core. client: of the core that is meant, which may be lost by now."""
        works = [Work.of(request, self.info) for request in requests]
        with self._lock:
            for work in works:
                self._ledger.put(work, replica, time.monotonic())
            return self._send(replica, client, works)

    def abort(self, keys: Sequence[int] = (), sequences: Sequence[tuple[int, int]] = ()) -> None:
        """Drop requests, or single sequences (key, index) of them, wherever they are."""
        now = time.monotonic()
        by_core: dict[Replica, tuple[list[int], list[tuple[int, int]]]] = {}
        with self._lock:
            for key, index in sequences:
                if (placement := self._ledger.placed.get(key)) is not None:
                    by_core.setdefault(placement.replica, ([], []))[1].append((key, index))
                    self._ledger.end_sequence(key, index, now)
            for key in keys:
                if (placement := self._ledger.drop(key, now)) is not None:
                    by_core.setdefault(placement.replica, ([], []))[0].append(key)
            for replica, (whole, single) in by_core.items():
                replica.client.abort(whole, single)
                self._check_drained(replica)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of every core; the answers come as one (`gathering.merged`).

        Raises:
            EngineDeadError: there is no core. And as `CoreClient.call`, if no core takes the call.
        """
        self.check()
        calls: dict[int, Future[Any]] = {}
        called: dict[int, Replica] = {}
        error: RuntimeError | None = None
        for replica in self.members.attached():
            try:
                calls[replica.number] = replica.client.call(method, *args, **kwargs)
                called[replica.number] = replica
            except (EngineDeadError, EngineBusyError) as lost:
                error = lost
        if not calls:
            raise error or EngineDeadError("no engine core is up")
        merge = self._all_metrics if method == "metrics" else partial(merged, method)
        answer = gather(method, calls, lambda number, each: checked(method, called[number], each), merge)
        self._adapters.called(method, args, calls, answer)
        return answer

    def _all_metrics(self, answers: Answers) -> list[dict[str, Any]]:
        rows = [row for rows in answers.values() for row in rows]
        return rows + list(router_rows(self, self.info, self.members))

    # -------------------------------------------------------------- as the listener of its cores

    def take_deltas(self, replica: Replica, deltas: list[TokenDelta]) -> None:
        """Hand new output on. Requests that the core is too busy for go to another one."""
        now = time.monotonic()
        busy: set[int] = set()
        with self._lock:
            placed = self._ledger.placed
            # Of a request that went elsewhere since, these would change the output.
            deltas = [delta for delta in deltas if self._ledger.is_on(delta.key, replica)]
            for delta in deltas:
                refused = delta.error_type == EngineBusyError.__name__ and delta.finish_reason == "error"
                if refused and (placement := placed.get(delta.key)) is not None and not placement.started:
                    busy.add(delta.key)
                elif delta.key not in busy:
                    self._ledger.output(replica, delta, now)
            kept = {key for key in busy if not self._elsewhere(replica, placed[key], now)}
            self._check_drained(replica)
        if busy:
            deltas = [delta for delta in deltas if delta.key not in busy or delta.key in kept]
        self._owner.take_deltas(deltas)

    def _elsewhere(self, replica: Replica, placement: Placement, now: float) -> bool:
        """Send a request that a core has refused to another one; False if there is none that takes it."""
        replica.busy_until = now + BUSY_SECONDS
        request = placement.request
        self._ledger.drop(request.key, now)
        tried = placement.refused_by | {replica.number}
        try:
            refused, sent = self._submit([Work.of(request, self.info)], tried)
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
            index = self._ledger.index
            if blocks.reset:
                index.reset(replica.number)
            index.remove(replica.number, split_names(blocks.removed))
            index.store(replica.number, split_names(blocks.stored))

    def requests_refused(self, keys: list[int], error: Exception) -> None:
        """Hand on that a core could not read requests."""
        with self._lock:
            for key in keys:
                self._ledger.drop(key, time.monotonic())
        self._owner.requests_refused(keys, error)

    def core_failing(self, replica: Replica) -> None:
        """End the wait for a suspect, if it is on this core."""
        if replica is self._trial:
            self._owner.core_failing()

    def core_lost(self, replica: Replica, error: EngineDeadError) -> None:
        """Let the requests of a core go on elsewhere."""
        logger.error("core %d is lost: %s", replica.number, error)
        with self._lock:
            replica.problem = error
            if replica.state is State.UP:
                replica.state = State.LOST
            keys = self._ledger.forget(replica, time.monotonic())
            replica.num_moved += len(keys)
            if not self.members.up() and self.dead is None:
                self.dead, self._dead_since = error, time.monotonic()
        self._owner.core_lost(error, keys)
        self._wake.set()

    def core_attached(self, replica: Replica) -> None:
        """Use the core that took the place of the lost one, if it is a replica, too, and answers."""
        try:
            replica.prove(replica.client)
        except EngineDeadError as error:
            logger.error("core %d gets no requests: %s", replica.number, error)
            return  # its client takes it for lost before long, and another is looked for
        with self._lock:
            try:
                check_same(self.info, replica.client.info, replica.place.label)
            except ValueError as error:
                logger.error("core %d is left: %s", replica.number, error)
                replica.state, replica.problem = State.DRAINING, error
            if replica.state is State.LOST:
                logger.info("core %d is back", replica.number)
                self._set_up(replica)
        self._wake.set()

    def core_gone(self, replica: Replica, error: EngineDeadError) -> None:
        """Give a core up."""
        logger.error("core %d is given up: %s", replica.number, error)
        with self._lock:
            self.members.give_up(replica)
            if not list(self.members):
                self._dead_since = -math.inf
        self._wake.set()

    # -------------------------------------------------------------- the supervisor's thread

    def _supervise(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(min(PROBE_SECONDS, self._time_left()))
            self._wake.clear()
            try:
                self._see_to_cores()
                self._probe()
            except Exception:  # of any kind: the next event must be seen to
                logger.exception("requests of a lost core could not go on")

    def _probe(self) -> None:
        """Ask the cores for a sign that they still answer."""
        if (now := time.monotonic()) < self._next_probe:
            return
        self._next_probe = now + PROBE_SECONDS
        for replica in self.members.attached():
            replica.ask()

    def _time_left(self) -> float:
        """Seconds until requests wait no longer for a core; infinite if there is one."""
        with self._lock:
            if self.dead is None or self._dead_since == math.inf:
                return math.inf
            return max(0.0, self._dead_since + self._patience - time.monotonic())

    def _see_to_cores(self) -> None:
        if self._closing.is_set():
            return
        for replica in self._drained():
            threading.Thread(target=self.members.leave, args=(replica,), daemon=True).start()
        with self._lock:
            left, dead = self._time_left(), self.dead
            self._trial = min(
                self.members.up(), key=lambda each: each.num_waiting + each.num_running, default=None
            )
        if self._trial is not None:
            try:
                self._owner.core_attached(OneCore(self, self._trial), self)
            finally:
                self._trial = None
        elif left == 0.0 and dead is not None:
            self._dead_since = math.inf
            self._owner.core_gone(dead)

    def _drained(self) -> Collection[Replica]:
        """The cores to leave: drained ones without requests."""
        with self._lock:
            draining = [each for each in self.members if each.state is State.DRAINING]
            drained = [replica for replica in draining if not self._ledger.on(replica)]
            for replica in drained:
                self.members.give_up(replica)
                self._ledger.forget(replica, time.monotonic())
            return drained

    def _check_drained(self, replica: Replica) -> None:
        if replica.state is State.DRAINING:
            self._wake.set()


class OneCore:
    """Takes requests for one core of a fleet, as long as that core lives."""

    def __init__(self, fleet: Fleet, replica: Replica) -> None:
        self._fleet, self._replica, self._client = fleet, replica, replica.client

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the core is lost; None while it is not."""
        return self._client.dead

    def submit(self, requests: Sequence[Request]) -> list[tuple[Request, ValueError]]:
        """Send requests to this core."""
        return self._fleet.submit_to(self._replica, self._client, requests)

    def abort(self, keys: Sequence[int] = (), sequences: Sequence[tuple[int, int]] = ()) -> None:
        """Drop requests, or sequences of them. Until they go on elsewhere, whole ones count as on this core.

        So they are among its requests if it dies before it has read this.
        """
        self._fleet.abort(sequences=sequences)
        self._client.abort(keys)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of this core."""
        return self._client.call(method, *args, **kwargs)
