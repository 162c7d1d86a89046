"""The connection to the engine core. One thread owns the socket; any thread may use the client.

    submit, abort, call --> outbox --> [IO thread] --DEALER--> core
    on_deltas, on_dead, futures <----- [IO thread] <---------- core

A client is attached once. The loss of its core is final: the client reports it within milliseconds (socket
monitor, `CoreDying`, exit of a spawned core) or after `PAGEWIRE_HEARTBEAT_TIMEOUT_S` of silence, and accepts
nothing more.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from pagewire.frontend.link import PING, Link, attach, core_exit
from pagewire.ipc.codec import Buffer, Codec
from pagewire.ipc.errors import EngineBusyError, EngineDeadError, received_error
from pagewire.ipc.lifeline import Child
from pagewire.ipc.messages import (
    Abort,
    Call,
    CallAnswer,
    CoreDying,
    Deltas,
    Goodbye,
    Refused,
    Request,
    Submit,
    ToFrontend,
    TokenDelta,
    Welcome,
)
from pagewire.ipc.options import env_float
from pagewire.ipc.sockets import CurveKeys

HEARTBEAT_TIMEOUT_S = 30.0
MAX_OUTBOX = 100_000  # messages that wait for a core that reads none, before `submit` refuses more
FLUSH_SECONDS = 1.0  # how long closing may take to send what is in the outbox


class CoreClient:
    """One attachment to a core, made by `CoreClient.connect`.

    Callbacks run on the client's own thread: `on_deltas` with the deltas of each step; `on_dead` once, when the
    core is lost (not after `close`), and nothing after it.

    Attributes:
        info: model and options of the core. dead: the cause, once the core is lost or the client is closed.
    """

    def __init__(
        self,
        link: Link,
        welcome: Welcome,
        on_deltas: Callable[[list[TokenDelta]], None],
        on_dead: Callable[[EngineDeadError], None],
        child: Child | None,
    ) -> None:
        self.info = welcome.info
        self.dead: EngineDeadError | None = None
        self._link, self._child = link, child
        self._on_deltas, self._on_dead = on_deltas, on_dead
        self._ping_seconds = welcome.ping_seconds
        self._silence_seconds = env_float("PAGEWIRE_HEARTBEAT_TIMEOUT_S", HEARTBEAT_TIMEOUT_S)
        self._next_ping = 0.0
        self._silent_since: float | None = None  # when the oldest unanswered Ping was sent
        self._encoder: Codec[Any] = Codec(ToFrontend)
        self._call_ids = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._outbox: deque[list[Buffer]] = deque()
        self._lock = threading.Lock()  # guards what several threads use: outbox, encoder, wake-up pipe, dead
        self._waking = False  # a byte is in the wake-up pipe
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        self._close_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="pagewire-client", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        on_deltas: Callable[[list[TokenDelta]], None],
        on_dead: Callable[[EngineDeadError], None],
        curve: CurveKeys | None = None,
        name: str = "",
        timeout: float | None = 10.0,
        child: Child | None = None,
    ) -> CoreClient:
        """Attach to the core at `address`, and wait until it is ready.

        timeout: seconds to wait for a connection; once connected, the wait lasts until the model is loaded.
        child: the spawned process that will listen there; its exit ends the wait, and `timeout` does not apply.

        Raises:
            EngineDeadError: no core listens, or it failed while it started; the text is the cause.
            ProtocolError: the core uses another version of the protocol.
            ValueError: a bad address, or options of the core that cannot work, such as a model that it cannot load;
                `ModelNotFoundError` if there is no such model.
            TypeError, OSError, MemoryError: the core did not start for this reason.
        """
        link = Link(address, curve)
        try:
            welcome = attach(link, name, timeout, child)
            return cls(link, welcome, on_deltas, on_dead, child)
        except BaseException:
            link.close()
            raise

    # -------------------------------------------------------------- any thread

    def submit(self, requests: Sequence[Request]) -> None:
        """Send new requests, in this order.

        Raises:
            EngineDeadError: the core is lost. EngineBusyError: it reads nothing, and too many messages wait.
            OverflowError, TypeError: a value that msgpack cannot represent.
        """
        self._post(Submit(list(requests)))

    def abort(self, keys: Sequence[int] = (), sequences: Sequence[tuple[int, int]] = ()) -> None:
        """Drop requests, or single sequences (key, index) of them. Does nothing once the core is lost."""
        try:
            self._post(Abort(list(keys), list(sequences)))
        except EngineDeadError:
            pass

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call one of the core's methods. The future gets the answer, or the error that the core reports.

        Raises:
            EngineDeadError, EngineBusyError, OverflowError, TypeError: as `submit`.
        """
        future: Future[Any] = Future()
        call_id = next(self._call_ids)
        self._calls[call_id] = future
        try:
            self._post(Call(call_id, method, list(args), kwargs))
        except BaseException:
            self._calls.pop(call_id, None)
            raise
        return future

    def close(self) -> None:
        """Detach from the core, send what is in the outbox, and end the thread. May be called twice."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback must not close its client")
        try:
            self._post(Goodbye(), closing=True)
        except (EngineDeadError, EngineBusyError):
            pass
        self._thread.join()

    def _post(self, message: Any, closing: bool = False) -> None:
        with self._lock:
            if self.dead is not None:
                raise EngineDeadError(*self.dead.args)
            if self._close_by is not None:
                raise EngineDeadError("the engine was shut down")
            if closing:
                self._close_by = time.monotonic() + FLUSH_SECONDS
            elif len(self._outbox) >= MAX_OUTBOX:
                raise EngineBusyError(f"the engine core reads no messages; {MAX_OUTBOX} are waiting")
            self._outbox.append(self._encoder.encode(message))
            if not self._waking:  # one wake-up for all messages until the thread empties the outbox
                self._waking = True
                os.write(self._wake_write_fd, b"!")

    # -------------------------------------------------------------- the IO thread

    def _run(self) -> None:
        try:
            cause = self._serve()
        except Exception as error:  # of any kind: no caller may wait for ever
            cause = f"the connection to the engine core failed: {type(error).__name__}: {error}"
        self._end(cause)

    def _serve(self) -> str | None:
        """Send and receive until the client is closed, then return None; if the core is lost, return the cause."""
        while True:
            self._wait()
            lost = (
                self._link.lost()
            )  # before reading, so that the last messages of a dying core are still handled
            for message in self._link.messages():
                if (cause := self._take(message)) is not None:
                    return cause
            if lost:
                return core_exit(self._child) or "the engine core closed the connection"
            now = time.monotonic()
            if self._silent(now):
                return f"the engine core has not answered for {self._silence_seconds:g} s"
            self._send(now)
            if self._close_by is not None and (not self._outbox or now > self._close_by):
                return None

    def _wait(self) -> None:
        """Sleep until a message can be read or sent, or a deadline has passed."""
        deadlines = [self._next_ping]
        if self._silent_since is not None:
            deadlines.append(self._silent_since + self._silence_seconds)
        if self._close_by is not None:
            deadlines.append(self._close_by)
        seconds = max(0.0, min(deadlines) - time.monotonic())
        if self._link.wait(self._wake_read_fd, seconds, to_send=bool(self._outbox)):
            os.read(self._wake_read_fd, 1)
            self._waking = False  # before the outbox is read, so that no wake-up is lost

    def _take(self, message: ToFrontend) -> str | None:
        """Handle one message. Returns the cause if it ends the connection, else None."""
        self._silent_since = None
        if isinstance(message, Deltas):
            self._on_deltas(message.deltas)
        elif isinstance(message, CallAnswer):
            if (future := self._calls.pop(message.call_id, None)) is not None:
                settle(future, message)
        elif isinstance(message, CoreDying):
            return message.cause
        elif isinstance(message, Refused):
            return f"the engine core refused a message: {message.error}"
        return None

    def _silent(self, now: float) -> bool:
        return self._silent_since is not None and now - self._silent_since > self._silence_seconds

    def _send(self, now: float) -> None:
        """Send what can be sent without waiting."""
        if now >= self._next_ping:
            self._next_ping = now + self._ping_seconds
            if self._silent_since is None:
                self._silent_since = now
            self._link.send(PING)
        while self._outbox and self._link.send(self._outbox[0]):
            self._outbox.popleft()

    def _end(self, cause: str | None) -> None:
        with self._lock:
            self.dead = EngineDeadError(cause or "the engine was shut down")
            self._outbox.clear()
            os.close(self._wake_write_fd)
            os.close(self._wake_read_fd)
        self._link.close(linger_ms=int(FLUSH_SECONDS * 1000) if cause is None else 0)
        for call_id in list(self._calls):
            fail(self._calls.pop(call_id), EngineDeadError(*self.dead.args))
        if cause is not None:
            self._on_dead(self.dead)


def settle(future: Future[Any], reply: CallAnswer) -> None:
    """Set the future of a call to its result or error."""
    if reply.error is not None:
        fail(future, received_error(reply.error, reply.error_type))
        return
    try:
        future.set_result(reply.result)
    except InvalidStateError:
        pass  # the caller has cancelled it


def fail(future: Future[Any], error: Exception) -> None:
    """Set the future of a call to an error."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        pass
