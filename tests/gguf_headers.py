"""GGUF files of metadata and tensors of any bytes, good and bad, without the package `gguf`."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Tensor = tuple[str, Sequence[int], int, bytes]
"""Name, shape as PyTorch has it, number of the type, content."""


def text(value: str) -> bytes:
    """A string as the format has it."""
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def value(item: Any) -> bytes:
    """A value of the metadata with its type before it."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<Ii", 5, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    values = [value(entry) for entry in item]
    return (
        struct.pack("<I", 9)
        + values[0][:4]
        + struct.pack("<Q", len(values))
        + b"".join(v[4:] for v in values)
    )


def content(fields: Mapping[str, Any], tensors: Sequence[Tensor] = (), version: int = 3) -> bytes:
    """The bytes of a file."""
    header = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(fields))]
    header += [text(key) + value(item) for key, item in fields.items()]
    body = b""
    for name, shape, kind, data in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header.append(text(name) + sizes + struct.pack("<IQ", kind, len(body)))
        body += data + bytes(-len(data) % 32)
    head = b"".join(header)
    return head + bytes(-len(head) % 32) + body


def write(path: Path, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Path:
    """A file."""
    path.write_bytes(content(fields, tensors))
    return path
