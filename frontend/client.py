"""The connection to the engine core. One thread owns the socket; any thread may use the client.

    submit, abort, call --> outbox --> [IO thread] --DEALER--> core
    on_deltas, on_dead, futures <----- [IO thread] <---------- core

A client is attached once. The loss of its core is final: the client reports it within milliseconds (socket
monitor, `CoreDying`, exit of a spawned core) or after `PAGEWIRE_HEARTBEAT_TIMEOUT_S` of silence, and accepts
nothing more.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from pagewire.ipc.codec import Buffer, Codec
from pagewire.ipc.errors import EngineBusyError, EngineDeadError, ProtocolError, received_error
from pagewire.ipc.gate import Gate, owner_of
from pagewire.ipc.lifeline import Child, exit_cause
from pagewire.ipc.messages import (
    PROTOCOL,
    Abort,
    Call,
    CallAnswer,
    CoreDying,
    Deltas,
    Goodbye,
    Hello,
    Ping,
    Refused,
    Request,
    Submit,
    ToFrontend,
    TokenDelta,
    Welcome,
)
from pagewire.ipc.options import env_float
from pagewire.ipc.sockets import CurveKeys, new_dealer, receive, send
from pagewire.ipc.version import __version__

HEARTBEAT_TIMEOUT_S = 30.0
MAX_OUTBOX = 100_000  # messages that wait for a core that reads none, before `submit` refuses more
FLUSH_SECONDS = 1.0  # how long closing may take to send what is in the outbox
EXIT_SECONDS = 1.0  # wait for the exit status of a core that has closed the connection
CONNECT_STEP_MS = 50  # interval at which a client that attaches checks its deadline and the spawned process

REACHED = zmq.EVENT_HANDSHAKE_SUCCEEDED
LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# Errors of a core that did not start which are about its options, its model or this machine: they keep their type.
# Any other is a failure of the core itself, and arrives as EngineDeadError.
START_ERRORS = (ValueError, TypeError, OSError, MemoryError, ProtocolError)


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
        peer_uid: int | None = None,
        name: str = "",
        timeout: float | None = 10.0,
        child: Child | None = None,
    ) -> CoreClient:
        """Attach to the core at `address`, and wait until it is ready.

        peer_uid: id of the user as whom the core runs, for ipc addresses; None: this process's own user, or root.
        timeout: seconds to wait for a connection; once connected, the wait lasts until the model is loaded.
        child: the spawned process that will listen there; its exit ends the wait, and `timeout` does not apply.

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


class Link:
    """A DEALER socket that connects to a core, and its monitor. Not thread-safe.

    An ipc connection is made only if the core runs as this user, as root, or as `peer_uid`.

    Attributes:
        reached: True once the core has accepted a connection. refusal: why one side has refused the other, if so.

    Raises:
        ValueError: a bad address, or keys without the server's.
    """

    def __init__(self, address: str, curve: CurveKeys | None, peer_uid: int | None = None) -> None:
        self.address = address
        self.reached = False
        self.refusal: PermissionError | None = None
        self._codec: Codec[ToFrontend] = Codec(ToFrontend)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            identity = f"frontend-{os.getpid()}-{uuid.uuid4().hex}".encode()
            self._gate = Gate(self._context, owner_of(address, peer_uid))
            guarded = address.startswith("ipc://") and curve is None  # a key proves more than a user id
            self._socket = new_dealer(self._context, address, identity, curve, guarded=guarded)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._monitor = self._socket.get_monitor_socket(REACHED | LOST)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._gate.socket, zmq.POLLIN)

    def wait(self, wake_fd: int | None, seconds: float, *, to_send: bool = False) -> bool:
        """Wait until a message has arrived, or `wake_fd` is readable; with `to_send` also until one can be sent.

        Returns True if `wake_fd` is readable.
        """
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if to_send else 0))
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)
        ready = {source for source, _ in self._poller.poll(math.ceil(seconds * 1000))}
        if self._gate.socket in ready:
            self._gate.answer()
        return wake_fd in ready

    def messages(self) -> Iterator[ToFrontend]:
        """The messages that have arrived.

        Raises:
            ProtocolError: one is invalid.
        """
        while True:
            try:
                frames = receive(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._codec.decode(frames)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send one message without waiting. Returns False if the queue to the core is full."""
        try:
            send(self._socket, frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def lost(self) -> bool:
        """True if the core closed the connection or refused the handshake since the last call."""
        lost = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self.reached |= bool(event & REACHED)
            lost |= bool(event & LOST)
            if event & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refusal = self._gate.refusal or PermissionError(
                    f"the core at {self.address} does not admit this user or CURVE key: see its log, and its "
                    "options --allow-uid, --curve-clients and --rights"
                )
        return lost

    def close(self, linger_ms: int = 0) -> None:
        """Close; wait up to `linger_ms` until queued messages are sent."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=linger_ms)


PING = Codec[Any](ToFrontend).encode(Ping())


def attach(link: Link, name: str, timeout: float | None, child: Child | None) -> Welcome:
    """Send `Hello` and return the core's `Welcome`.

    Raises:
        as `CoreClient.connect`.
    """
    hello = Hello(PROTOCOL, __version__, os.getpid(), name)
    link.send(Codec[Any](ToFrontend).encode(hello))
    give_up = None if timeout is None or child is not None else time.monotonic() + timeout
    while True:
        link.wait(None, CONNECT_STEP_MS / 1000)
        exited = child is not None and child.poll() is not None
        lost = link.lost()
        for message in link.messages():
            if isinstance(message, Welcome):
                return message
            if isinstance(message, Refused):
                raise start_error(received_error(message.error, message.error_type))
            if isinstance(message, CoreDying):
                raise start_error(EngineDeadError(message.cause))
        if child is not None and (lost or (exited and not link.reached)):
            cause = core_exit(child) or "it closed the connection"
            raise EngineDeadError(f"the engine core did not start: {cause}; its log tells why")
        if link.refusal is not None:
            raise link.refusal
        if lost:
            raise EngineDeadError(
                f"{link.address} closed the connection: no engine core, or other CURVE keys"
            )
        if give_up is not None and not link.reached and time.monotonic() > give_up:
            raise EngineDeadError(f"no engine core answers at {link.address} (waited {timeout:g} s)")


def start_error(error: Exception) -> Exception:
    """The exception for the caller whose core did not start because of `error`; see `START_ERRORS`."""
    if isinstance(error, START_ERRORS):
        return error
    cause = f"{error}" if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
    return EngineDeadError(f"the engine core did not start: {cause}")


def core_exit(child: Child | None) -> str | None:
    """How a spawned core has ended, waiting up to `EXIT_SECONDS`; None if it runs, or was not spawned."""
    if child is None:
        return None
    try:
        status = child.process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return f"the engine core (pid {child.pid}) {exit_cause(status)}"


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
