"""Refusing a message that cannot be decoded: the sender learns which of its requests and calls were in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pagewire.ipc.codec import Buffer
from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.messages import Refused

READ_BYTES = 1 << 20  # of larger frames nothing is read, since anything may be in them


def refusal(error: ProtocolError, frames: Sequence[Buffer]) -> Refused:
    """The answer to a message that cannot be decoded, with the keys and the call that can be read in it."""
    content: Any = None
    if frames and len(frames[0]) <= READ_BYTES:
        try:
            content = msgspec.msgpack.decode(frames[0])
        except (ValueError, TypeError, RecursionError):
            pass  # not even msgpack
    if not isinstance(content, dict):
        return Refused(str(error))
    requests, call_id = content.get("requests"), content.get("call_id")
    firsts = (
        [item[0] for item in requests if isinstance(item, list) and item]
        if isinstance(requests, list)
        else []
    )
    return Refused(
        str(error),
        keys=[key for key in firsts if is_number(key)],
        call_id=call_id if is_number(call_id) else None,
    )


def is_number(value: Any) -> bool:
    """True for an integer that a message can hold as a key."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63
