"""The header of a safetensors file: the entry of each tensor, checked before it is used.

8 bytes: length of the header    header: {name: {dtype, shape, data_offsets}, ...}    bytes of all tensors
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pagewire.ipc.quoting import quoted
from pagewire.ipc.shapes import Length, Shape, num_values

LENGTH_BYTES = 8  # of the header's length, with which a file begins
MAX_NAME = 1024  # characters of a tensor's name, which is compared with patterns
METADATA = "__metadata__"


class TensorEntry(msgspec.Struct, gc=False):
    """A tensor in a header. data_offsets: of its first byte, and behind its last, counted from the header's end."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Length, Length]

    @property
    def num_bytes(self) -> int:
        """The tensor's bytes in the file."""
        return self.data_offsets[1] - self.data_offsets[0]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(TensorEntry)


def parse_header(header: bytes, num_bytes: int) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the name and the entry of each tensor that a header lists, one by one.

    num_bytes: of the file behind the header. Tensors share none of them, so that reading all of them takes time
    and memory in proportion to the file.

    Raises:
        ValueError: it is no such header, a shape is too long or too large, or the tensors do not fit into the file.
    """
    try:
        entries = _HEADER.decode(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    entries.pop(METADATA, None)
    left = num_bytes
    for name, raw in entries.items():
        try:
            entry = _ENTRY.decode(raw)
            num_values(entry.shape)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{quoted(name)}: {error}") from None
        first, last = entry.data_offsets
        if len(name) > MAX_NAME:
            raise ValueError(f"the name {quoted(name)} has over {MAX_NAME} characters")
        if not first <= last <= num_bytes:
            raise ValueError(f"{quoted(name)} lies outside of the file, which may be cut off")
        left -= last - first
        if left < 0:
            raise ValueError("its tensors are larger than the file")
        yield name, entry
