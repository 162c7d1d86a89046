"""What one frontend has not been sent yet, because it does not read: deltas, merged by sequence, and answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from pagewire.ipc.wire.budget import VALUE_BYTES
from pagewire.ipc.wire.codec import Buffer
from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.messages import Deltas
from pagewire.ipc.wire.requests import TokenDelta

DELTA_BYTES = 400  # memory of a delta without its tokens
# About this much is encoded at a time, in vain where there is still no room for it. ZeroMQ may keep `SEND_QUEUE`
# pieces for each frontend, beside what is kept here.
PIECE_BYTES = 128 << 10


class Backlog:
    """Unsent deltas by (key, index), and encoded answers to calls, which go after them.

    Deltas of one sequence are merged into one. A key must not be used again while it is in the backlog: the deltas
    of two requests would be merged.

    encode: the frames of a message.

    Attributes:
        num_bytes: estimate of the memory that all this takes.
    """

    def __init__(self, encode: Callable[[Deltas], list[Buffer]]) -> None:
        self.num_bytes = 0
        self._encode = encode
        self._answers: deque[list[Buffer]] = deque()
        self._deltas: dict[int, dict[int, TokenDelta]] = {}
        self._key_bytes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._deltas or self._answers)

    def __contains__(self, key: int) -> bool:
        return key in self._deltas

    def add(self, delta: TokenDelta) -> None:
        """Keep a delta."""
        group = self._deltas.setdefault(delta.key, {})
        earlier = group.get(delta.index)
        group[delta.index] = delta if earlier is None else merge(earlier, delta)
        size = content_bytes(delta) + (DELTA_BYTES if earlier is None else 0)
        self._key_bytes[delta.key] = self._key_bytes.get(delta.key, 0) + size
        self.num_bytes += size

    def add_answer(self, frames: list[Buffer]) -> None:
        """Keep the encoded answer to a call."""
        self._answers.append(frames)
        self.num_bytes += frame_bytes(frames)

    def forget(self, key: int) -> None:
        """Drop the deltas of a request."""
        self._deltas.pop(key, None)
        self.num_bytes -= self._key_bytes.pop(key, 0)

    @property
    def deltas(self) -> Iterator[TokenDelta]:
        """All deltas, one for each sequence."""
        return (delta for group in self._deltas.values() for delta in group.values())

    def send(self, send: Callable[[list[Buffer]], bool]) -> None:
        """Send piece after piece until all is sent, or `send` returns False."""
        while self._deltas:
            keys = list(self._first_keys())
            deltas = [delta for key in keys for delta in self._deltas[key].values()]
            if not send(self._encode(Deltas(deltas))):
                return
            for key in keys:
                self.forget(key)
        while self._answers and send(self._answers[0]):
            self.num_bytes -= frame_bytes(self._answers.popleft())

    def _first_keys(self) -> Iterator[int]:
        """The keys of the first requests, whose deltas have about `PIECE_BYTES`."""
        size = 0
        for key in self._deltas:
            if size >= PIECE_BYTES:
                return
            size += self._key_bytes[key]
            yield key


def frame_bytes(frames: list[Buffer]) -> int:
    """Bytes of an encoded message."""
    return DELTA_BYTES + sum(map(len, frames))


def content_bytes(delta: TokenDelta) -> int:
    """Estimate of the memory that the variable parts of a delta take, in bytes."""
    tensors = [
        tensor
        for rows in (delta.logprobs, delta.prompt_logprobs)
        if rows is not None
        for tensor in (rows.token_ids, rows.logprobs, rows.ranks)
    ]
    if delta.pooled is not None:
        tensors.append(delta.pooled)
    size = VALUE_BYTES * len(delta.token_ids) + len(delta.error or "")
    return size + sum(len(tensor.data) for tensor in tensors)


def merge(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Two consecutive deltas of a sequence as one."""
    return TokenDelta(
        key=first.key,
        index=first.index,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        logprobs=join(first.logprobs, second.logprobs),
        prompt_logprobs=join(first.prompt_logprobs, second.prompt_logprobs),
        pooled=second.pooled,
        num_cached_tokens=first.num_cached_tokens
        if second.num_cached_tokens is None
        else second.num_cached_tokens,
        timing=second.timing or first.timing,
        error=second.error,
        error_type=second.error_type,
        error_place=second.error_place,
        num_drafts=first.num_drafts + second.num_drafts,
        num_accepted=first.num_accepted + second.num_accepted,
        adapter=second.adapter or first.adapter,
        retained=second.retained or first.retained,
        weights=second.weights or first.weights,
    )


def join(first: LogprobRows | None, second: LogprobRows | None) -> LogprobRows | None:
    """The rows of both, in order; None if neither has any."""
    return LogprobRows.join([rows for rows in (first, second) if rows is not None])
