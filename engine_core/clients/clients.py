"""Attached frontends: who they are, what they run, and how much they have yet to read.

The core never waits for a frontend. One that is killed is noticed at the next send; one that reads slowly
gets merged deltas; one that says nothing for too long is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import zmq

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.codec import Codec, Tensor
from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.messages import CallAnswer, Deltas, LogprobRows, Pong, Refused, ToCore, TokenDelta
from pagewire.ipc.sockets import receive, send

logger = logging.getLogger("pagewire.core")

MAX_MESSAGES_PER_ITERATION = 256
MAX_UNREAD_REPLIES = 1000


@dataclass(slots=True)
class Client:
    """One frontend.

    number: counts attachments; no other frontend of this core ever has it.
    requests: its unfinished sequences by key.
    backlog, replies: deltas, and answers after them, that it could not take yet.
    """

    identity: bytes
    number: int
    name: str
    pid: int
    last_seen: float
    requests: dict[int, dict[int, Sequence]] = field(default_factory=dict)
    backlog: dict[tuple[int, int], TokenDelta] = field(default_factory=dict)
    replies: list[CallAnswer] = field(default_factory=list)

    @property
    def behind(self) -> bool:
        """True while it has yet to read what it was sent before."""
        return bool(self.backlog or self.replies)

    @property
    def label(self) -> str:
        """For log lines."""
        return f"{self.name or 'frontend'} (pid {self.pid})"

    def live_requests(self) -> Iterator[Sequence]:
        """All its unfinished sequences."""
        for group in self.requests.values():
            yield from group.values()


class Clients:
    """The frontends' end of the core: a bound ROUTER, and who is attached."""

    def __init__(self, socket: zmq.Socket[bytes], silence_seconds: float) -> None:
        self.socket = socket
        self.attached: dict[bytes, Client] = {}
        self._silence_seconds = silence_seconds
        self._codec: Codec[ToCore] = Codec(ToCore)
        self._lost: list[Client] = []
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self.attached)

    def attach(self, identity: bytes, name: str, pid: int, now: float) -> Client:
        """Know a frontend from now on."""
        client = self.attached[identity] = Client(identity, next(self._numbers), name, pid, now)
        logger.info("%s attached", client.label)
        return client

    def detach(self, client: Client, why: str) -> None:
        """Forget a frontend; `lost` gives it to whoever ends its requests."""
        if self.attached.pop(client.identity, None) is not None:
            logger.info("%s detached: %s", client.label, why)
            self._lost.append(client)

    def lost(self) -> list[Client]:
        """Frontends detached since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def messages(self, now: float) -> Iterator[tuple[bytes, ToCore]]:
        """Messages that have arrived, each with its sender. What is no message is answered with `Refused`."""
        for _ in range(MAX_MESSAGES_PER_ITERATION):
            try:
                identity, *frames = receive(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            sender = bytes(identity)
            client = self.attached.get(sender)
            if client is not None:
                client.last_seen = now
            try:
                message = self._codec.decode(frames)
            except ProtocolError as error:
                logger.warning("refused a message from %s: %s", client.label if client else sender, error)
                self.send(sender, Refused(error=str(error)))
                continue
            yield sender, message

    def send(self, identity: bytes, message: Any) -> bool:
        """Send without waiting. False if the frontend is gone, or has not read what it was sent before."""
        try:
            send(self.socket, [identity, *self._codec.encode(message)], zmq.NOBLOCK)
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

    def refuse_all(self, error: str, wait_ms: int = 1000) -> None:
        """Answer frontends that ask to attach within `wait_ms` with `error`: the core does not start."""
        while self.socket.poll(wait_ms):
            for identity, _ in self.messages(0.0):
                self.send(identity, Refused(error=error))
            wait_ms = 0

    def deliver(self, client: Client, deltas: list[TokenDelta]) -> None:
        """Send deltas, or merge them with what the frontend has yet to read."""
        if client.identity not in self.attached:
            return
        if not client.behind and self.send(client.identity, Deltas(deltas)):
            return
        for delta in deltas:
            place = (delta.key, delta.index)
            earlier = client.backlog.get(place)
            client.backlog[place] = delta if earlier is None else merge(earlier, delta)

    def answer(self, identity: bytes, reply: CallAnswer) -> None:
        """Send the answer to a call, after the deltas that were there before it."""
        client = self.attached.get(identity)
        if client is not None and (client.behind or not self.send(identity, reply)):
            client.replies.append(reply)
            if len(client.replies) > MAX_UNREAD_REPLIES:
                self.detach(client, "it does not read the answers to its calls")

    def flush(self) -> None:
        """Try again to send what slow frontends have yet to read."""
        for client in list(self.attached.values()):
            if client.backlog and self.send(client.identity, Deltas(list(client.backlog.values()))):
                client.backlog = {}
            while not client.backlog and client.replies and self.send(client.identity, client.replies[0]):
                del client.replies[0]

    @property
    def behind(self) -> bool:
        """True while some frontend has yet to read what it was sent."""
        return any(client.behind for client in self.attached.values())

    def heartbeat(self, now: float) -> None:
        """Tell every frontend that the core lives; drop those that have been silent for too long."""
        for client in list(self.attached.values()):
            self.send(client.identity, Pong())
            if now - client.last_seen > self._silence_seconds:
                self.detach(client, f"no message for {now - client.last_seen:.0f} s")


def merge(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """One delta that says what two in a row say."""
    return TokenDelta(
        key=first.key,
        index=first.index,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        logprobs=join(first.logprobs, second.logprobs),
        prompt_logprobs=join(first.prompt_logprobs, second.prompt_logprobs),
        num_cached_tokens=first.num_cached_tokens
        if second.num_cached_tokens is None
        else second.num_cached_tokens,
        timing=second.timing or first.timing,
        error=second.error,
        error_type=second.error_type,
    )


def join(first: LogprobRows | None, second: LogprobRows | None) -> LogprobRows | None:
    """The rows of both."""
    if first is None or second is None:
        return first or second

    def concatenate(a: Tensor, b: Tensor) -> Tensor:
        return Tensor(a.dtype, (a.shape[0] + b.shape[0], *a.shape[1:]), bytes(a.data) + bytes(b.data))

    return LogprobRows(
        concatenate(first.token_ids, second.token_ids),
        concatenate(first.logprobs, second.logprobs),
        concatenate(first.ranks, second.ranks),
    )
