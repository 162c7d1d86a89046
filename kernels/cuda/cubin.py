"""Compiled kernels, and what their files say of the resources that a launch takes.

The compiler's log says the same, but it was empty on the first machine with a GPU (NVRTC 13.0; why is not known).
The attributes are those that `cuobjdump -elf` shows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION_HEADERS, NUM_SECTIONS = 0x28, 0x3C  # offsets in the header of an ELF file
SECTION, SECTION_BYTES = "<IIQQQQIIQQ", 64
ATTRIBUTE = "<BBH"  # format, kind, and the value or its length
LONG = 4  # the format of an attribute whose value follows
MAX_THREADS, FRAME_SIZE, REGISTER_COUNT = 0x05, 0x11, 0x2F
"""Kinds of attributes. The first is what `__launch_bounds__` makes."""
SYMBOL_MASK = 0xFFFFFF  # of a section's information: the symbol whose code it has
RESERVED_SECTION, RESERVED_BYTES = ".nv.shared.reserved.0", 1024
"""From sm_90 on, the driver's share of a block's shared memory. Sections count it; limits of devices do not."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of an ELF file. information: what the type of section makes of this field."""

    information: int
    content: bytes
    num_bytes: int
    """Also of a section that takes no place in the file."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel."""

    symbol: str
    """The kernel's mangled name."""
    image: bytes
    """The file, as the driver loads it."""
    registers: int
    """Registers per thread."""
    local_bytes: int
    """Local memory per thread: arrays that are not in registers, and spilled registers."""
    shared_bytes: int
    """Static shared memory of a block, without what the driver takes, and without gaps that NVRTC 12 leaves out."""
    bound: int
    """The most threads of a block for which the kernel was compiled; 0 if it has no bound."""

    @classmethod
    def of(cls, symbol: str, image: bytes) -> Cubin:
        """Read what the file says of a kernel.

        Raises:
            ValueError: it does not have the kernel.
        """
        sections = dict(_sections(image))
        if (code := sections.get(f".text.{symbol}")) is None:
            raise ValueError(f"the cubin has no kernel {symbol}")
        index = code.information & SYMBOL_MASK
        counts = {
            (kind, *struct.unpack_from("<I", value)): int.from_bytes(value[4:8], "little")
            for kind, value in _attributes(sections[".nv.info"].content)
            if kind in (FRAME_SIZE, REGISTER_COUNT)
        }
        own = dict(_attributes(sections[f".nv.info.{symbol}"].content))
        shared = sections.get(f".nv.shared.{symbol}")
        reserved = RESERVED_BYTES if RESERVED_SECTION in sections else 0
        return cls(
            symbol,
            image,
            registers=counts[REGISTER_COUNT, index],
            local_bytes=counts[FRAME_SIZE, index],
            shared_bytes=max(0, shared.num_bytes - reserved) if shared else 0,
            bound=math.prod(struct.unpack("<III", own.get(MAX_THREADS, bytes(12)))),
        )


def _sections(image: bytes) -> Iterator[tuple[str, Section]]:
    """The sections of an ELF file, and their names."""
    (start,) = struct.unpack_from("<Q", image, SECTION_HEADERS)
    count, of_names = struct.unpack_from("<HH", image, NUM_SECTIONS)
    headers = [struct.unpack_from(SECTION, image, start + i * SECTION_BYTES) for i in range(count)]
    names = headers[of_names][4]
    for name, _, _, _, place, size, _, information, _, _ in headers:
        begin = names + name
        section = Section(information, image[place : place + size], size)
        yield image[begin : image.index(b"\0", begin)].decode(), section


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes that are longer than two bytes: kind and value."""
    place = 0
    while place + 4 <= len(content):
        form, kind, length = struct.unpack_from(ATTRIBUTE, content, place)
        place += 4
        if form == LONG:
            yield kind, content[place : place + length]
            place += length
