"""Messages for a core: requests of each tenant in turn, within its window, and all else in order. Pure.

    encode_requests --> add --> queue of the tenant --\
                add_control --> queue -----------------+--> next, sent --> core
                                         fences ------/                     |
                                         passed <---------------------------+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import msgspec

from pagewire.ipc.wire.budget import MAX_BATCH_BYTES
from pagewire.ipc.wire.codec import MAX_FRAMES, MAX_MESSAGE_BYTES, Buffer, Codec
from pagewire.ipc.wire.messages import Request
from pagewire.ipc.wire.tasks import submission
from pagewire.ipc.wire.window import Load

SUBMIT_BATCH = 64  # requests in one message, so that encoding it takes little memory

Frames: TypeAlias = list[Buffer]


class OutboxMessage(NamedTuple):
    """An encoded message.

    number: counts all messages of the outbox. keys: of its requests; a call has none. call_id: of a call.
    """

    frames: Frames
    number: int
    keys: Sequence[int] = ()
    call_id: int | None = None

    @property
    def num_requests(self) -> int:
        """The number of requests that it submits."""
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        """The size of all its frames."""
        return sum(map(len, self.frames))


class TenantQueue(msgspec.Struct):
    """Requests of one tenant. waiting: not sent yet. open: sent, and no fence after them is answered.

    unfenced: the part of the open ones after which no fence was sent.
    """

    waiting: deque[OutboxMessage] = msgspec.field(default_factory=deque)
    open: Load = msgspec.field(default_factory=Load)
    unfenced: Load = msgspec.field(default_factory=Load)

    @property
    def may_send(self) -> bool:
        """Whether its next message fits into the window."""
        return bool(self.waiting) and self.open.admits(
            self.waiting[0].num_requests, self.waiting[0].num_bytes
        )


class Fence(msgspec.Struct, frozen=True):
    """A call whose answer says that the core has taken requests of a tenant. load: how many."""

    call_id: int
    frames: Frames
    tenant: str
    load: Load


class Outbox:
    """Messages for one core. Not thread-safe.

    A control message waits until all requests that came before it are sent.

    fence: makes a call `fence`; returns its id and its frames.
    """

    def __init__(self, fence: Callable[[], tuple[int, Frames]]) -> None:
        self._make_fence = fence
        self._tenants: dict[str, TenantQueue] = {}  # the first is next
        self._controls: deque[OutboxMessage] = deque()
        self._unsent_fence: Fence | None = None
        self._fences: dict[int, Fence] = {}  # that are sent, by call
        self._num_added = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        """The number of messages that wait, without fences."""
        return self._num_waiting

    def add(self, tenant: str, frames: Frames, keys: Sequence[int]) -> None:
        """Add a message that submits a tenant's requests, after its earlier ones. keys: of the requests."""
        message = OutboxMessage(frames, self._num_added, keys)
        self._tenants.setdefault(tenant, TenantQueue()).waiting.append(message)
        self._count()

    def add_control(self, frames: Frames, call_id: int | None = None) -> None:
        """Add any other message, after all earlier ones. call_id: if it is a call."""
        self._controls.append(OutboxMessage(frames, self._num_added, call_id=call_id))
        self._count()

    def drop(self, keys: Set[int]) -> None:
        """Drop messages that submit nothing but requests with these keys."""
        for name, tenant in list(self._tenants.items()):
            remaining = deque(
                message for message in tenant.waiting if not all(key in keys for key in message.keys)
            )
            self._num_waiting -= len(tenant.waiting) - len(remaining)
            tenant.waiting = remaining
            if not remaining and not tenant.open:
                del self._tenants[name]

    def next(self) -> Frames | None:
        """The frames of the message whose turn it is; None if none may be sent now."""
        if self._unsent_fence is not None:
            return self._unsent_fence.frames
        if self._control_is_due():
            return self._controls[0].frames
        for name, tenant in self._tenants.items():
            if tenant.may_send:
                return tenant.waiting[0].frames
            if tenant.waiting and tenant.unfenced:
                return self._fence(name, tenant)
        return None

    def sent(self) -> int | None:
        """The message that `next` has returned is sent. Returns its id if it is a call, or a fence."""
        if (fence := self._unsent_fence) is not None:
            self._fences[fence.call_id] = fence
            self._unsent_fence = None
            return fence.call_id
        self._num_waiting -= 1
        if self._control_is_due():
            return self._controls.popleft().call_id
        name, tenant = next((name, tenant) for name, tenant in self._tenants.items() if tenant.may_send)
        message = tenant.waiting.popleft()
        self._tenants[name] = self._tenants.pop(name)  # after the others
        for load in (tenant.open, tenant.unfenced):
            load.add(message.num_requests, message.num_bytes)
        if tenant.unfenced.wants_fence:
            self._fence(name, tenant)
        return None

    def passed(self, call_id: int) -> None:
        """The call of a fence is answered."""
        if (fence := self._fences.pop(call_id, None)) is None:
            return  # everything was dropped meanwhile
        tenant = self._tenants[fence.tenant]
        tenant.open.add(-fence.load.num_requests, -fence.load.num_bytes)
        if not tenant.open and not tenant.waiting:
            del self._tenants[fence.tenant]

    def clear(self) -> None:
        """Drop all messages."""
        self._tenants.clear()
        self._controls.clear()
        self._fences.clear()
        self._unsent_fence = None
        self._num_waiting = 0

    def _count(self) -> None:
        self._num_added += 1
        self._num_waiting += 1

    def _control_is_due(self) -> bool:
        if not self._controls:
            return False
        oldest = min(
            (tenant.waiting[0].number for tenant in self._tenants.values() if tenant.waiting), default=None
        )
        return oldest is None or self._controls[0].number < oldest

    def _fence(self, name: str, tenant: TenantQueue) -> Frames:
        """Put a fence after what is sent of a tenant; it is the next message."""
        call_id, frames = self._make_fence()
        self._unsent_fence = Fence(call_id, frames, name, tenant.unfenced)
        tenant.unfenced = Load()
        return frames


class Submission(NamedTuple):
    """An encoded message that submits requests of one tenant. keys: of these requests."""

    tenant: str
    frames: list[Buffer]
    keys: list[int]


def encode_requests(
    codec: Codec[Any], requests: Sequence[Request], limit: int
) -> tuple[list[Submission], list[tuple[Request, ValueError]]]:
    """The messages that submit the requests, and the requests that no message can hold, each with its error.

    limit: bytes of a first frame that the core takes.

    Raises:
        OverflowError, TypeError: a value that msgpack cannot represent.
    """
    messages: list[Submission] = []
    refused: list[tuple[Request, ValueError]] = []
    for tenant, batch in batches(requests):
        pending = [batch]
        while pending:
            part = pending.pop()
            frames = codec.encode(submission(part))
            name = f"request {part[0].request_id[:100]!r}"
            error = too_large(frames, name, limit if len(part) == 1 else min(limit, MAX_BATCH_BYTES))
            if error is None:
                messages.append(Submission(tenant, frames, [request.key for request in part]))
            elif len(part) == 1:
                refused.append((part[0], error))
            else:
                half = len(part) // 2
                pending += [part[half:], part[:half]]  # the last one is next
    return messages, refused


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
