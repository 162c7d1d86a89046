"""Messages to frames and back.

A message is one msgpack frame. A `Tensor` in it travels as dtype and shape, with its bytes either inline
(below `INLINE_BYTES`) or as a raw frame of its own behind the first, so that large arrays are never copied
into msgpack. Nothing here executes what it reads: no pickle, no eval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from pagewire.ipc.errors import ProtocolError

INLINE_BYTES = 4096
MAX_MESSAGE_BYTES = 256 << 20
MAX_FRAMES = 4096

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

ITEM_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
FORMATS = {"bool": "?", "uint8": "B", "int32": "i", "int64": "q", "float32": "f", "float64": "d"}


class Tensor:
    """An array on the wire: dtype name, shape, and little-endian C-contiguous bytes.

    Decoded tensors pin the received message and are read-only: copy before keeping them for long.

    Raises:
        ValueError: unknown dtype, or bytes that do not fill the shape exactly.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: Buffer) -> None:
        if dtype not in ITEM_SIZES:
            raise ValueError(f"unknown tensor dtype {dtype!r}")
        if any(n < 0 for n in shape) or len(data) != math.prod(shape) * ITEM_SIZES[dtype]:
            raise ValueError(f"{len(data)} bytes do not fill a {dtype} tensor of shape {tuple(shape)}")
        self.dtype, self.shape, self.data = dtype, tuple(shape), data

    def tolist(self) -> list[Any]:
        """The values as a flat list (no torch, no numpy).

        Raises:
            TypeError: for 16-bit float dtypes, which the standard library cannot read.
        """
        if self.dtype not in FORMATS:
            raise TypeError(f"{self.dtype} has no plain Python form")
        return memoryview(self.data).cast("B").cast(FORMATS[self.dtype]).tolist()  # type: ignore[call-overload, no-any-return]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.dtype, self.shape, bytes(self.data)) == (other.dtype, other.shape, bytes(other.data))

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, bytes(self.data)))

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {self.shape})"


class Codec(Generic[T]):
    """Encodes any message struct, and decodes messages of the union `kinds`.

    One codec belongs to one thread: the frames of the message at hand are kept while it is read or written.
    """

    def __init__(self, kinds: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._pack)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds, dec_hook=self._unpack)
        self._frames: list[Buffer] = []

    def encode(self, message: Any) -> list[Buffer]:
        """The frames of `message`: its msgpack, then its large tensors.

        Raises:
            TypeError, OverflowError: a value that msgpack cannot hold.
        """
        self._frames = []
        head = self._encoder.encode(message)
        frames, self._frames = self._frames, []
        return [head, *frames]

    def decode(self, frames: Sequence[Buffer]) -> T:
        """The message in `frames`.

        Raises:
            ProtocolError: truncated, corrupt, oversized or foreign frames.
        """
        if not frames or len(frames) > MAX_FRAMES:
            raise ProtocolError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
        if (size := sum(len(frame) for frame in frames)) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        self._frames = list(frames[1:])
        try:
            return self._decoder.decode(frames[0])
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            text = str(error)
            if text.startswith("Expected `") and " - at `$" in text:
                text = with_value(text, frames[0])
            raise ProtocolError(f"not a message of this protocol: {text}") from error
        finally:
            self._frames = []

    def _pack(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(value).__name__} does not go over the wire")
        if len(value.data) < INLINE_BYTES:
            return value.dtype, value.shape, bytes(value.data)
        self._frames.append(value.data)
        return value.dtype, value.shape, len(self._frames) - 1

    def _unpack(self, kind: type, value: Any) -> Any:
        if kind is not Tensor:
            raise TypeError(f"{kind.__name__} does not come over the wire")
        dtype, shape, data = value
        if not isinstance(dtype, str) or not all(isinstance(n, int) for n in shape):
            raise TypeError("a tensor is [dtype, shape, data]")
        if isinstance(data, int):
            if not 0 <= data < len(self._frames):
                raise IndexError(f"tensor frame {data} of {len(self._frames)}")
            data = self._frames[data]
        if not isinstance(data, (bytes, memoryview)):
            raise TypeError("tensor data is bytes or a frame number")
        return Tensor(dtype, shape, data)


def with_value(problem: str, frame: Buffer) -> str:
    """An error of msgspec, which says where in a message a value is wrong, and that value."""
    try:
        value = msgspec.msgpack.decode(frame)
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", problem.partition(" - at `$")[2]):
            value = value[name or int(index)]
    except (ValueError, LookupError, TypeError, RecursionError):
        return problem  # the rest is damaged, too
    return f"{problem}, got {value!r:.100}"
