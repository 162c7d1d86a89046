"""Server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on as they come
]
ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event that carries a struct."""
    return b"data: " + ENCODER.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One event that carries a struct, and says of which type."""
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(value) + b"\n\n"
