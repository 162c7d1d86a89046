"""Reads the header of a GGUF file: its metadata, and where its tensors lie.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The package
`gguf` reads it, too, but takes seconds for a vocabulary, needs numpy, and trusts the file. Here nothing is read
beyond the file's end, and what a header may take is bounded.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from array import array
from pathlib import Path
from typing import Any

import msgspec

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.shapes import num_values

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIRST_READ = 8 << 20  # bytes: most headers are smaller
MAX_HEADER_BYTES = 256 << 20
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 22  # in an array; the largest vocabularies have 2**18 tokens
MAX_DIMENSIONS = 4
MAX_FILES = 1 << 12
DEFAULT_ALIGNMENT = 32
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
"""The types of tensors by number: name, values in a block, bytes of a block."""


class GgufError(ModelNotFoundError):
    """The file is no GGUF file, or is broken; the text says how."""


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch has it: rows first, and the values of a row last."""
    type: str
    """One of the names in `BLOCKS`, such as "Q4_K"."""
    path: Path
    """The file that holds it."""
    offset: int
    """Its first byte in the file."""
    num_bytes: int


class GgufFile(msgspec.Struct, frozen=True):
    """A model's metadata and tensors, of one GGUF file or of all parts of a split one."""

    path: Path
    metadata: dict[str, Any]
    """Values by key: numbers, booleans, strings; lists of strings, and arrays of numbers (`array.array`)."""
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp, such as "llama".

        Raises:
            GgufError: the file does not say.
        """
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise GgufError(f"{self.path} names no general.architecture: it is no model")
        return name

    def get(self, key: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key of the metadata; the default if there is none.

        Raises:
            GgufError: it is of none of these types.
        """
        value = self.metadata.get(key, default)
        if value is not default and not isinstance(value, kinds):
            raise GgufError(f"{self.path}: {key} is of a wrong type, {type(value).__name__}")
        return value


def is_gguf(path: str | Path) -> bool:
    """True for the path of a GGUF file, by its name."""
    return str(path).endswith(".gguf")


def parts_of(path: Path) -> list[Path]:
    """The paths of all parts of a split file, found by any one of them; else the path alone."""
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    base, _, count = split.groups()
    if not 0 < int(count) <= MAX_FILES:
        raise GgufError(f"{path}: a model of {int(count)} files")
    return [path.with_name(f"{base}-{part + 1:05d}-of-{count}.gguf") for part in range(int(count))]


def read_gguf(path: str | Path) -> GgufFile:
    """The metadata and tensors of a GGUF file. Of a split one, any part may be named.

    Raises:
        GgufError: a file is missing, is no GGUF file, or is broken.
    """
    paths = parts_of(Path(path))
    metadata, tensors = _read_part(paths[0])
    if metadata.get("split.count", 1) not in (0, 1, len(paths)) and len(paths) == 1:
        raise GgufError(
            f"{path} is a part of a split file, but is not named like one: ...-00001-of-00003.gguf"
        )
    for number, part in enumerate(paths[1:], start=1):
        fields, more = _read_part(part)
        if fields.get("split.no", number) != number or fields.get("split.count", len(paths)) != len(paths):
            raise GgufError(f"{part} is not part {number + 1} of {len(paths)}, as its name says")
        if twice := sorted(tensors.keys() & more.keys()):
            raise GgufError(f"{part}: the tensor {quoted(twice[0])} is in another part, too")
        tensors |= more
    return GgufFile(paths[0], metadata, tensors)


def read_metadata(path: str | Path) -> GgufFile:
    """As `read_gguf`, but of a split file only the first part, which has the metadata, is read.

    Raises:
        GgufError: the file is missing, is no GGUF file, or is broken.
    """
    first = parts_of(Path(path))[0]
    return GgufFile(first, *_read_part(first))


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata and tensors of one file. Reads more of it as long as its header turns out to be longer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise GgufError(f"{path} is not a regular file")
            content = file.read(FIRST_READ)
            while True:
                try:
                    return _Header(path, content, info.st_size).read()
                except (struct.error, EOFError):
                    more = file.read(max(0, min(3 * len(content), MAX_HEADER_BYTES - len(content))))
                if not more:
                    reason = "is longer than it may be" if len(content) < info.st_size else "is cut off"
                    raise GgufError(f"cannot read {path}: its header {reason}")
                content += more
    except OSError as error:
        raise GgufError(f"cannot read {path}: {error.strerror or error}") from error


class _Header:
    """Reads a header from the first bytes of a file: struct.error or EOFError if it goes on behind them."""

    def __init__(self, path: Path, content: bytes, file_size: int) -> None:
        self.path, self.content, self.file_size = path, content, file_size
        self.place = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.content[:4] != MAGIC:
            raise GgufError(f"{self.path} is no GGUF file: it does not begin with the letters GGUF")
        self.place = 4
        (version,) = self.take("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            reason = "is in big-endian order" if swapped in VERSIONS else f"is of version {version}"
            raise self.broken(f"it {reason}; versions 2 and 3 in little-endian order are read")
        num_tensors, num_fields = self.take("QQ")
        if num_tensors > MAX_TENSORS or num_fields > MAX_FIELDS:
            raise self.broken(f"it claims to have {num_tensors} tensors and {num_fields} metadata fields")
        metadata = {}
        for _ in range(num_fields):
            key = self.string()
            (kind,) = self.take("I")
            metadata[key] = self.value(kind, key)
        infos = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8 or alignment > 1 << 20:
            raise self.broken(f"general.alignment is {quoted(alignment)}")
        start = self.place + -self.place % alignment
        return metadata, self.placed(infos, start, alignment)

    def broken(self, reason: str) -> GgufError:
        return GgufError(f"cannot read {self.path}: {reason}")

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.content, self.place)
        self.place += struct.calcsize("<" + layout)
        return values

    def skip(self, size: int) -> int:
        """The place before `size` bytes, behind which reading goes on."""
        place = self.place
        if size > self.file_size - place:
            raise self.broken(f"its header has a value of {size} bytes, but the file ends before that")
        if size > len(self.content) - place:
            raise EOFError
        self.place = place + size
        return place

    def string(self) -> str:
        (size,) = self.take("Q")
        start = self.skip(size)
        return self.content[start : self.place].decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.take(SCALARS[kind])[0]
        if kind != ARRAY:
            raise self.broken(f"{quoted(key)} is of the unknown type {kind}")
        kind, count = self.take("IQ")
        if kind == STRING:
            return self.strings(count, key)
        if kind not in SCALARS:
            raise self.broken(f"{quoted(key)} is an array of type {kind}")
        code = "B" if kind == 7 else SCALARS[kind]
        start = self.skip(count * struct.calcsize("<" + code))
        values = array(code)
        values.frombytes(self.content[start : self.place])
        return values

    def strings(self, count: int, key: str) -> list[str]:
        """An array of strings: a tight loop, since vocabularies are long."""
        if count > MAX_STRINGS:
            raise self.broken(f"{quoted(key)} claims to have {count} strings")
        content, place = self.content, self.place
        unpack, end = struct.Struct("<Q").unpack_from, len(self.content)
        found = []
        for _ in range(count):
            stop = place + 8 + unpack(content, place)[0]
            if stop > end:
                self.place = place + 8
                self.skip(stop - self.place)
            found.append(content[place + 8 : stop].decode("utf-8", "replace"))
            place = stop
        self.place = place
        return found

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (num_dimensions,) = self.take("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self.broken(f"the tensor {quoted(name)} claims to have {num_dimensions} dimensions")
        shape = self.take(f"{num_dimensions}Q")[::-1] or (1,)
        kind, offset = self.take("IQ")
        return name, shape, kind, offset

    def placed(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        """The tensors by name, each of them checked to lie within the file."""
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            if kind not in BLOCKS:
                raise self.broken(f"the tensor {quoted(name)} is of the unknown type {kind}")
            kind_name, values, size = BLOCKS[kind]
            try:
                number = num_values(shape)
            except ValueError as error:
                raise self.broken(f"the tensor {quoted(name)}: {error}") from None
            if not number or shape[-1] % values:
                raise self.broken(f"the tensor {quoted(name)} of type {kind_name} cannot be of shape {shape}")
            num_bytes = number // values * size
            if offset % alignment or start + offset + num_bytes > self.file_size:
                raise self.broken(
                    f"the tensor {quoted(name)} does not lie within the file; it may be cut off"
                )
            if name in tensors:
                raise self.broken(f"there are two tensors {quoted(name)}")
            tensors[name] = TensorInfo(name, shape, kind_name, self.path, start + offset, num_bytes)
        return tensors
