"""Weights that a frontend sends piece by piece, into a file without a name that ends with the core."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Sequence

import msgspec

from pagewire.engine_core.weights.files import MAX_HEADER_BYTES, OpenWeights, num_bytes
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.items import TensorForm


class Upload:
    """Tensors that are being received, in the folder for temporary files ($TMPDIR).

    number: frontends name it by this. owner: the identity of the frontend that sends them.
    tensors: checked to be the model's, so that they have no more bytes than it.

    Raises:
        ValueError: there are none, one is there twice or of an unknown dtype, or they have too long names.
        OSError: there is no room for a file.
    """

    def __init__(self, number: int, owner: bytes, tensors: Sequence[TensorForm]) -> None:
        self.number, self.owner = number, owner
        head, self._size = header_of(tensors)
        with tempfile.TemporaryFile(prefix="pagewire-weights-") as file:
            self._descriptor = os.dup(file.fileno())
        self._begin, self._received = len(head), 0
        self._write(head, 0)

    def add(self, offset: int, data: bytes) -> int:
        """Take the next bytes; returns how many there are now.

        Raises:
            ValueError: they are not the next ones, or too many. OSError: there is no room for them.
        """
        if offset != self._received or offset + len(data) > self._size:
            raise ValueError(
                f"upload {self.number} has {self._received} of {self._size} bytes: {len(data)} at {offset} do not "
                "come next"
            )
        self._write(data, self._begin + offset)
        self._received += len(data)
        return self._received

    def take(self) -> OpenWeights:
        """The tensors, once all have come; the upload is over.

        Raises:
            ValueError: some are missing.
        """
        if self._received < self._size:
            raise ValueError(f"upload {self.number} has only {self._received} of {self._size} bytes")
        return OpenWeights([self._descriptor])

    def close(self) -> None:
        """Drop what has come."""
        os.close(self._descriptor)

    def _write(self, data: bytes, offset: int) -> None:
        left = memoryview(data)
        while left:
            count = os.pwrite(self._descriptor, left, offset)
            left, offset = left[count:], offset + count


def header_of(tensors: Sequence[TensorForm]) -> tuple[bytes, int]:
    """The head of a safetensors file with these tensors, one behind the other, and how many bytes follow it.

    Raises:
        ValueError: see `Upload`.
    """
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise ValueError(f"{quoted(tensor.name)} is there twice")
        begin, end = end, end + num_bytes(tensor)
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    if not entries or len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"an update has at least one tensor, and a header of {MAX_HEADER_BYTES} bytes at most"
        )
    return struct.pack("<Q", len(header)) + header, end
