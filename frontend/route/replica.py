"""One of the cores behind a router: its connection, what is known of its blocks, and how much waits there."""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from pagewire.frontend.client import CoreClient, CoreSource, EngineClient, Supervisor
from pagewire.ipc.errors import EngineBusyError, EngineDeadError
from pagewire.ipc.wire.messages import Blocks, Deltas, Request

logger = logging.getLogger("pagewire.route")

PROOF_SECONDS = 10.0  # for a core that has greeted to answer a call, before it gets requests


class ReplicaState(Enum):
    """The use that a router has for a core; the value is its name in answers and metrics."""

    JOINING = "joining"
    """It has not been reached yet."""
    UP = "up"
    """It gets requests."""
    LOST = "lost"
    """It has died, or does not answer; another is looked for at its place."""
    DRAINING = "draining"
    """It gets no new requests, and is left once it has none."""
    GONE = "gone"
    """It is left, or was given up."""


@dataclass(frozen=True)
class CorePlace:
    """Where a core is. label: its address, or how it is spawned. retries: try again while no core answers there."""

    label: str
    source: CoreSource
    retries: bool = True


@dataclass(slots=True, eq=False)
class Placement:
    """A request on a core.

    request: as it was sent. names: of its blocks. num_waiting: tokens that the core has to compute before the first
    new one, 0 once that has come. live: indices of its sequences that have not ended.
    refused_by: cores that were too busy.
    """

    replica: Replica
    request: Request
    names: list[bytes]
    num_waiting: int
    live: set[int]
    started: bool = False
    refused_by: set[int] = field(default_factory=set)


class ReplicaListener(Protocol):
    """Receives what happens on the connections of a router, on the threads that `supervisor.Owner` names."""

    def take_deltas(self, replica: Replica, deltas: Deltas) -> None:
        """New output."""

    def take_blocks(self, replica: Replica, blocks: Blocks) -> None:
        """Names of blocks came and went."""

    def requests_refused(self, keys: list[int], error: Exception) -> None:
        """A core could not read these requests."""

    def core_failing(self, replica: Replica) -> None:
        """A core is lost: what waits for its answers must wait no longer."""

    def core_lost(self, replica: Replica, error: EngineDeadError) -> None:
        """A core is lost; another is looked for."""

    def core_attached(self, replica: Replica) -> None:
        """A core took the place of the lost one."""

    def core_gone(self, replica: Replica, error: EngineDeadError) -> None:
        """A core is lost, and no other will come."""


class Replica:
    """A core behind a router, and the owner of the connection to it.

    Attributes:
        number: counts the cores of the router; its label in metrics. state: see `ReplicaState`.
        problem: why it could not be reached, or was lost; None while all is well.
        connection: None until it is reached for the first time.
        num_waiting, num_running: see `placement.CoreLoad`. num_placed, num_prompt_tokens, num_cached_tokens: of
            the requests that it was sent, as the router saw it. num_moved: requests that went on elsewhere.
        adapters: those that were registered with it, by name: None, or why it could not load one.
        next_blocks: number of the next message about blocks; None from a call of `follow_blocks` until its
            snapshot, or at the latest its answer, comes. num_gaps: how often messages were missed.
        wrong_answers: methods to which it has answered with something of another type.
        probe: the last call that shows whether it still answers.
    """

    def __init__(self, number: int, place: CorePlace, listener: ReplicaListener) -> None:
        self.number, self.place = number, place
        self.state = ReplicaState.JOINING
        self.problem: Exception | None = None
        self.connection: Supervisor | None = None
        self.num_waiting = self.num_running = self.num_placed = self.num_moved = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.busy_until = 0.0
        self.adapters: dict[str, Exception | None] = {}
        self.next_blocks: int | None = None
        self.num_gaps = 0
        self.wrong_answers: set[str] = set()
        self.probe: Future[Any] | None = None
        self._listener = listener

    @property
    def client(self) -> CoreClient:
        """The client of the current core.

        Raises:
            EngineDeadError: it was not reached yet.
        """
        if self.connection is None:
            raise EngineDeadError(f"{self.place.label} was not reached yet")
        return self.connection.client

    def connect(self) -> Supervisor:
        """Attach to the core, and wait until it is ready, and has answered a call.

        Raises:
            as `CoreSource.connect`, and `prove`.
        """
        connection = Supervisor(self.place.source, self, self._take_blocks)
        try:
            self.prove(connection.client)
        except BaseException:
            connection.close()
            raise
        return connection

    def prove(self, client: CoreClient) -> None:
        """Wait for the answer of a core to a call: one that greets may answer nothing.

        Raises:
            EngineDeadError: there is none.
        """
        try:
            error = client.call("fence").exception(PROOF_SECONDS)
        except FutureTimeoutError:
            text = f"{self.place.label} greets, but has answered nothing for {PROOF_SECONDS:g} s"
            raise EngineDeadError(text) from None
        if isinstance(error, EngineDeadError):  # any other is an answer, too
            raise error

    def ask(self) -> None:
        """See whether the core still answers: its client takes it for lost if it does not (`OpenCalls`)."""
        if self.probe is None or self.probe.done():
            with suppress(EngineDeadError, EngineBusyError):
                self.probe = self.client.call("fence")

    def follow_blocks(self) -> None:
        """Ask the core which blocks it has, and for all changes from then on."""
        self.next_blocks = None
        try:
            answer = self.client.call("follow_blocks")
        except RuntimeError as error:  # it is lost, or reads nothing; its next message shows a gap
            logger.warning("core %d (%s): its blocks are unknown: %s", self.number, self.place.label, error)
            self.next_blocks = 0
            return
        answer.add_done_callback(self._answered)

    def _answered(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is not None and not isinstance(error, EngineDeadError):
            text = "core %d (%s): which prefixes it has is known only from requests on their way there: %s"
            logger.warning(text, self.number, self.place.label, error)
        if self.next_blocks is None:  # the beginning of the snapshot was lost: what comes next is a gap
            self.next_blocks = 0

    # -------------------------------------------------------------- as `supervisor.Owner` says

    def take_deltas(self, deltas: Deltas) -> None:
        """New output."""
        self._listener.take_deltas(self, deltas)

    def _take_blocks(self, blocks: Blocks) -> None:
        self._listener.take_blocks(self, blocks)

    def requests_refused(self, keys: list[int], error: Exception) -> None:
        """The core could not read these requests."""
        self._listener.requests_refused(keys, error)

    def core_failing(self) -> None:
        """The core is lost."""
        self._listener.core_failing(self)

    def core_lost(self, error: EngineDeadError, keys: Collection[int] | None = None) -> None:
        """The core is lost; another is looked for next."""
        self._listener.core_lost(self, error)

    def core_attached(self, client: EngineClient, others: EngineClient | None = None) -> None:
        """Another core took its place."""
        self._listener.core_attached(self)

    def core_gone(self, error: EngineDeadError) -> None:
        """The core is lost, and no other will come."""
        self._listener.core_gone(self, error)
