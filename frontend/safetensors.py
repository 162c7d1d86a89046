"""Reads files in the safetensors format, without its library: a header in JSON, and the tensors' bytes.

8 bytes: length of the header    header: {name: {dtype, shape, data_offsets}, ...}    bytes of all tensors
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from pagewire.ipc.codec import ITEM_SIZES, Tensor
from pagewire.ipc.quoting import quoted

MAX_HEADER_BYTES = 1 << 20  # of files with a few tensors
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
PICKLES = (b"PK", b"\x80")  # how files of torch.save begin, new and old

Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Entry(msgspec.Struct):
    """What the header says of a tensor. data_offsets: of its first byte, and behind its last, after the header."""

    dtype: str
    shape: list[Length]
    data_offsets: tuple[Length, Length]


HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
ENTRY = msgspec.json.Decoder(Entry)


def read_tensors(name: str, data: bytes) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file. name: what has these bytes, for messages.

    Raises:
        ValueError: it is none, is damaged, or has tensors of other dtypes.
    """
    if data.startswith(PICKLES) and not _has_header(data):
        raise ValueError(
            f"{name}: this is a file of torch.save, a pickle, which can run code and is not read: use "
            "safetensors.torch.save (or save_file)"
        )
    if not _has_header(data):
        raise ValueError(f"{name}: this is no safetensors file")
    begin = 8 + int.from_bytes(data[:8], "little")
    try:
        entries = HEADER.decode(data[8:begin])
        entries.pop("__metadata__", None)
        return {key: _tensor(key, ENTRY.decode(entry), data, begin) for key, entry in entries.items()}
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{name}: the safetensors file is damaged: {error}") from None


def _has_header(data: bytes) -> bool:
    """True if the beginning is that of a header that the data can hold."""
    size = int.from_bytes(data[:8], "little")
    return size <= min(MAX_HEADER_BYTES, len(data) - 8) and data[8:9] == b"{"


def _tensor(key: str, entry: Entry, data: bytes, begin: int) -> Tensor:
    if entry.dtype not in DTYPES:
        raise ValueError(f"{quoted(key)} has the dtype {quoted(entry.dtype)}")
    dtype, (first, last) = DTYPES[entry.dtype], entry.data_offsets
    if not first <= last <= len(data) - begin:
        raise ValueError(f"{quoted(key)} lies outside of the file")
    if math.prod(entry.shape) * ITEM_SIZES[dtype] != last - first:
        raise ValueError(f"{quoted(key)} has {last - first} bytes, which do not fill its shape")
    return Tensor(dtype, entry.shape, data[begin + first : begin + last])
