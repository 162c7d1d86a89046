"""The limits of a compiled kernel's launch. A launch over one is refused by name, which drivers do not do."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

WARP = 32
REGISTERS = 65536
"""Of a multiprocessor, from sm_80 to sm_100: a block's registers must fit."""
REGISTER_UNIT = 8
"""The registers of a thread are allotted in multiples of this."""

SECTION_HEADERS, NUM_SECTIONS = 0x28, 0x3C  # offsets in the header of an ELF file
SECTION, SECTION_BYTES = "<IIQQQQIIQQ", 64
ATTRIBUTE, LONG = (
    "<BBH",
    4,
)  # of a kernel's information: format, kind, value or length; LONG: the value follows
MAX_THREADS = 5  # the kind of the attribute that `__launch_bounds__` makes


class LaunchError(RuntimeError):
    """A device cannot run kernels, or not this one. The message names it."""


def launch_bound(image: bytes, symbol: str) -> int:
    """The largest number of threads of a block for which a cubin's kernel was compiled; 0 if it has no bound.

    Raises:
        ValueError: the cubin has no information about the kernel.
    """
    for name, content in _sections(image):
        if name == f".nv.info.{symbol}":
            return math.prod(struct.unpack("<III", _attributes(content).get(MAX_THREADS, bytes(12))))
    raise ValueError(f"the cubin has no information about {symbol}")


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """The names and contents of an ELF file's sections."""
    (start,) = struct.unpack_from("<Q", image, SECTION_HEADERS)
    count, of_names = struct.unpack_from("<HH", image, NUM_SECTIONS)
    headers = [struct.unpack_from(SECTION, image, start + i * SECTION_BYTES) for i in range(count)]
    names = headers[of_names][4]
    for header in headers:
        name = image[names + header[0] : image.index(b"\0", names + header[0])]
        yield name.decode(), image[header[4] : header[4] + header[5]]


def _attributes(content: bytes) -> dict[int, bytes]:
    """The attributes of a kernel that are longer than two bytes."""
    result, place = {}, 0
    while place + 4 <= len(content):
        kind, number, length = struct.unpack_from(ATTRIBUTE, content, place)
        place += 4
        if kind == LONG:
            result[number] = content[place : place + length]
            place += length
    return result


def check_launch(
    name: str,
    block: Sequence[int],
    *,
    bound: int,
    registers: int,
    shared_bytes: int,
    most_shared_bytes: int,
) -> None:
    """Refuse a launch that a device cannot run.

    Args:
        name: of the kernel.
        block: threads along each axis.
        bound: see `launch_bound`.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic.
        most_shared_bytes: that the device allows a block.

    Raises:
        LaunchError: the block has too many threads, registers or bytes of shared memory.
    """
    threads = math.prod(block)
    if bound and threads > bound:
        raise LaunchError(f"{name}: {threads} threads in a block, but it is compiled for {bound} at most")
    warps = -(-threads // WARP)
    used = warps * WARP * -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    if used > REGISTERS:
        raise LaunchError(f"{name}: {threads} threads of {registers} registers, but a block has {REGISTERS}")
    if shared_bytes > most_shared_bytes:
        raise LaunchError(
            f"{name}: {shared_bytes} bytes of shared memory, but the device has {most_shared_bytes} for a block"
        )
