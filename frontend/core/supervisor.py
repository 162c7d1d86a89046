"""The supervisor of the connection to an engine core, which outlives cores.

    DIALING --welcomed--> ATTACHED --core_lost--> LOST --welcomed--> RESUBMITTING --resumed--> ATTACHED
                                                  | ^                     |
                                                  | +-------core_lost-----+
                                                  +--none_left--> GONE    any stage --closed--> CLOSED

The table is `TRANSITIONS`. One thread, the supervisor's, goes through it: clients only report that their core is
lost, and it takes these reports one after the other. So a core may be lost while its predecessor is being replaced,
or while requests are resubmitted to it, and the connection may be closed then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, Protocol

import msgspec

from pagewire.frontend.core.client import CoreClient
from pagewire.frontend.core.core_source import Attached, CoreProcess, CoreSource, Pauses
from pagewire.frontend.core.link import START_ERRORS
from pagewire.ipc.errors import DetachedError, EngineDeadError
from pagewire.ipc.wire.messages import Blocks, Deltas, EngineInfo, Request

logger = logging.getLogger("pagewire.frontend")


class EngineClient(Protocol):
    """The client of one core, or of several, which takes requests."""

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the core is lost; None while it is not."""

    def submit(self, requests: Sequence[Request]) -> list[tuple[Request, ValueError]]:
        """Send new requests, as `CoreClient.submit`."""

    def abort(self, keys: Sequence[int] = (), sequences: Sequence[tuple[int, int]] = ()) -> None:
        """Drop requests, or single sequences (key, index) of them."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the core, as `CoreClient.call`."""


class Cores(Protocol):
    """A connection to a core, or to several that serve the same model."""

    info: EngineInfo

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the core is lost; None while it is not."""

    @property
    def client(self) -> EngineClient:
        """Takes requests."""

    @property
    def spawned(self) -> CoreProcess | None:
        """The core's process, if it was spawned here."""

    def check(self) -> None:
        """Check that there is a core.

        Raises:
            EngineDeadError: there is none; the text is the cause.
        """

    def close(self) -> None:
        """Detach, and stop what was spawned here."""


class Owner(Protocol):
    """Receives what happens on a connection."""

    def take_deltas(self, deltas: Deltas) -> None:
        """New output. Called on the client's thread."""

    def requests_refused(self, keys: list[int], error: Exception) -> None:
        """The core could not read these requests. Called on the client's thread."""

    def core_failing(self) -> None:
        """The core is lost: what waits for its answers must wait no longer. Called on the client's thread."""

    def core_lost(self, error: EngineDeadError, keys: Collection[int] | None = None) -> None:
        """The core is lost; another is looked for next. Called on the supervisor's thread.

        keys: of the requests that it had; None: all that were sent. With keys, other cores serve meanwhile.
        """

    def core_attached(self, client: EngineClient, others: EngineClient | None = None) -> None:
        """Another core took the place of a lost one. Called on the supervisor's thread, which may wait here.

        others: where requests go that are free of suspicion, if not to the same core.
        """

    def core_gone(self, error: EngineDeadError) -> None:
        """The core is lost, and no other will come. Called on the supervisor's thread."""


class ConnectionStage(Enum):
    """How far a connection is."""

    DIALING = "dialing"
    """The first core was not reached yet."""
    ATTACHED = "attached"
    """The core has all open requests."""
    LOST = "lost"
    """The core is lost, and another is looked for; nothing can be submitted."""
    RESUBMITTING = "resubmitting"
    """Another core is there, and the owner has the requests go on that the lost one had."""
    GONE = "gone"
    """The core is lost, and no other will come."""
    CLOSED = "closed"
    """The program has closed the connection."""


class ConnectionEvent(Enum):
    """An event in the life of a connection."""

    WELCOMED = "welcomed"
    """A core has taken this frontend."""
    CORE_LOST = "core_lost"
    """The client of the current core reports that it is lost."""
    NONE_LEFT = "none_left"
    """The source gives no other core, or the owner cannot resubmit its requests."""
    RESUMED = "resumed"
    """The owner has resubmitted its requests, and the core still lives."""
    CLOSED = "closed"
    """`close` was called."""


TRANSITIONS: dict[tuple[ConnectionStage, ConnectionEvent], ConnectionStage] = {
    (ConnectionStage.DIALING, ConnectionEvent.WELCOMED): ConnectionStage.ATTACHED,
    (ConnectionStage.ATTACHED, ConnectionEvent.CORE_LOST): ConnectionStage.LOST,
    (ConnectionStage.LOST, ConnectionEvent.WELCOMED): ConnectionStage.RESUBMITTING,
    (ConnectionStage.LOST, ConnectionEvent.NONE_LEFT): ConnectionStage.GONE,
    (ConnectionStage.RESUBMITTING, ConnectionEvent.CORE_LOST): ConnectionStage.LOST,
    (ConnectionStage.RESUBMITTING, ConnectionEvent.RESUMED): ConnectionStage.ATTACHED,
    (ConnectionStage.RESUBMITTING, ConnectionEvent.NONE_LEFT): ConnectionStage.GONE,
} | {(stage, ConnectionEvent.CLOSED): ConnectionStage.CLOSED for stage in ConnectionStage}

WITH_CORE = (
    ConnectionStage.ATTACHED,
    ConnectionStage.RESUBMITTING,
)  # stages in which requests may be submitted


class Loss(msgspec.Struct, frozen=True, eq=False):
    """The report of a client that its core is lost. number: of the client."""

    number: int
    error: EngineDeadError


class Supervisor:
    """A client that is replaced when its core is lost, as the source allows.

    Attributes:
        stage: see `ConnectionStage`; changed on the supervisor's thread alone, and by `close` once that has ended.
        client: of the current core, or of the lost one while there is no other. on_blocks: see `CoreClient`.
        spawned: the core's process if it was spawned here. info: of the first core; others serve the same model.

    Raises:
        as `CoreSource.connect`, for the first core.
    """

    def __init__(
        self, source: CoreSource, owner: Owner, on_blocks: Callable[[Blocks], None] = lambda blocks: None
    ) -> None:
        self.stage = ConnectionStage.DIALING
        self._cause = EngineDeadError("no engine core was reached yet")  # counts in stages without a core
        self._source, self._owner, self._on_blocks = source, owner, on_blocks
        self._losses: queue.SimpleQueue[Loss | None] = queue.SimpleQueue()  # None: `close` was called
        self._number = 0  # of the current client
        self._closing = threading.Event()
        self._detached = Pauses()
        self.client: CoreClient
        self.spawned: CoreProcess | None
        self.client, self.spawned = source.connect(self._dial)
        self.info: EngineInfo = self.client.info
        self._enter(ConnectionEvent.WELCOMED)
        self._thread = threading.Thread(target=self._run, name="pagewire-connection", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> EngineDeadError | None:
        """The error with which the core was lost, until another one takes its place; None while there is a core."""
        return None if self.stage in WITH_CORE else self._cause

    def check(self) -> None:
        """Check that there is a core.

        Raises:
            EngineDeadError: there is none; the text is the cause.
        """
        if (dead := self.dead) is not None:
            raise EngineDeadError(*dead.args)

    def close(self) -> None:
        """Detach, and stop the core if it was spawned here. Waits for nothing but that; may be called twice."""
        self._closing.set()
        self._losses.put(None)
        self._thread.join()
        self._enter(ConnectionEvent.CLOSED, self.dead or EngineDeadError("the engine was shut down"))
        self.client.close()
        if self.spawned is not None:
            self.spawned.shutdown()

    def validate(self) -> None:
        """Check what holds between two reports; tests call it.

        Raises:
            AssertionError: it does not hold.
        """
        assert (self.dead is None) == (self.stage in WITH_CORE)
        assert self.stage is not ConnectionStage.DIALING, "there is no first core"
        if self.stage is ConnectionStage.RESUBMITTING:
            assert self.client.dead is not None, "what is open was not resubmitted to a core that lives"
        if self.stage is ConnectionStage.LOST:
            assert self.client.dead is not None, "a core that lives is given up"
            assert self._closing.is_set(), "nobody looks for another core"

    def _enter(self, event: ConnectionEvent, cause: EngineDeadError | None = None) -> None:
        """Go to the next stage. cause: why there is no core from then on."""
        if cause is not None:
            self._cause = cause  # before the stage, from which other threads see that it counts
        self.stage = TRANSITIONS[self.stage, event]

    def _dial(self, address: str, **options: object) -> CoreClient:
        """Attach to a core; its client reports to this connection. options: as of `CoreClient.connect`."""
        self._number += 1
        number = self._number

        def on_dead(error: EngineDeadError) -> None:
            self._losses.put(Loss(number, error))
            self._owner.core_failing()

        return CoreClient.connect(
            address,
            on_deltas=self._owner.take_deltas,
            on_refused=self._owner.requests_refused,
            on_blocks=self._on_blocks,
            on_dead=on_dead,
            cancelled=self._closing,
            **options,  # type: ignore[arg-type]
        )

    # -------------------------------------------------------------- the supervisor's thread

    def _run(self) -> None:
        while (loss := self._losses.get()) is not None and not self._closing.is_set():
            self.take(loss)

    def take(self, loss: Loss) -> None:
        """Take a report: find another core, and have the owner resubmit what the lost one had."""
        if loss.number != self._number or self.stage not in WITH_CORE:
            return  # of a client that was given up
        self._enter(ConnectionEvent.CORE_LOST, loss.error)
        try:
            self._owner.core_lost(loss.error)
            self.client, self.spawned = self._replacement(loss.error)
            self._enter(ConnectionEvent.WELCOMED)
            self._owner.core_attached(self.client)
            if self.client.dead is None:
                self._enter(ConnectionEvent.RESUMED)
        except EngineDeadError as error:
            self._give_up(error)
        except Exception as error:  # of any kind: no request may wait for ever
            logger.exception("the core could not be replaced")
            self._give_up(EngineDeadError(f"{loss.error}; {type(error).__name__}: {error}"))

    def _give_up(self, error: EngineDeadError) -> None:
        if self._closing.is_set():
            self._cause = error
        else:
            self._enter(ConnectionEvent.NONE_LEFT, error)
            self._owner.core_gone(error)

    def _replacement(self, error: EngineDeadError) -> Attached:
        """A connection to another core of the same model, or again to this one if it runs.

        Raises:
            EngineDeadError: there is none; the text is the cause.
        """
        attached = self._again(error) if isinstance(error, DetachedError) else None
        if attached is None:
            if self.spawned is not None:
                self.spawned.shutdown()
            attached = self._source.replace(self._dial, error, self._closing)
        if not same_model(attached.client.info, self.info):
            attached.client.close()
            if attached.spawned is not None:
                attached.spawned.shutdown()
            raise EngineDeadError(f"{error}; the new one serves another model, {attached.client.info.model}")
        return attached

    def _again(self, error: DetachedError) -> Attached | None:
        """A new connection to the core that has detached this frontend; None if it does not answer."""
        logger.error("%s; attaching again", error)
        self._closing.wait(self._detached.next())
        try:
            return self._source.again(self._dial, self.spawned)
        except (EngineDeadError, *START_ERRORS) as failure:
            logger.error("the engine core does not take this frontend again: %s", failure)
            return None


def same_model(first: EngineInfo, second: EngineInfo) -> bool:
    """True if requests prepared for one engine are valid for the other."""
    names = (
        "model",
        "architecture",
        "dtype",
        "vocab_size",
        "max_model_len",
        "tokenizer",
        "tokenizer_revision",
        "pooling",
    )
    return all(getattr(first, name) == getattr(second, name) for name in names)
