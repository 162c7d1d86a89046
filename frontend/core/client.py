"""The connection to the engine core. One thread owns the socket; any thread may use the client.

    submit, abort, call --> Outbox --> [IO thread] --DEALER--> core
    on_deltas, on_dead, futures <--- [IO thread] <---------- core
                             Ping -- [heartbeat]

A client is attached once. The loss of its core is final: the client reports it within milliseconds (socket
monitor, `CoreDying`, exit of a spawned core) or after `PAGEWIRE_HEARTBEAT_TIMEOUT_S` of silence, and accepts
nothing more. So is a core that sends heartbeats, but does not answer calls within the limits that they declare.

While the IO thread runs a callback, which may take long or wait for a lock, the heartbeat thread sends the pings:
the core must not take a busy frontend for a hung one. Nor does the frontend blame the core for its own slowness:
only time that it spent waiting for messages counts for the core, not time in which it was busy or stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import TYPE_CHECKING, Any

from pagewire.frontend.core.link import PING, Link, attach_link, core_exit
from pagewire.frontend.core.open_calls import OpenCalls
from pagewire.frontend.core.outbox import Frames, Outbox, encode_requests, too_large
from pagewire.ipc.environment import env_float
from pagewire.ipc.errors import (
    DetachedError,
    EngineBusyError,
    EngineDeadError,
    EngineStoppedError,
    received_error,
)
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.messages import (
    Abort,
    Blocks,
    Call,
    CallAnswer,
    CoreDying,
    Deltas,
    Detached,
    Goodbye,
    Refused,
    Request,
    ToFrontend,
    Welcome,
)
from pagewire.ipc.wire.sockets import CurveKeys

if TYPE_CHECKING:
    from pagewire.ipc.host.lifeline import Child

logger = logging.getLogger("pagewire.frontend")

HEARTBEAT_TIMEOUT_S = 30.0
READ_AT_ONCE = 256  # messages decoded before their callbacks run, which bounds memory
WAKE_SECONDS = 0.1  # by which a wait may last longer without the process having been stopped
FLUSH_SECONDS = 1.0  # how long closing may take to send what is in the outbox
MAX_OUTBOX = 100_000  # messages that wait for a core that reads none, before `submit` refuses more


class WaitClock:
    """The time that a client spent waiting for messages: no other time counts for the core.

    Attributes:
        silence: seconds since the last message came. waited: in all, the clock of the core's time limits.
    """

    def __init__(self) -> None:
        self.silence = self.waited = 0.0

    def wait(self, link: Link, seconds: float, *, to_send: bool) -> None:
        """Wait, as `Link.wait`. Of time in which this process was stopped, little counts."""
        begin = time.monotonic()
        link.wait(seconds, to_send=to_send)
        waited = min(time.monotonic() - begin, seconds + WAKE_SECONDS)
        self.silence += waited
        self.waited += waited


class CoreClient:
    """One attachment to a core, made by `CoreClient.connect`.

    Callbacks run on the client's own thread: `on_deltas` with the deltas of each step; `on_refused` with the keys
    of requests that the core could not read, and why; `on_blocks` with the names of cached blocks, once
    `follow_blocks` was called; `on_dead` once, when the core is lost (not after `close`), and nothing after it. Its
    error is an `EngineStoppedError` if the core was stopped on purpose, and a `DetachedError` if it runs, but has
    dropped this frontend.

    Attributes:
        info: model and options of the core.
        dead: why the client takes nothing more, once the core is lost or the client is closed; None before.
    """

    def __init__(
        self,
        link: Link,
        welcome: Welcome,
        on_deltas: Callable[[Deltas], None],
        on_dead: Callable[[EngineDeadError], None],
        on_refused: Callable[[list[int], Exception], None],
        child: Child | None,
        on_blocks: Callable[[Blocks], None] = lambda blocks: None,
    ) -> None:
        self.info = welcome.info
        self._link, self._child = link, child
        self._on_deltas, self._on_dead, self._on_refused = on_deltas, on_dead, on_refused
        self._on_blocks = on_blocks
        self._ping_seconds = welcome.ping_seconds
        self._silence_seconds = env_float("PAGEWIRE_HEARTBEAT_TIMEOUT_S", HEARTBEAT_TIMEOUT_S)
        self._next_ping = 0.0
        self._clock = WaitClock()
        self._calls = OpenCalls(self._silence_seconds)
        self._lock = threading.Lock()  # guards what follows; taken after the link's
        self.dead: EngineDeadError | None = None
        self._outbox = Outbox(self._fence)
        self._encoder: Codec[Any] = Codec(ToFrontend)
        self._closes_by: float | None = None  # when the client closes, whether all is sent by then or not
        self._link_lock = threading.Lock()  # held by the IO thread except while callbacks run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagewire-client", daemon=True)
        self._heart = threading.Thread(target=self._beat, name="pagewire-heartbeat", daemon=True)
        self._thread.start()
        self._heart.start()

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        on_deltas: Callable[[Deltas], None],
        on_dead: Callable[[EngineDeadError], None],
        on_refused: Callable[[list[int], Exception], None] = lambda keys, error: None,
        on_blocks: Callable[[Blocks], None] = lambda blocks: None,
        curve: CurveKeys | None = None,
        peer_uid: int | None = None,
        name: str = "",
        timeout: float | None = 10.0,
        patience: float | None = None,
        child: Child | None = None,
        cancelled: threading.Event | None = None,
    ) -> CoreClient:
        """Attach to the core at `address`, and wait until it is ready.

        peer_uid: id of the user as whom the core runs, for ipc addresses; None: this process's own user, or root.
        timeout: seconds to wait for a connection; once connected, the wait lasts until the model is loaded.
        patience: seconds for which a connected core may answer nothing at all; None: any.
        child: the spawned process that will listen there; its exit ends the wait, and `timeout` does not apply.
        cancelled: ends the wait when it is set.

        Raises:
            EngineDeadError: no core listens, or it failed while it started; the text is the cause.
            ProtocolError: the core uses another version of the protocol.
            ValueError: a bad address, or options of the core that cannot work, such as a model that it cannot load;
                `ModelNotFoundError` if there is no such model.
            PermissionError: the core runs as another user, or does not admit this user or key.
            TypeError, OSError, MemoryError: the core did not start for this reason.
        """
        link = Link(address, curve, peer_uid)
        try:
            welcome = attach_link(link, name, timeout, patience, child, cancelled)
            return cls(link, welcome, on_deltas, on_dead, on_refused, child, on_blocks)
        except BaseException:
            link.close()
            raise

    # -------------------------------------------------------------- any thread

    def submit(self, requests: Sequence[Request]) -> list[tuple[Request, ValueError]]:
        """Send new requests, those of a tenant in this order, in as many messages as their sizes need.

        They wait here while the core has as many of their tenant as it wants (`ipc.window`).

        Returns the requests that no message can hold, each with its error; the others are sent.

        Raises:
            EngineDeadError: the core is lost. EngineBusyError: it reads nothing, and too many messages wait.
            OverflowError, TypeError: a value that msgpack cannot represent; nothing is sent.
        """
        with self._lock:
            messages, refused = encode_requests(self._encoder, requests, self.info.max_message_bytes)
            self._check_open()
            for message in messages:
                self._outbox.add(*message)
            self._link.wake()
        return refused

    def abort(self, keys: Sequence[int] = (), sequences: Sequence[tuple[int, int]] = ()) -> None:
        """Drop requests, or single sequences (key, index) of them. Does nothing once the core is lost."""
        with self._lock:
            self._outbox.drop(set(keys))
        try:
            self._add(Abort(list(keys), list(sequences)), urgent=True)
        except EngineDeadError:
            pass

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call one of the core's methods. The future gets the answer, or the error that the core reports.

        Raises:
            EngineDeadError, EngineBusyError, OverflowError, TypeError: as `submit`.
            ValueError: the arguments are too large.
        """
        call_id, future = self._calls.open(method)
        try:
            self._add(Call(call_id, method, list(args), kwargs), call_id=call_id)
        except BaseException:
            self._calls.forget(call_id)
            raise
        return future

    def close(self) -> None:
        """Detach from the core, send what is in the outbox, and end the thread. May be called twice."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback must not close its client")
        try:
            self._add(Goodbye(), urgent=True, closes_by=time.monotonic() + FLUSH_SECONDS)
        except EngineDeadError:
            pass
        self._thread.join()
        self._heart.join()

    def _add(
        self,
        message: Any,
        *,
        urgent: bool = False,
        call_id: int | None = None,
        closes_by: float | None = None,
    ) -> None:
        """Add any other message, even to a full outbox if it is urgent. closes_by: it is the last; see there."""
        with self._lock:
            frames = self._encoder.encode(message)
            if (error := too_large(frames, "the message", self.info.max_message_bytes)) is not None:
                raise error
            self._check_open(urgent)
            if closes_by is not None:
                self._closes_by = closes_by
            self._outbox.add_control(frames, call_id)
            self._link.wake()

    def _check_open(self, urgent: bool = False) -> None:
        """Raise as `submit` if nothing more is accepted. The caller holds the lock."""
        if self.dead is not None:
            raise EngineDeadError(*self.dead.args)
        if self._closes_by is not None:
            raise EngineDeadError("the engine was shut down")
        if len(self._outbox) >= MAX_OUTBOX and not urgent:
            raise EngineBusyError(f"the engine core reads no messages; {MAX_OUTBOX} are waiting")

    def _fence(self) -> tuple[int, Frames]:
        """A call after which the outbox goes on, with any answer. The outbox asks for it, under the lock."""
        call_id, future = self._calls.open("fence")
        future.add_done_callback(lambda _: self._fence_passed(call_id))
        return call_id, self._encoder.encode(Call(call_id, "fence", []))

    def _fence_passed(self, call_id: int) -> None:
        with self._lock:
            self._outbox.passed(call_id)

    # -------------------------------------------------------------- the heartbeat thread

    def _beat(self) -> None:
        """Ping the core while the IO thread is in a callback; otherwise it holds the lock, and pings itself."""
        while not self._ended.wait(self._ping_seconds):
            if self._link_lock.acquire(blocking=False):
                try:
                    if not self._ended.is_set():
                        self._ping(time.monotonic())
                finally:
                    self._link_lock.release()

    # -------------------------------------------------------------- the IO thread

    def _run(self) -> None:
        cause: EngineDeadError | None
        try:
            cause = self._serve()
        except Exception as error:  # of any kind: no caller may wait for ever
            logger.debug("traceback", exc_info=True)
            text = f"the connection to the engine core failed: {type(error).__name__}: {error}"
            cause = EngineDeadError(text)
        self._end(cause)

    def _serve(self) -> EngineDeadError | None:
        """Send and receive until the client is closed, then return None; if the core is lost, return the cause."""
        while True:
            with self._link_lock:
                self._wait()
                # Before reading, so that the last messages of a dying core are still handled.
                lost = self._link.lost()
                messages = list(islice(self._link.messages(), None if lost else READ_AT_ONCE))
            if messages:
                self._clock.silence = 0.0
            for message in messages:
                if (cause := self._take(message)) is not None:
                    return cause
            if lost:
                return EngineDeadError(core_exit(self._child) or "the engine core closed the connection")
            if self._clock.silence > self._silence_seconds:
                return EngineDeadError(f"the engine core has not answered for {self._silence_seconds:g} s")
            if (method := self._calls.overdue(self._clock.waited)) is not None:
                return EngineDeadError(
                    f"the engine core sends heartbeats, but has not answered {method} in time"
                )
            now = time.monotonic()
            with self._link_lock:
                self._ping(now)
                self._send()
            if self._closes_by is not None and (not self._outbox or now > self._closes_by):
                return None

    def _wait(self) -> None:
        """Sleep until a message can be read or sent, or a deadline has passed."""
        now = time.monotonic()
        deadlines = [self._next_ping, now + max(0.0, self._silence_seconds - self._clock.silence)]
        if self._closes_by is not None:
            deadlines.append(self._closes_by)
        seconds = max(0.0, min(deadlines) - now)
        with self._lock:
            to_send = self._outbox.next() is not None
        self._clock.wait(self._link, seconds, to_send=to_send)

    def _take(self, message: ToFrontend) -> EngineDeadError | None:
        """Handle one message. Returns the cause if it ends the connection, else None."""
        if isinstance(message, Deltas):
            self._on_deltas(message)
        elif isinstance(message, Blocks):
            self._on_blocks(message)
        elif isinstance(message, CallAnswer):
            self._calls.settle(message)
        elif isinstance(message, CoreDying):
            return (EngineStoppedError if message.stopped else EngineDeadError)(message.cause)
        elif isinstance(message, Detached):
            return DetachedError(f"the engine core has detached this frontend: {message.cause}")
        elif isinstance(message, Refused):
            self._refused(message)
        return None

    def _refused(self, refused: Refused) -> None:
        """End the requests and the call that the core names as refused; all others go on."""
        error = received_error(refused.error, refused.error_type, refused.error_place)
        logger.error("the engine core refused a message: %s", error)
        if refused.call_id is not None:
            self._calls.fail(refused.call_id, error)
        if refused.keys:
            self._on_refused(refused.keys, error)

    def _ping(self, now: float) -> None:
        """Send a Ping if it is time. The caller holds the link's lock."""
        if now >= self._next_ping:
            self._next_ping = now + self._ping_seconds
            self._link.send(PING)

    def _send(self) -> None:
        """Send what can be sent without waiting. The caller holds the link's lock."""
        while True:
            with self._lock:
                frames = self._outbox.next()
                if frames is None or not self._link.send(frames):
                    return
                if (call_id := self._outbox.sent()) is not None:
                    self._calls.sent(call_id, self._clock.waited)

    def _end(self, cause: EngineDeadError | None) -> None:
        self._ended.set()
        dead = cause or EngineDeadError("the engine was shut down")
        with self._lock:
            self.dead = dead
            self._outbox.clear()
        with self._link_lock:
            self._link.close(linger_ms=int(FLUSH_SECONDS * 1000) if cause is None else 0)
        self._calls.fail_all(dead)
        if cause is not None:
            self._on_dead(cause)
