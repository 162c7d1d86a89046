"""Encoding of server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells proxies (nginx) not to buffer events
]
ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Return an event with a struct as JSON data."""
    return b"data: " + ENCODER.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Return an event with a name and a struct as JSON data."""
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(value) + b"\n\n"


def data_of(events: bytes) -> list[bytes]:
    """Return the data of encoded events, each of one line, as `event` and `named_event` make them."""
    return [event.partition(b"data: ")[2] for event in events.split(b"\n\n") if event]
