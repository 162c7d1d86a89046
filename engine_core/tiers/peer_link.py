"""The connection to one core from which KV blocks are fetched. Used by one thread, which never waits here.

A core is attached to another as a frontend is (`Hello`, `Ping`), and makes two calls there: `find_blocks` and
`fetch_blocks`. Whatever the other one does (it is not there, is slow, dies, sends what it should not), each call
ends, and memory is bounded: `RECEIVE_QUEUE` messages of limited size wait at most. What was fetched is not believed
here: the workers check it.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq

from pagewire.ipc.errors import EngineBusyError, ProtocolError, error_text
from pagewire.ipc.version import __version__
from pagewire.ipc.wire.calls import TICKET_BYTES
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.items import Message
from pagewire.ipc.wire.messages import (
    PROTOCOL,
    Call,
    CoreDying,
    Detached,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Refused,
    Welcome,
)
from pagewire.ipc.wire.sockets import CurveKeys, new_dealer, next_event, receive, send

logger = logging.getLogger("pagewire.core")

CALL_SECONDS = 5.0  # for an answer; then the core is left alone for a while
FAILED_SECONDS = 15.0  # for which a core is left alone that was lost, or sent what it should not
PING_SECONDS = 1.0
SILENT_SECONDS = 20.0  # without any message of a core that is attached
RECEIVE_QUEUE = 4  # messages of a core that ZeroMQ keeps
MAX_GREETING_BYTES = 256 << 10  # the largest message before a core is attached
MAX_UNASKED = 100  # messages of a core between two pings that answer nothing
LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class PeerAnswer(Message, tag="reply"):
    """A `CallAnswer` as the calls for blocks have it, whose decoding makes few objects."""

    call_id: int
    result: bytes | None = None
    error: str | None = None
    error_type: str | None = None


FromGreetedPeer: TypeAlias = Welcome | Refused | Detached | Pong | CoreDying
FromPeer: TypeAlias = PeerAnswer | Refused | Detached | Pong | CoreDying


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """How a question or a fetch has ended.

    number, first: of the question with the index of the first name; of the part, with None. peer: the core's index.
    content: a byte for each name, or entries; empty: the core has nothing, or could not be asked.
    seconds: that the answer took, or that passed since the answer before it, if that is less.
    """

    number: int
    peer: int
    first: int | None
    content: bytes = b""
    seconds: float = 0.0


@dataclass(slots=True)
class OpenPeerCall:
    """A call that is not answered. number, first: as of its `PeerEvent`. since: monotonic time."""

    number: int
    first: int | None
    since: float


class PeerLink:
    """One core.

    index: its own among all. max_bytes: of a message. ended: called with how each call ends.
    guarded: see `new_dealer`.

    Attributes:
        socket, monitor: None while the core is left alone. attached: it takes calls.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        index: int,
        address: str,
        curve: CurveKeys | None,
        max_bytes: int,
        ended: Callable[[PeerEvent], None],
    ) -> None:
        self.address, self.attached = address, False
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self._context, self._index, self._curve, self._max_bytes = context, index, curve, max_bytes
        self._ended = ended
        self._greetings: Codec[FromGreetedPeer] = Codec(FromGreetedPeer, MAX_GREETING_BYTES)
        self._answers: Codec[FromPeer] = Codec(FromPeer, max_bytes)
        for codec in (self._greetings, self._answers):
            codec.reads_tensors = False
        self._calls: dict[int, OpenPeerCall] = {}
        self._next_call = 1
        self._ticket = b""  # of the last answer with blocks
        self._next_start = self._next_ping = self._last_message = self._last_answer = 0.0
        self._num_unasked = 0
        self._why = ""

    # ------------------------------------------------------------ life

    def check(self, now: float) -> None:
        """Connect when it is time for it, send signs of life, and leave a core that sends none, or no answers."""
        if self.socket is None:
            if now >= self._next_start:
                self._open(now)
            return
        if self.monitor is not None and self.monitor.poll(0) and next_event(self.monitor) & LOST:
            self.leave(now, "it has closed the connection: it has ended, or does not admit this core")
        elif any(now - call.since > CALL_SECONDS for call in self._calls.values()):
            self.leave(now, f"it has not answered for {CALL_SECONDS:g} s")
        elif self.attached and now - self._last_message > SILENT_SECONDS:
            self.leave(now, f"it was silent for {SILENT_SECONDS:g} s")
        elif self.attached and now >= self._next_ping:
            self._next_ping, self._num_unasked = now + PING_SECONDS, 0
            self._send(Ping())

    def _open(self, now: float) -> None:
        # Another identity each time: what an earlier connection has not read is not this one's.
        identity = f"core-{os.getpid()}-{uuid.uuid4().hex}".encode()
        guarded = self.address.startswith("ipc://") and self._curve is None
        self.socket = new_dealer(self._context, self.address, identity, self._curve, guarded=guarded)
        self.socket.rcvhwm, self.socket.maxmsgsize = RECEIVE_QUEUE, self._max_bytes
        self.monitor = self.socket.get_monitor_socket(LOST)
        self.socket.connect(self.address)
        self._last_message, self._ticket, self._num_unasked = now, b"", 0
        self._send(Hello(PROTOCOL, __version__, os.getpid(), "core"))

    def leave(self, now: float, why: str) -> None:
        """Close the connection: all calls end with nothing. It is made again after a while."""
        if self.attached or why != self._why:
            logger.warning("no KV blocks from %s: %s", self.address, why)
        self._why = why
        self._next_start = now + FAILED_SECONDS
        self.close()
        for call in self._calls.values():
            self._ended(PeerEvent(call.number, self._index, call.first))
        self._calls.clear()

    def close(self) -> None:
        """Close the sockets."""
        if self.monitor is not None and self.socket is not None:
            if self.attached:
                self._send(Goodbye())
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = self.monitor = None
        self.attached = False

    # ------------------------------------------------------------ calls

    def find(self, number: int, first: int, identity: bytes, names: bytes, now: float) -> None:
        """Ask which blocks the core has. number, first: of the event that ends it."""
        self._call(OpenPeerCall(number, first, now), "find_blocks", [identity, names])

    def fetch(self, number: int, identity: bytes, names: bytes, now: float) -> None:
        """Fetch blocks. number: of the event that ends it."""
        self._call(OpenPeerCall(number, None, now), "fetch_blocks", [identity, names, self._ticket])

    def _call(self, call: OpenPeerCall, method: str, args: list[Any]) -> None:
        call_id, self._next_call = self._next_call, self._next_call + 1
        if self.attached and self._send(Call(call_id, method, args)):
            self._calls[call_id] = call
        else:
            self._ended(PeerEvent(call.number, self._index, call.first))

    def _send(self, message: Any) -> bool:
        assert self.socket is not None
        try:
            send(self.socket, self._answers.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # ------------------------------------------------------------ messages

    def receive(self, now: float) -> None:
        """Handle the messages that have arrived, but not more than `MAX_UNASKED` at once."""
        for _ in range(MAX_UNASKED):
            if self.socket is None:
                return
            try:
                frames = receive(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle((self._answers if self.attached else self._greetings).decode(frames), now)
            except ProtocolError as error:
                self.leave(now, f"it has sent what it should not: {error_text(error)}")

    def _handle(self, message: FromGreetedPeer | FromPeer, now: float) -> None:
        """Handle a message.

        Raises:
            ProtocolError: it is none that this core waits for.
        """
        self._last_message = now
        if isinstance(message, PeerAnswer):
            self._take_answer(message, now)
        elif isinstance(message, Welcome):
            self.attached, self._next_ping = True, now
            logger.info("KV blocks may come from %s", self.address)
        elif isinstance(message, Pong):
            self._num_unasked += 1
            if self._num_unasked > MAX_UNASKED:
                raise ProtocolError("too many signs of life")
        else:
            self.leave(now, message.error if isinstance(message, Refused) else message.cause)

    def _take_answer(self, answer: PeerAnswer, now: float) -> None:
        call = self._calls.pop(answer.call_id, None)
        if call is None:
            raise ProtocolError("an answer to nothing")
        content = answer.result or b""
        if answer.error is None and call.first is None:
            self._ticket, content = content[:TICKET_BYTES], content[TICKET_BYTES:]
        seconds, self._last_answer = now - max(call.since, self._last_answer), now
        self._ended(PeerEvent(call.number, self._index, call.first, content, seconds))
        if answer.error is not None and answer.error_type != EngineBusyError.__name__:
            self.leave(now, answer.error)
