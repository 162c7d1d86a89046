"""The connection of a session to an engine core, which outlives cores.

            +--> connected --- core lost ---> replacing --- no other core ---> gone
            |                                     |
            +------------- another core ----------+              close() at any time

One thread, the supervisor, owns this state: clients only report that their core is lost, and the supervisor takes
these reports one after the other. So a core may be lost while its predecessor is being replaced, or be closed then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pagewire.frontend.core.client import CoreClient
from pagewire.frontend.core.core_source import Attached, CoreSource, Pauses
from pagewire.frontend.core.link import START_ERRORS
from pagewire.ipc.errors import DetachedError, EngineDeadError
from pagewire.ipc.wire.messages import Blocks, Deltas, EngineInfo, Request

if TYPE_CHECKING:
    from pagewire.frontend.core.spawn import SpawnedCore

logger = logging.getLogger("pagewire.frontend")


class EngineClient(Protocol):
    """What takes requests: the client of one core, or of several."""

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
    def spawned(self) -> SpawnedCore | None:
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


class Loss(msgspec.Struct, frozen=True, eq=False):
    """The report of a client that its core is lost. number: of the client."""

    number: int
    error: EngineDeadError


class CoreConnection:
    """A client that is replaced when its core is lost, as the source allows.

    Attributes:
        client: of the current core, or of the lost one while there is no other. on_blocks: see `CoreClient`.
        spawned: the core's process if it was spawned here. info: of the first core; others serve the same model.
        dead: the error with which the core was lost, until another one takes its place; None while there is a core.

    Raises:
        as `CoreSource.connect`, for the first core.
    """

    def __init__(
        self, source: CoreSource, owner: Owner, on_blocks: Callable[[Blocks], None] = lambda blocks: None
    ) -> None:
        self.dead: EngineDeadError | None = None
        self._source, self._owner, self._on_blocks = source, owner, on_blocks
        self._losses: queue.SimpleQueue[Loss | None] = queue.SimpleQueue()  # None: `close` was called
        self._number = 0  # of the current client
        self._closing = threading.Event()
        self._detached = Pauses()
        self.client: CoreClient
        self.spawned: SpawnedCore | None
        self.client, self.spawned = source.connect(self._dial)
        self.info: EngineInfo = self.client.info
        self._supervisor = threading.Thread(target=self._run, name="pagewire-connection", daemon=True)
        self._supervisor.start()

    def check(self) -> None:
        """Check that there is a core.

        Raises:
            EngineDeadError: there is none; the text is the cause.
        """
        if self.dead is not None:
            raise EngineDeadError(*self.dead.args)

    def close(self) -> None:
        """Detach, and stop the core if it was spawned here. Waits for nothing but that; may be called twice."""
        self._closing.set()
        self._losses.put(None)
        self._supervisor.join()
        self.dead = self.dead or EngineDeadError("the engine was shut down")
        self.client.close()
        if self.spawned is not None:
            self.spawned.shutdown()

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
            if loss.number != self._number:
                continue  # the report of a client that was given up
            self.dead = loss.error
            try:
                self._owner.core_lost(loss.error)
                self.client, self.spawned = self._replacement(loss.error)
                self.dead = None
                self._owner.core_attached(self.client)
            except EngineDeadError as error:
                self._give_up(error)
            except Exception as error:  # of any kind: no request may wait for ever
                logger.exception("the core could not be replaced")
                self._give_up(EngineDeadError(f"{loss.error}; {type(error).__name__}: {error}"))

    def _give_up(self, error: EngineDeadError) -> None:
        self.dead = error
        if not self._closing.is_set():
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
