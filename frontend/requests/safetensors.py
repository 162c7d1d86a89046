"""Reads files in the safetensors format (`ipc.safetensors`), without its library."""

from __future__ import annotations

from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.files.safetensors import LENGTH_BYTES, TensorEntry, parse_header
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.codec import Tensor

MAX_HEADER_BYTES = 1 << 16  # of files with one tensor, and what they say about it
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


def read_tensors(name: str, data: bytes) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file. name: what has these bytes, for messages.

    Raises:
        ValueError: it is none, is damaged, or has tensors of other dtypes.
    """
    if data.startswith(PICKLES) and not _has_header(data):
        raise FieldValueError(
            name,
            ": this is a file of torch.save, a pickle, which can run code and is not read: use "
            "safetensors.torch.save (or save_file)",
        )
    if not _has_header(data):
        raise FieldValueError(name, ": this is no safetensors file")
    begin = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    try:
        entries = parse_header(data[LENGTH_BYTES:begin], len(data) - begin)
        return {key: _tensor(key, entry, data, begin) for key, entry in entries}
    except ValueError as error:
        raise FieldValueError(name, f": the safetensors file is damaged: {error}") from None


def _has_header(data: bytes) -> bool:
    """True if the beginning is that of a header that the data can hold."""
    size = int.from_bytes(data[:LENGTH_BYTES], "little")
    has_room = size <= min(MAX_HEADER_BYTES, len(data) - LENGTH_BYTES)
    return has_room and data[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"


def _tensor(key: str, entry: TensorEntry, data: bytes, begin: int) -> Tensor:
    if entry.dtype not in DTYPES:
        raise ValueError(f"{quoted(key)} has the dtype {quoted(entry.dtype)}")
    first, last = entry.data_offsets
    try:
        return Tensor(DTYPES[entry.dtype], entry.shape, data[begin + first : begin + last])
    except ValueError as error:
        raise ValueError(f"{quoted(key)}: {error}") from None
