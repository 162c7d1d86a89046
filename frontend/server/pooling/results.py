"""Results of pooling as JSON, written in parts: a large answer neither holds up the event loop nor fills memory.

response with gaps --> {"data":[{"index":0,"embedding":  },{"index":1,"embedding":  }],"usage":{...}}
results ----------------------------------------------^-----------------------------^
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from pagewire.frontend.server.http import sse
from pagewire.ipc.wire.budget import SMALL_POOLED_BYTES
from pagewire.ipc.wire.codec import Tensor

EmbedDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]

GAP: Any = msgspec.Raw(b"\0")  # in place of a result: JSON has no such byte, as strings escape it
# Written at once, which takes less than a millisecond. A multiple of 3: base64 has no padding then but at the end.
NUMBERS = 3 << 12
PART_BYTES = 1 << 17  # of a part, at least: fewer writes


def fill_gaps(
    response: msgspec.Struct, tensors: Sequence[Tensor], dtype: EmbedDtype | None
) -> bytes | Iterator[bytes]:
    """The JSON of a response whose results are gaps, filled with tensors of float32; in parts if it is large.

    dtype: write base64 of numbers of this type, little-endian; None: write numbers.
    """
    parts = between(
        sse.ENCODER.encode(response).split(b"\0"), (write_result(tensor, dtype) for tensor in tensors)
    )
    if sum(len(tensor.data) for tensor in tensors) <= SMALL_POOLED_BYTES:
        return b"".join(parts)
    return join_parts(parts)


def between(texts: list[bytes], fillings: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """The texts, with one filling after each but the last."""
    for text, filling in zip(texts, fillings, strict=False):
        yield text
        yield from filling
    yield texts[-1]


def join_parts(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of at least `PART_BYTES`, but for the last one."""
    part = bytearray()
    for piece in parts:
        part += piece
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


def write_result(tensor: Tensor, dtype: EmbedDtype | None) -> Iterator[bytes]:
    """A result [size] or [tokens, size] as JSON, in parts: lists of numbers, or a string of base64."""
    values: Any = memoryview(tensor.data).cast("B").cast("f")
    if dtype is not None:
        yield b'"'
        for start in range(0, len(values), NUMBERS):
            yield base64.b64encode(as_dtype(values[start : start + NUMBERS], dtype))
        yield b'"'
        return
    width = tensor.shape[1] if len(tensor.shape) == 2 else 1
    step = max(1, NUMBERS // width) * width
    yield b"["
    for start in range(0, len(values), step):
        numbers = values[start : start + step].tolist()
        rows = numbers
        if len(tensor.shape) == 2:
            rows = [numbers[row : row + width] for row in range(0, len(numbers), width)]
        yield (b"," if start else b"") + sse.ENCODER.encode(rows)[1:-1]
    yield b"]"


def as_dtype(values: Any, dtype: EmbedDtype) -> Any:
    """Numbers of float32 as bytes of another type, rounded to the nearest, ties to even.

    What is too large for float16 becomes infinite.
    """
    if dtype == "float32":
        return values
    import numpy as np  # only here: the server's ordinary path is without it; `base64_dtype` has imported it

    numbers = np.frombuffer(values, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).tobytes()
    bits = numbers.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16).tobytes()
