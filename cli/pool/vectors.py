"""Files of embeddings: a matrix for numpy, or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import msgspec

from pagewire.cli.pool.texts import InputText
from pagewire.ipc.wire.codec import Tensor

ENCODER = msgspec.json.Encoder()


class VectorWriter(Protocol):
    """Writes embeddings in the order of their texts."""

    def write(self, texts: Sequence[InputText], vectors: Sequence[Tensor]) -> None:
        """Write the embedding of each text. Raises OSError: the file cannot be written."""


class Line(msgspec.Struct, omit_defaults=True):
    """A line of JSON. index: of the text in the input, from 0. id: given with the text."""

    index: int
    embedding: list[float]
    id: str | int | None = None


class JsonLines:
    """Writes a JSON object for each embedding."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, texts: Sequence[InputText], vectors: Sequence[Tensor]) -> None:
        """See `VectorWriter.write`."""
        for text, vector in zip(texts, vectors, strict=True):
            self._file.write(ENCODER.encode(Line(text.line - 1, vector.tolist(), text.id)) + b"\n")
        self._file.flush()


class NpyWriter:
    """Writes a float32 array [texts, size] in numpy's format; after each write the file is whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._num_rows = 0

    def write(self, texts: Sequence[InputText], vectors: Sequence[Tensor]) -> None:
        """See `VectorWriter.write`."""
        if self._num_rows == 0:
            self._write_header(vectors[0].shape[0])
        for vector in vectors:
            self._file.write(vector.data)
        self._num_rows += len(vectors)
        self._file.seek(0)
        self._write_header(vectors[0].shape[0])
        self._file.seek(0, 2)
        self._file.flush()

    def _write_header(self, size: int) -> None:
        """The header has the same length for any number of rows: numpy leaves room for the digits."""
        from numpy.lib.format import write_array_header_1_0

        shape = (self._num_rows, size)
        write_array_header_1_0(self._file, {"descr": "<f4", "fortran_order": False, "shape": shape})


@contextmanager
def opened_vectors(name: str) -> Iterator[VectorWriter]:
    """Yield a writer to a file, in numpy's format if its name ends in .npy; "-": JSON lines to standard output.

    Raises:
        OSError: the file cannot be written.
    """
    if name == "-":
        if sys.stdout is None:
            raise OSError("standard output is closed")
        yield JsonLines(sys.stdout.buffer)
        return
    with Path(name).open("wb") as file:
        yield NpyWriter(file) if name.endswith(".npy") else JsonLines(file)
