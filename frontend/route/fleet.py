"""Several engine cores of the same model, which a session uses as if they were one.

    Session --submit--> Fleet --> Dispatcher --> Replica 0 ... n --> CoreClient --> core
            <-deltas--       <----------------

A core that is lost is waited for at its place, and its requests go on elsewhere meanwhile; those that may have
killed it are tried one by one first, on one core (`Session.core_attached`). One thread, the supervisor, sees
to that. Locks are taken in this order: that of the `Session`, the fleet's, that of a client.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from pagewire.frontend.client import CoreProcess, Owner
from pagewire.frontend.route.dispatcher import Dispatcher, OneCore
from pagewire.frontend.route.gathering import Answers, check_answer, gather, merge_answers
from pagewire.frontend.route.members import Members, check_same
from pagewire.frontend.route.metrics import router_rows
from pagewire.frontend.route.placement import Policy
from pagewire.frontend.route.places import running_place
from pagewire.frontend.route.replica import CorePlace, Replica, ReplicaState
from pagewire.ipc.errors import EngineBusyError, EngineDeadError, EngineStoppedError
from pagewire.ipc.wire.messages import Blocks, Deltas, EngineInfo, Request

logger = logging.getLogger("pagewire.route")

PROBE_SECONDS = 10.0  # between two calls that show whether a core still answers


class Fleet:
    """Connections to cores that serve the same model, and the requests on them.

    places: where the cores are. patience: seconds for which requests wait when no core is left.
    place_at: the place of a core that is added, by its address.

    Attributes:
        members: the cores. dispatcher: the requests on them. info: properties of the first core.

    Raises:
        EngineDeadError: no core answers. ValueError: two serve different models. And as `CoreSource.connect`.
    """

    spawned: CoreProcess | None = None  # as a `Supervisor` has it; several are not one

    def __init__(
        self,
        places: Sequence[CorePlace],
        owner: Owner,
        *,
        patience: float = 30.0,
        policy: Policy = "prefix",
        place_at: Callable[[str], CorePlace] = running_place,
    ) -> None:
        self.members = Members(self, self._set_up)
        self._owner, self._patience, self._place_at = owner, patience, place_at
        self._lock = self.members.lock  # guards all below
        self._dead_since = math.inf
        self._next_probe = time.monotonic() + PROBE_SECONDS
        self._trial: Replica | None = None  # the core on which suspects are tried
        self._closing = threading.Event()
        self._wake = threading.Event()
        self.dispatcher = Dispatcher(self.members, policy, self._wake)
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
            ValueError: a bad address, or the router has this core already.
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
            was_up = replica.state is ReplicaState.UP
            if was_up and len(self.members.up()) == 1:
                raise ValueError(f"core {number} is the only one that is up: add another one first")
            replica.state = ReplicaState.DRAINING
        if move and was_up:
            self._move(replica)
        self._wake.set()
        return replica

    def _move(self, replica: Replica) -> None:
        """Take the requests of a core back, once all their output so far has come, and let them go on elsewhere."""
        client = replica.client
        with self._lock:
            keys = self.dispatcher.ledger.on(replica)
        try:
            client.abort(keys)
            client.call("status").result()  # its answer comes after all output
        except (EngineDeadError, EngineBusyError) as error:
            logger.error("core %d is lost while it is drained: %s", replica.number, error)
            return  # its connection says so, too
        moved = self.dispatcher.take_back(replica, keys)  # some have ended, or gone elsewhere
        self.core_failing(replica)  # a suspect that was tried there is among those moved
        self._owner.core_lost(EngineStoppedError(f"core {replica.number} is drained"), moved)

    def _set_up(self, replica: Replica) -> None:
        """Use a core that was reached. Called with the lock."""
        replica.state, replica.problem, self.members.dead = ReplicaState.UP, None, None
        replica.follow_blocks()
        self.dispatcher.adapters.equip(replica)
        self._wake.set()

    # -------------------------------------------------------------- as a connection

    @property
    def client(self) -> Fleet:
        """Takes requests."""
        return self

    @property
    def dead(self) -> EngineDeadError | None:
        """The error with which the last core was lost; None while there is one."""
        return self.members.dead

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
        self.members.dead = self.dead or EngineDeadError("the engine was shut down")

    # -------------------------------------------------------------- as a client

    def submit(self, requests: Sequence[Request]) -> list[tuple[Request, ValueError]]:
        """Send each request to the core that suits it best. Otherwise as `CoreClient.submit`."""
        return self.dispatcher.submit(requests)

    def abort(self, keys: Sequence[int] = (), sequences: Sequence[tuple[int, int]] = ()) -> None:
        """Drop requests, or single sequences (key, index) of them, wherever they are."""
        self.dispatcher.abort(keys, sequences)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of every core; the answers come as one (`gathering.merge_answers`).

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
        merge = self._all_metrics if method == "metrics" else partial(merge_answers, method)
        answer = gather(method, calls, lambda number, each: check_answer(method, called[number], each), merge)
        self.dispatcher.adapters.called(method, args, calls, answer)
        return answer

    def _all_metrics(self, answers: Answers) -> list[dict[str, Any]]:
        rows = [row for rows in answers.values() for row in rows]
        return rows + list(router_rows(self.dispatcher, self.info, self.members))

    # -------------------------------------------------------------- as the listener of its cores

    def take_deltas(self, replica: Replica, deltas: Deltas) -> None:
        """Hand new output on, except refusals of requests that another core takes."""
        self._owner.take_deltas(self.dispatcher.take_deltas(replica, deltas))

    def take_blocks(self, replica: Replica, blocks: Blocks) -> None:
        """Record which names of blocks came and went."""
        self.dispatcher.take_blocks(replica, blocks)

    def requests_refused(self, keys: list[int], error: Exception) -> None:
        """Hand on that a core could not read requests."""
        self.dispatcher.drop(keys)
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
            if replica.state is ReplicaState.UP:
                replica.state = ReplicaState.LOST
            keys = self.dispatcher.forget(replica)
            if not self.members.up() and self.dead is None:
                self.members.dead, self._dead_since = error, time.monotonic()
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
                replica.state, replica.problem = ReplicaState.DRAINING, error
            if replica.state is ReplicaState.LOST:
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
        for replica in self.dispatcher.drained():
            threading.Thread(target=self.members.leave, args=(replica,), daemon=True).start()
        with self._lock:
            left, dead = self._time_left(), self.dead
            self._trial = min(
                self.members.up(), key=lambda each: each.num_waiting + each.num_running, default=None
            )
        if self._trial is not None:
            try:
                self._owner.core_attached(OneCore(self.dispatcher, self._trial), self)
            finally:
                self._trial = None
        elif left == 0.0 and dead is not None:
            self._dead_since = math.inf
            self._owner.core_gone(dead)
