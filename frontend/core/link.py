"""The socket between a frontend and an engine core: connecting, the handshake, sending and receiving."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from pagewire.ipc.errors import EngineDeadError, ProtocolError, received_error
from pagewire.ipc.host.gate import Gate, owner_of
from pagewire.ipc.version import __version__
from pagewire.ipc.wire.codec import Buffer, Codec
from pagewire.ipc.wire.messages import PROTOCOL, CoreDying, Hello, Ping, Refused, ToFrontend, Welcome
from pagewire.ipc.wire.sockets import CurveKeys, new_dealer, next_event, receive, send

if TYPE_CHECKING:
    from pagewire.ipc.host.lifeline import Child

EXIT_SECONDS = 1.0  # wait for the exit status of a core that has closed the connection
PING_SECONDS = 1.0  # interval of pings to a core that has not answered yet
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


class Link:
    """A DEALER socket that connects to a core, and its monitor. Not thread-safe, but for `wake`.

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
        self._lost = False
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
        self._waking = False  # a byte is in the pipe
        self._wake_fd, self._wake_write_fd = os.pipe()
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def wake(self) -> None:
        """End the `wait` of another thread, or the next one. Called by one thread at a time, before `close`."""
        if not self._waking:  # one byte, until the waiting thread has read it
            self._waking = True
            os.write(self._wake_write_fd, b"!")

    def wait(self, seconds: float, *, to_send: bool = False) -> None:
        """Wait until a message has arrived or `wake` is called; with `to_send` also until a message can be sent."""
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if to_send else 0))
        ready = {source for source, _ in self._poller.poll(math.ceil(seconds * 1000))}
        if self._gate.socket in ready:
            self._gate.answer()
        if self._wake_fd in ready:
            os.read(self._wake_fd, 1)
            self._waking = False

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
        """True once the core has closed the connection or refused the handshake; ZeroMQ may connect again later."""
        while self._monitor.poll(0):
            event = next_event(self._monitor)
            self.reached |= bool(event & REACHED)
            self._lost |= bool(event & LOST)
            if event & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refusal = self._gate.refusal or PermissionError(
                    f"the core at {self.address} does not admit this user or CURVE key: see its log, and its "
                    "options --allow-uid, --curve-clients and --rights"
                )
        return self._lost

    def close(self, linger_ms: int = 0) -> None:
        """Close; wait up to `linger_ms` until queued messages are sent."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        os.close(self._wake_write_fd)
        os.close(self._wake_fd)
        self._context.destroy(linger=linger_ms)


PING = Codec[Any](ToFrontend).encode(Ping())


def attach_link(
    link: Link,
    name: str,
    timeout: float | None,
    patience: float | None,
    child: Child | None,
    cancelled: threading.Event | None,
) -> Welcome:
    """Send `Hello` and return the core's `Welcome`.

    Raises:
        as `CoreClient.connect`.
    """
    hello = Hello(PROTOCOL, __version__, os.getpid(), name)
    link.send(Codec[Any](ToFrontend).encode(hello))
    give_up = None if timeout is None or child is not None else time.monotonic() + timeout
    answered = next_ping = time.monotonic()
    while cancelled is None or not cancelled.is_set():
        link.wait(CONNECT_STEP_MS / 1000)
        exited = child is not None and child.poll() is not None
        lost = link.lost()
        now = time.monotonic()
        for message in link.messages():
            answered = now
            if (welcome := handshake(message)) is not None:
                return welcome
        if child is not None and (lost or (exited and not link.reached)):
            cause = core_exit(child) or "it closed the connection"
            raise EngineDeadError(f"the engine core did not start: {cause}; its log says why")
        if link.refusal is not None:
            raise link.refusal
        if lost:
            raise EngineDeadError(
                f"{link.address} closed the connection: no engine core, or other CURVE keys"
            )
        if give_up is not None and not link.reached and now > give_up:
            raise EngineDeadError(f"no engine core answers at {link.address} (waited {timeout:g} s)")
        if patience is not None and link.reached and now >= next_ping:
            if now - answered > patience:
                raise EngineDeadError(f"the engine core at {link.address} answers nothing for {patience:g} s")
            next_ping = now + PING_SECONDS
            link.send(PING)  # a core that is loading answers that we are not attached
    raise EngineDeadError("the engine was shut down")


def handshake(message: ToFrontend) -> Welcome | None:
    """The answer to `Hello`, if this message is it.

    Raises:
        as `CoreClient.connect`: the core refuses, or ends.
    """
    if isinstance(message, Welcome):
        return message
    if isinstance(message, Refused):
        raise start_error(received_error(message.error, message.error_type, message.error_place))
    if isinstance(message, CoreDying):
        raise start_error(EngineDeadError(message.cause))
    return None


def start_error(error: Exception) -> Exception:
    """The exception for the caller whose core did not start because of `error`; see `START_ERRORS`."""
    if isinstance(error, START_ERRORS):
        return error
    cause = f"{error}" if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
    return EngineDeadError(f"the engine core did not start: {cause}")


def core_exit(child: Child | None) -> str | None:
    """How a spawned core has ended, waiting up to `EXIT_SECONDS`; None if it runs, or was not spawned."""
    if child is None or (cause := child.exit_cause(EXIT_SECONDS)) is None:
        return None
    return f"the engine core (pid {child.pid}) {cause}"
