"""How a block lies in a file, and goes to another core: a header of fixed size, and its bytes behind.

The header names the block and has a checksum of its own. What does not agree with it, to the bit, is no entry.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagewire.ipc.wire.codec import Buffer

MAGIC = b"pwKV\x00\x01\r\n"  # with the number of the format
DIGEST_BYTES = 32
_FIELDS = struct.Struct(f"<{len(MAGIC)}s32s32s32sQ32s")
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """What a file says of a block.

    identity: of the model, the layout and all else that the bytes depend on (`identity`), 32 bytes.
    name, parent: of the block and of the one before it (`ipc.wire.block_names`).
    size: of its content in bytes. digest: SHA-256 of the content.
    """

    identity: bytes
    name: bytes
    parent: bytes
    size: int
    digest: bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of header and content."""
        return HEADER_BYTES + self.size

    def encode(self) -> bytes:
        """The header as it is written, with its checksum."""
        fields = _FIELDS.pack(MAGIC, self.identity, self.name, self.parent, self.size, self.digest)
        return fields + hashlib.sha256(fields).digest()

    @classmethod
    def decode(cls, data: bytes) -> EntryHeader | None:
        """The header in `data`; None if it is none, or damaged."""
        fields = data[: _FIELDS.size]
        if len(data) != HEADER_BYTES or hashlib.sha256(fields).digest() != data[_FIELDS.size :]:
            return None
        magic, identity, name, parent, size, digest = _FIELDS.unpack(fields)
        return cls(identity, name, parent, size, digest) if magic == MAGIC else None


def digest_of(pieces: Iterable[Buffer]) -> bytes:
    """The checksum of a content that comes in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def encoded_entry(identity: bytes, name: bytes, parent: bytes, pieces: Sequence[Buffer]) -> list[Buffer]:
    """A block whose content is `pieces` as it goes to another core: the header, and the content."""
    size = sum(map(len, pieces))
    return [EntryHeader(identity, name, parent, size, digest_of(pieces)).encode(), *pieces]


def decoded_entries(
    data: memoryview, identity: bytes, sizes: Mapping[bytes, int]
) -> tuple[dict[bytes, memoryview], str | None]:
    """The contents, by name, of the entries that another core has sent, and what is wrong with them, if anything.

    sizes: of the blocks that it was asked for. Other entries are none, and whatever follows one that is none is
    not looked at. An entry whose content does not have its checksum is left out.
    """
    contents: dict[bytes, memoryview] = {}
    problem, offset = None, 0
    while offset < len(data):
        header = EntryHeader.decode(bytes(data[offset : offset + HEADER_BYTES]))
        if header is None:
            return contents, "a header is damaged"
        if header.identity != identity:
            return contents, "they are of another model or layout"
        if header.name in contents or sizes.get(header.name) != header.size:
            return contents, f"block {header.name.hex()[:16]} of {header.size:,} bytes was not asked for"
        content = data[offset + HEADER_BYTES :][: header.size]
        if len(content) < header.size:
            return contents, "the last one ends too early"
        if digest_of([content]) == header.digest:
            contents[header.name] = content
        else:
            problem = f"the content of block {header.name.hex()[:16]} is damaged"
        offset += header.entry_bytes
    return contents, problem
