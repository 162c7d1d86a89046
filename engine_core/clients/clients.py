"""The attached frontends, their unfinished sequences, and what is still to be sent to them.

The core never waits for a frontend. A killed frontend is detected by the next send, a slow reader gets merged
deltas, and a frontend that sends nothing for too long is detached.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any

import zmq

from pagewire.engine_core.clients.access import Access
from pagewire.engine_core.clients.backlog import Backlog
from pagewire.engine_core.clients.unfinished import UnfinishedRequests
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.errors import ProtocolError, error_place, error_text, error_type
from pagewire.ipc.wire.budget import MAX_CALL_BYTES, MAX_HELLO_BYTES
from pagewire.ipc.wire.calls import Right
from pagewire.ipc.wire.codec import Buffer, Codec
from pagewire.ipc.wire.messages import (
    PROTOCOL,
    CallAnswer,
    Deltas,
    Detached,
    EngineInfo,
    Hello,
    Outline,
    Pong,
    Refused,
    Submit,
    ToCore,
    check_batch,
)
from pagewire.ipc.wire.refusal import refusal
from pagewire.ipc.wire.sockets import receive_from, send

logger = logging.getLogger("pagewire.core")

# Messages that ZeroMQ keeps for each frontend, whatever their size. Read: a message may have megabytes, and what is
# not read yet waits in the frontend. Unsent: further output is merged, and bounded in bytes (`Backlog`).
RECEIVE_QUEUE = 4
SEND_QUEUE = 64
# Unsent output (tokens, refusals, answers) of all frontends, over which that with most of it is detached. That of
# 10 s at 15,000 tokens a second with 20 log probabilities each is about this much.
MAX_BACKLOG_BYTES = 32 << 20
MAX_REFUSED = 1000  # messages that a core which does not start answers before it looks whether it should end
GREETING_MS = 1000  # how long a core that does not start waits for a frontend to tell
MAX_FAULTS = 3  # messages that the core failed to handle, after which their sender is detached
NOT_ATTACHED = "it is not attached, or was silent or read nothing for too long"
SUBMIT = Submit.__struct_config__.tag
MAX_WARNINGS = 50  # lines about frontends' messages that are logged between two heartbeats


@dataclass(slots=True)
class AttachedClient:
    """One attached frontend.

    identity: its ZeroMQ routing id.
    number: counts attachments, so it is unique in the life of the core.
    last_seen: monotonic time of its last message.
    peer, rights: what the gate knows its connection as, and what it may do (`clients.access`).
    backlog: what could not be sent to it yet.
    requests: its unfinished sequences.
    num_faults: its messages that the core failed to handle.
    """

    identity: bytes
    number: int
    name: str
    pid: int
    last_seen: float
    peer: str
    rights: frozenset[Right]
    backlog: Backlog
    requests: UnfinishedRequests = field(default_factory=UnfinishedRequests)
    num_faults: int = 0

    @property
    def label(self) -> str:
        """Name and process id, for log lines."""
        return f"{self.name or 'frontend'} (pid {self.pid})"

    def check_right(self, right: Right, action: str) -> None:
        """Check that the frontend may do something. action: what it wants, for the error.

        Raises:
            PermissionError: it may not.
        """
        if right not in self.rights:
            raise PermissionError(
                f"{action} needs the right {right.value!r}, which {self.peer or self.label} does not have"
            )

    def check_message(self, head: Buffer) -> None:
        """Check that the frontend may send a message, before it is decoded. head: its first frame.

        Raises:
            PermissionError: it submits requests, and may not. ProtocolError: it is larger than any that it may.
        """
        if Right.GENERATE in self.rights:
            return
        if Outline.of(head).type == SUBMIT:
            self.check_right(Right.GENERATE, "a request")
        limit = MAX_HELLO_BYTES + (MAX_CALL_BYTES if Right.CONTROL in self.rights else 0)
        if len(head) > limit:
            raise ProtocolError(
                f"message of {len(head)} bytes is over the limit of {limit} for a frontend without the right "
                f"{Right.GENERATE.value!r}"
            )


class Clients:
    """The bound ROUTER socket and the frontends attached to it.

    silence_seconds: a frontend that sends nothing for this long is detached. access: what peers may do.
    max_backlog_bytes: when frontends leave more output than this unread, the one with most of it is detached.

    Attributes:
        attached: the frontends, by identity. told: one was told why the core fails to start.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        silence_seconds: float,
        access: Access | None = None,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        self.socket = socket
        self.attached: dict[bytes, AttachedClient] = {}
        self.told = False
        self._access = access or Access()
        self._peers: dict[bytes, str] = {}  # of those that have sent `Hello` and are not attached yet
        self._silence_seconds, self._max_backlog_bytes = silence_seconds, max_backlog_bytes
        self._num_warnings = 0
        self._codec: Codec[ToCore] = Codec(ToCore, MAX_HELLO_BYTES)
        self._lost: list[Sequence] = []
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self.attached)

    def accept(self, info: EngineInfo) -> None:
        """Take messages as an engine with these properties has them; until this is called, only greetings fit."""
        self._codec.max_head_bytes = info.max_message_bytes
        self._codec.reads_tensors = info.takes_tensors

    def attach(self, identity: bytes, name: str, pid: int, now: float) -> AttachedClient:
        """Register a frontend."""
        peer = self._peers.pop(identity, "")
        rights = self._access.rights(peer)
        backlog = Backlog(self._codec.encode)
        client = AttachedClient(identity, next(self._numbers), name, pid, now, peer, rights, backlog)
        self.attached[identity] = client
        logger.info("%s attached%s", client.label, f" as {peer}" if peer else "")
        return client

    def detach(self, client: AttachedClient, why: str) -> None:
        """Remove a frontend, which gives back the memory of its requests. The core ends these: see `lost`."""
        if self.attached.pop(client.identity, None) is not None:
            self._lost += client.requests.take_all()
            logger.info("%s detached: %s", client.label, why)

    def lost(self) -> list[Sequence]:
        """The unfinished sequences of the frontends detached since the last call, which are to be ended."""
        lost, self._lost = self._lost, []
        return lost

    def messages(self, now: float) -> Iterator[tuple[bytes, ToCore | None, int]]:
        """Messages that have arrived, each with its sender's identity and its size in bytes.

        An invalid one is answered with `Refused`, and None is given. There is no limit; ZeroMQ takes messages from
        all frontends in turn.
        """
        while True:
            try:
                sender, peer, frames = receive_from(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            num_bytes = sum(len(frame) for frame in frames)
            client = self.attached.get(sender)
            if client is not None and client.peer != peer:
                self.detach(client, f"{peer} has taken its place")
                client = None
            if client is not None:
                client.last_seen = now
            elif MAX_HELLO_BYTES < len(frames[0]) <= self._codec.max_head_bytes:
                # No greeting is that large, and to decode it would take long.
                self.send(sender, Detached(NOT_ATTACHED))
                yield sender, None, num_bytes
                continue
            try:
                message = self._codec.decode(frames, partial(check_message, client))
            except (ProtocolError, PermissionError) as error:
                self.warn("refused a message from %s: %s", client.label if client else sender, error)
                self.send(sender, refusal(error, frames))
                yield sender, None, num_bytes
                continue
            if isinstance(message, Hello):
                if not self._access.rights(peer):
                    self.refuse(sender, PermissionError(f"{peer} may no longer attach"))
                    yield sender, None, num_bytes
                    continue
                if message.protocol == PROTOCOL:  # the core refuses others
                    self._peers[sender] = peer
            yield sender, message, num_bytes

    def send(self, identity: bytes, message: Any) -> bool:
        """Send without waiting. Returns False if the frontend is gone or its queue is full."""
        return self._send_frames(identity, self._codec.encode(message))

    def _send_frames(self, identity: bytes, frames: list[Buffer]) -> bool:
        try:
            send(self.socket, [identity, *frames], zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            client = self.attached.get(identity)
            if client is not None:
                self.detach(client, "its process has ended")
            return False

    def refuse_all(self, error: BaseException, wait_ms: int = GREETING_MS) -> None:
        """Answer frontends that try to attach within `wait_ms` with `error`, because the core fails to start."""
        while self.socket.poll(wait_ms):
            for identity, _, _ in islice(self.messages(0.0), MAX_REFUSED):
                self.refuse(identity, error)
                self.told = True
            wait_ms = 0

    def refuse(self, identity: bytes, error: BaseException) -> None:
        """Answer a frontend's message with an error, which keeps its type."""
        self.send(identity, Refused(error_text(error), error_type(error), error_place=error_place(error)))

    def turn_away(self, identity: bytes, error: BaseException) -> None:
        """Refuse to attach a frontend that has greeted."""
        self._peers.pop(identity, None)
        self.refuse(identity, error)

    def deliver(self, client: AttachedClient, deltas: Deltas) -> None:
        """Send deltas; if the frontend's queue is full, merge them into its backlog."""
        if client.identity not in self.attached:
            return
        if not client.backlog and self.send(client.identity, deltas):
            return
        for delta in deltas:
            client.backlog.add(delta)
        self._limit_backlogs()

    def answer(self, identity: bytes, reply: CallAnswer) -> None:
        """Send the answer to a call, after all deltas that came before it."""
        client = self.attached.get(identity)
        if client is not None and (client.backlog or not self.send(identity, reply)):
            client.backlog.add_answer(self._codec.encode(reply))
            self._limit_backlogs()

    def fault(self, identity: bytes, error: Exception) -> None:
        """Record that a message could not be handled: answer it, and detach its sender if that repeats."""
        client = self.attached.get(identity)
        self.warn(
            "a message of %s could not be handled", client.label if client else identity, exc_info=error
        )
        self.refuse(identity, error)
        if client is not None:
            client.num_faults += 1
            if client.num_faults == MAX_FAULTS:
                self.detach(client, f"{MAX_FAULTS} of its messages could not be handled")

    def flush(self) -> None:
        """Retry to send backlogs."""
        for client in list(self.attached.values()):
            client.backlog.send(partial(self._send_frames, client.identity))

    @property
    def behind(self) -> bool:
        """True while any frontend has a backlog."""
        return any(client.backlog for client in self.attached.values())

    def heartbeat(self, now: float) -> None:
        """Send a heartbeat to every frontend; detach those that are silent for too long or lost their rights."""
        self._access.refresh()
        if (left_out := self._num_warnings - MAX_WARNINGS) > 0:
            logger.warning("%d more warnings about messages of frontends are left out", left_out)
        self._num_warnings = 0
        for client in list(self.attached.values()):
            client.rights = self._access.rights(client.peer)
            if not client.rights:
                self.refuse(client.identity, PermissionError(f"{client.peer} may no longer be attached"))
                self.detach(client, "its certificate or its rights were withdrawn")
                continue
            self.send(client.identity, Pong())
            if now - client.last_seen > self._silence_seconds:
                self.detach(client, f"no message for {now - client.last_seen:.0f} s")

    def warn(self, text: str, *values: object, exc_info: Exception | None = None) -> None:
        """Log a warning about a message; of a flood, only the first `MAX_WARNINGS` between two heartbeats."""
        self._num_warnings += 1
        if self._num_warnings <= MAX_WARNINGS:
            logger.warning(text, *values, exc_info=exc_info)

    def _limit_backlogs(self) -> None:
        """Detach the frontend that has read least, if all together leave too much unread."""
        clients = list(self.attached.values())
        if sum(client.backlog.num_bytes for client in clients) <= self._max_backlog_bytes:
            return
        client = max(clients, key=lambda client: client.backlog.num_bytes)
        size = client.backlog.num_bytes
        client.backlog = Backlog(self._codec.encode)
        self.detach(
            client,
            f"it does not read: {size:,} bytes of output are unsent (limit of all frontends: "
            f"{self._max_backlog_bytes:,})",
        )


def check_message(client: AttachedClient | None, head: Buffer) -> None:
    """Check a message before it is decoded. client: who sent it; None: it is not attached. head: its first frame.

    Raises:
        PermissionError, ProtocolError: as `check_batch` and `AttachedClient.check_message`.
    """
    check_batch(head)
    if client is not None:
        client.check_message(head)
