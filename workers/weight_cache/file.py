"""A file of packed weights: the bytes of its tensors, a header that describes them, a footer that ends it.

    content, tensors at multiples of 64 bytes | header, msgpack | footer: magic, sizes of both, CRC-32 of it all

The content is checked in pieces, each with its CRC-32 in the header, so that several threads can read and check it.
The checksums are for what disks, crashes and interrupted writes do: against other users stand the owners and modes
of file and folder (`folder.py`). Imports no torch: a worker reads the file while it still imports that.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from pagewire.ipc.shapes import Shape, num_values
from pagewire.ipc.wire.codec import Buffer
from pagewire.kernels.cpu.arena import Region
from pagewire.workers.checkpoint.read_progress import WEIGHTS

MAGIC = b"pagewire"
ALIGNMENT = 64
PIECE = 32 << 20
"""Bytes under one checksum. Reading threads compete with the main one for Python's lock once per piece."""
FOOTER = struct.Struct("<8sQQI")


class DamagedError(ValueError):
    """The file is not what was written."""


class TensorPlace(msgspec.Struct, array_like=True):
    """A tensor of the content. offset: in bytes. dtype: "float32" for `torch.float32`."""

    offset: int
    dtype: str
    shape: Shape


class Header(msgspec.Struct, array_like=True):
    """What a file holds. key: what its content was made of (`key.py`). description: of the model, see `forms.py`.

    checksums: CRC-32 of each piece of the content.
    """

    key: str
    tensors: list[TensorPlace]
    description: Any
    checksums: list[int]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to write: its dtype and shape, and its bytes."""

    dtype: str
    shape: list[int]
    data: memoryview


@dataclass(frozen=True)
class PackedFile:
    """A file that was read, and proved to be whole: its header, and its content in memory of this process."""

    header: Header
    content: Region


class _Pieces:
    """Writes bytes to a file, and computes the checksum of every piece."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.checksums: list[int] = []

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            done = self.size % PIECE
            part = view[: PIECE - done]
            if not done:
                self.checksums.append(0)
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self._file.write(part)
            self.size += len(part)
            view = view[len(part) :]


def size_of(tensors: Sequence[StoredTensor]) -> int:
    """Bytes of the content of a file with these tensors."""
    return sum(tensor.data.nbytes + -tensor.data.nbytes % ALIGNMENT for tensor in tensors)


def write(file: BinaryIO, key: str, tensors: Sequence[StoredTensor], description: Any) -> None:
    """Write a file. description: what msgpack can hold.

    Raises:
        OSError: it cannot be written.
    """
    pieces, places = _Pieces(file), []
    for tensor in tensors:
        places.append(TensorPlace(pieces.size, tensor.dtype, tensor.shape))
        pieces.write(tensor.data)
        pieces.write(bytes(-tensor.data.nbytes % ALIGNMENT))
    header = msgspec.msgpack.encode(Header(key, places, description, pieces.checksums))
    file.write(header)
    file.write(_footer(pieces.size, header))


def _footer(content_size: int, header: bytes) -> bytes:
    checksum = zlib.crc32(FOOTER.pack(MAGIC, content_size, len(header), 0) + header)
    return FOOTER.pack(MAGIC, content_size, len(header), checksum)


def read(descriptor: int, key: str, num_threads: int) -> PackedFile:
    """Read a file by `num_threads` threads, and check every byte of it.

    Raises:
        DamagedError: it is not what was written, or was written for another key.
        OSError: it cannot be read, or there is not enough memory.
    """
    header, size = _read_header(descriptor)
    if header.key != key or len(header.checksums) != -(-size // PIECE):
        raise DamagedError("its header is of another file")
    WEIGHTS.begin(size)
    content = Region(size)
    view = memoryview(content.memory)[content.offset : content.offset + size]

    def check(index: int) -> bool:
        piece = view[index * PIECE : (index + 1) * PIECE]
        _read_at(descriptor, piece, index * PIECE)
        WEIGHTS.done += len(piece)
        return zlib.crc32(piece) == header.checksums[index]

    with ThreadPoolExecutor(num_threads, "read-weights") as pool:
        intact = all(pool.map(check, range(len(header.checksums))))
    if not intact:
        raise DamagedError("its content does not fit its checksums")
    return PackedFile(header, content)


def _read_header(descriptor: int) -> tuple[Header, int]:
    """The header, and the size of the content."""
    total = os.fstat(descriptor).st_size
    footer = bytearray(FOOTER.size)
    if total < len(footer):
        raise DamagedError("it is too short")
    _read_at(descriptor, footer, total - len(footer))
    magic, content_size, header_size, _ = FOOTER.unpack(footer)
    if magic != MAGIC or content_size + header_size + len(footer) != total:
        raise DamagedError("it is cut off, or no file of packed weights")
    data = bytearray(header_size)
    _read_at(descriptor, data, content_size)
    if _footer(content_size, bytes(data)) != footer:
        raise DamagedError("its header is damaged")
    try:
        return msgspec.msgpack.decode(data, type=Header), content_size
    except msgspec.MsgspecError as error:
        raise DamagedError(f"its header cannot be read: {error}") from error


def _read_at(descriptor: int, to: Buffer, offset: int) -> None:
    view = memoryview(to)
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise DamagedError("it is cut off")
        view, offset = view[count:], offset + count


def bytes_of(place: TensorPlace, itemsize: int, content: Region) -> tuple[int, int]:
    """Start and number of a tensor's bytes within `content.memory`.

    Raises:
        DamagedError: it lies outside of the content.
    """
    try:
        size = itemsize * num_values(place.shape)
    except ValueError as error:
        raise DamagedError(str(error)) from None
    if place.offset % ALIGNMENT or not 0 <= place.offset <= place.offset + size <= content.size:
        raise DamagedError("a tensor lies outside of its content")
    return content.offset + place.offset, size
