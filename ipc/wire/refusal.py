"""Refusing a message that is not decoded: the sender learns which of its requests and calls were in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

import msgspec

from pagewire.ipc.bounds import MAX_INT
from pagewire.ipc.errors import error_text, error_type
from pagewire.ipc.wire.codec import Buffer
from pagewire.ipc.wire.messages import Outline, Refused

READ_BYTES = 16 << 20  # of larger frames nothing is read: to pass over as much takes 20 ms

T = TypeVar("T")
Key = Annotated[int, msgspec.Meta(ge=-MAX_INT - 1, le=MAX_INT)]


class _Keyed(msgspec.Struct, array_like=True):
    """The beginning of a request."""

    key: Key


_KEYED: msgspec.msgpack.Decoder[_Keyed] = msgspec.msgpack.Decoder(_Keyed)
_NUMBER: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(Key)


def refusal(error: Exception, frames: Sequence[Buffer]) -> Refused:
    """The answer to a message that is not decoded, with the keys and the call that can be read in it."""
    outline = Outline.of(frames[0]) if frames and len(frames[0]) <= READ_BYTES else Outline()
    call_id = next(_read(_NUMBER, [outline.call_id]), None)
    keys = [request.key for request in _read(_KEYED, outline.requests)]
    return Refused(error_text(error), error_type(error), keys, call_id)


def _read(decoder: msgspec.msgpack.Decoder[T], items: Sequence[msgspec.Raw]) -> Iterator[T]:
    """Decode the items that can be."""
    for item in items:
        try:
            yield decoder.decode(item)
        except (ValueError, RecursionError):
            pass
