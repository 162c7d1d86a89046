"""The queue between the threads that send to a core and the thread that owns the socket."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from pagewire.frontend.core.open_calls import OpenCalls
from pagewire.frontend.core.outbox import Outbox
from pagewire.ipc.errors import EngineBusyError, EngineDeadError
from pagewire.ipc.wire.budget import MAX_BATCH_BYTES
from pagewire.ipc.wire.codec import MAX_FRAMES, MAX_MESSAGE_BYTES, Buffer, Codec
from pagewire.ipc.wire.messages import Call, EngineInfo, Request, ToFrontend
from pagewire.ipc.wire.tasks import submission

SUBMIT_BATCH = 64  # requests in one message, so that encoding it takes little memory
MAX_OUTBOX = 100_000  # messages that wait for a core that reads none, before `submit` refuses more


class SendQueue:
    """Messages for one core, encoded by the thread that adds them. Thread-safe.

    calls: open calls, to which fences are added. info: of the core, which limits the size of messages.

    Attributes:
        dead: why nothing more is accepted, once `close` was called. wake_fd: readable when there is something to
            send. closes_by: time at which the queue closes, sent or not; None: it stays open.
    """

    def __init__(self, calls: OpenCalls, info: EngineInfo) -> None:
        self.dead: EngineDeadError | None = None
        self.closes_by: float | None = None
        self._calls, self._info = calls, info
        self._lock = threading.Lock()  # guards all below
        self._encoder: Codec[Any] = Codec(ToFrontend)
        self._outbox = Outbox(self._fence)
        self._waking = False  # a byte is in the wake-up pipe
        self.wake_fd, self._wake_write_fd = os.pipe()

    # -------------------------------------------------------------- any thread

    def submit(self, requests: Sequence[Request]) -> list[tuple[Request, ValueError]]:
        """Add requests, as `CoreClient.submit`."""
        refused: list[tuple[Request, ValueError]] = []
        with self._lock:
            messages = [
                (tenant, frames, keys)
                for tenant, batch in batches(requests)
                for frames, keys in self._encode_requests(batch, refused)
            ]
            self._check_open()
            for message in messages:
                self._outbox.add(*message)
            self._wake()
        return refused

    def add(
        self,
        message: Any,
        urgent: bool = False,
        call_id: int | None = None,
        closes_by: float | None = None,
    ) -> None:
        """Add any other message, even to a full queue if it is urgent. closes_by: it is the last; see there.

        Raises:
            as `CoreClient.call`.
        """
        with self._lock:
            frames = self._encoder.encode(message)
            if (error := too_large(frames, "the message", self._info.max_message_bytes)) is not None:
                raise error
            self._check_open(urgent)
            if closes_by is not None:
                self.closes_by = closes_by
            self._outbox.add_control(frames, call_id)
            self._wake()

    def drop(self, keys: Set[int]) -> None:
        """Drop messages that submit nothing but requests with these keys."""
        with self._lock:
            self._outbox.drop(keys)

    # -------------------------------------------------------------- the thread that sends

    def next(self) -> list[Buffer] | None:
        """The frames of the next message; None if none may be sent now."""
        with self._lock:
            return self._outbox.next()

    def send(self, send: Callable[[Sequence[Buffer]], bool], now: float) -> bool:
        """Send the next message with `send`, which returns False if it would have to wait. False: nothing was sent.

        now: time on the clock of the calls.
        """
        with self._lock:
            frames = self._outbox.next()
            if frames is None or not send(frames):
                return False
            if (call_id := self._outbox.sent()) is not None:
                self._calls.sent(call_id, now)
            return True

    def take_wake_up(self) -> None:
        """Read from `wake_fd`, which is readable."""
        os.read(self.wake_fd, 1)
        self._waking = False

    def is_closed(self, now: float) -> bool:
        """True if the last message is sent, or it is too late to send it."""
        return self.closes_by is not None and (not self._outbox or now > self.closes_by)

    def close(self, dead: EngineDeadError) -> None:
        """Accept nothing more, and drop what waits."""
        with self._lock:
            self.dead = dead
            self._outbox.clear()
            os.close(self._wake_write_fd)
            os.close(self.wake_fd)

    # -------------------------------------------------------------- under the lock

    def _encode_requests(
        self, requests: Sequence[Request], refused: list[tuple[Request, ValueError]]
    ) -> Iterator[tuple[list[Buffer], list[int]]]:
        """The messages that submit the requests, each with their keys; too large ones are halved.

        What no message can hold is `refused`.
        """
        frames = self._encoder.encode(submission(requests))
        name = f"request {requests[0].request_id[:100]!r}"
        limit = self._info.max_message_bytes
        if len(requests) > 1:
            limit = min(limit, MAX_BATCH_BYTES)
        if (error := too_large(frames, name, limit)) is None:
            yield frames, [request.key for request in requests]
        elif len(requests) == 1:
            refused.append((requests[0], error))
        else:
            half = len(requests) // 2
            yield from self._encode_requests(requests[:half], refused)
            yield from self._encode_requests(requests[half:], refused)

    def _check_open(self, urgent: bool = False) -> None:
        """Raise as `CoreClient.submit` if nothing more is accepted."""
        if self.dead is not None:
            raise EngineDeadError(*self.dead.args)
        if self.closes_by is not None:
            raise EngineDeadError("the engine was shut down")
        if len(self._outbox) >= MAX_OUTBOX and not urgent:
            raise EngineBusyError(f"the engine core reads no messages; {MAX_OUTBOX} are waiting")

    def _wake(self) -> None:
        if not self._waking:  # one wake-up for all messages until the sending thread empties the queue
            self._waking = True
            os.write(self._wake_write_fd, b"!")

    def _fence(self) -> tuple[int, list[Buffer]]:
        """A call after which the outbox goes on, with any answer."""
        call_id, future = self._calls.open("fence")
        future.add_done_callback(lambda _: self._passed(call_id))
        return call_id, self._encoder.encode(Call(call_id, "fence", []))

    def _passed(self, call_id: int) -> None:
        with self._lock:
            self._outbox.passed(call_id)


def batches(requests: Sequence[Request]) -> Iterator[tuple[str, list[Request]]]:
    """The requests of each tenant, in order, in parts for one message."""
    by_tenant: dict[str, list[Request]] = {}
    for request in requests:
        by_tenant.setdefault(request.tenant, []).append(request)
    for tenant, queued in by_tenant.items():
        for at in range(0, len(queued), SUBMIT_BATCH):
            yield tenant, queued[at : at + SUBMIT_BATCH]


def too_large(frames: Sequence[Buffer], name: str, limit: int) -> ValueError | None:
    """The error for a message that the core does not take; None if it does. limit: bytes of its first frame."""
    size, total = len(frames[0]), sum(map(len, frames))
    if size <= limit and (total > MAX_MESSAGE_BYTES or len(frames) > MAX_FRAMES):
        return ValueError(
            f"{name} is too large: {total} bytes in {len(frames)} parts, and a message has at most "
            f"{MAX_MESSAGE_BYTES} in {MAX_FRAMES}: send fewer embeddings"
        )
    if size <= limit:
        return None
    return ValueError(
        f"{name} is too large: {size} bytes, and a message to this engine core has at most {limit}; shorten the "
        "prompt or the parameters"
    )
