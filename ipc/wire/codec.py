"""Encodes messages to ZeroMQ frames, and decodes them.

A message is one msgpack frame. A `Tensor` in it is encoded as dtype and shape, with its bytes either inline (below
`INLINE_BYTES`) or in a raw frame after the first, so that large arrays are not copied into msgpack. Decoding never
executes anything: no pickle, no eval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.quoting import quoted, shortened
from pagewire.ipc.shapes import MAX_DIMENSIONS, num_values

INLINE_BYTES = 4096  # smaller tensors cost less inline than as a frame of their own
MAX_MESSAGE_BYTES = 256 << 20  # limits the memory that a peer can make a process allocate with one message
MAX_FRAMES = 4096  # likewise
MAX_EXPLAINED_BYTES = (
    1 << 16
)  # the error for a longer message does not quote the wrong value, which takes decoding
MAX_PROBLEM = 500  # characters of an error of msgspec, which names tags and fields as the peer has sent them

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
    """An array in a message: dtype name, shape, and little-endian C-contiguous bytes.

    A decoded tensor is read-only and keeps the whole received message alive: copy it to keep it for long.

    Raises:
        ValueError: unknown dtype, a shape that is none (`num_values`), or the number of bytes does not match it.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: Buffer) -> None:
        if dtype not in ITEM_SIZES:
            raise ValueError(f"unknown tensor dtype {quoted(dtype)}")
        if len(data) != num_values(shape) * ITEM_SIZES[dtype]:
            raise ValueError(
                f"{len(data)} bytes do not fill a {dtype} tensor of shape {quoted(tuple(shape))}"
            )
        self.dtype, self.shape, self.data = dtype, tuple(shape), data

    def tolist(self) -> list[Any]:
        """The values as a flat list, without torch or numpy.

        Raises:
            TypeError: a 16-bit float dtype, which the standard library cannot read.
        """
        if self.dtype not in FORMATS:
            raise TypeError(f"{self.dtype} cannot be converted to Python numbers")
        return memoryview(self.data).cast("B").cast(FORMATS[self.dtype]).tolist()  # type: ignore[call-overload, no-any-return]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.dtype, self.shape, bytes(self.data)) == (other.dtype, other.shape, bytes(other.data))

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, bytes(self.data)))

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {self.shape})"


UNREAD = Tensor("uint8", (0,), b"")


class Codec(Generic[T]):
    """Encodes any message struct, and decodes messages of the union `kinds`.

    Not thread-safe: the frames of the current message are kept in the codec.

    Attributes:
        max_head_bytes: the largest first frame to decode. Its bytes become Python objects, unlike those of a
            tensor, so a receiver that does not trust its peer sets it to what the peer has reason to send.
        reads_tensors: False for a receiver that refuses whatever has tensors: each is then an empty one, unread.
        trusts: messages may have any number of bytes and frames, since the peer bounds them, as the core does those
            to a worker.
    """

    def __init__(
        self,
        kinds: Any,
        max_head_bytes: int = MAX_MESSAGE_BYTES,
        *,
        trusts: bool = False,
    ) -> None:
        self.max_head_bytes, self.trusts = max_head_bytes, trusts
        self.reads_tensors = True
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._pack)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds, dec_hook=self._unpack)
        self._frames: list[Buffer] = []

    def encode(self, message: Any) -> list[Buffer]:
        """The frames of `message`: msgpack first, then one frame for each large tensor.

        Raises:
            TypeError, OverflowError: a value that msgpack cannot represent.
        """
        self._frames = []
        head = self._encoder.encode(message)
        frames, self._frames = self._frames, []
        return [head, *frames]

    def decode(self, frames: Sequence[Buffer], check: Callable[[Buffer], None] | None = None) -> T:
        """The message in `frames`.

        check: called with a first frame that is within its limit, before it is decoded.

        Raises:
            ProtocolError: the frames are truncated, corrupt, too large, or no message of `kinds`.
            And what `check` raises.
        """
        if not frames or (len(frames) > MAX_FRAMES and not self.trusts):
            raise ProtocolError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
        if (size := sum(len(frame) for frame in frames)) > MAX_MESSAGE_BYTES and not self.trusts:
            raise ProtocolError(f"message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        if (size := len(frames[0])) > self.max_head_bytes:
            raise ProtocolError(
                f"message of {size} bytes is over the limit of {self.max_head_bytes}: send fewer requests in it"
            )
        if check is not None:
            check(frames[0])
        self._frames = list(frames[1:])
        try:
            return self._decoder.decode(frames[0])
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            text = str(error)
            explains = len(frames[0]) <= MAX_EXPLAINED_BYTES
            if explains and text.startswith("Expected `") and " - at `$" in text:
                text = with_value(text, frames[0])
            raise ProtocolError(f"not a message of this protocol: {shortened(text, MAX_PROBLEM)}") from error
        finally:
            self._frames = []

    def _pack(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"a message cannot contain {type(value).__name__}")
        if len(value.data) < INLINE_BYTES:
            return value.dtype, value.shape, bytes(value.data)
        self._frames.append(value.data)
        return value.dtype, value.shape, len(self._frames) - 1

    def _unpack(self, kind: type, value: Any) -> Any:
        if kind is not Tensor:
            raise TypeError(f"a message cannot contain {kind.__name__}")
        if not self.reads_tensors:
            return UNREAD
        dtype, shape, data = value
        if not isinstance(dtype, str) or not isinstance(shape, list):
            raise TypeError("a tensor is [dtype, shape, data]")
        if not all(isinstance(n, int) for n in shape[:MAX_DIMENSIONS]):  # a `Tensor` has no more
            raise TypeError("the shape of a tensor is a list of integers")
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
    return f"{problem}, got {quoted(value)}"
