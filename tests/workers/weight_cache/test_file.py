"""Files of packed weights: whole, damaged, cut off."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from pagewire.workers.weight_cache import file
from pagewire.workers.weight_cache.file import DamagedError, PackedFile, StoredTensor

KEY = "a key"
CONTENTS = [bytes([i]) * length for i, length in enumerate((64, 1000, 5, 0, 128))]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "PIECE", 300)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of several pieces, with tensors that cross from one to the next."""
    tensors = [StoredTensor("uint8", [len(data)], memoryview(data)) for data in CONTENTS]
    path = tmp_path / "file"
    with path.open("wb") as to:
        file.write(to, KEY, tensors, {"list": [1, None, "text", 0.1]})
    return path


def read(path: Path, key: str = KEY) -> PackedFile:
    with path.open("rb") as opened:
        return file.read(opened.fileno(), key, 2)


def test_what_is_read_is_what_was_written(path: Path) -> None:
    packed = read(path)
    memory = memoryview(packed.content.memory)
    for place, data in zip(packed.header.tensors, CONTENTS, strict=True):
        start, size = file.bytes_of(place, 1, packed.content)
        assert memory[start : start + size] == data and place.offset % file.ALIGNMENT == 0
    assert packed.header.description == {"list": [1, None, "text", 0.1]}
    assert len(packed.header.checksums) == 5


@pytest.mark.parametrize("seed", range(50))
def test_a_changed_byte_anywhere_is_noticed(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    chance = random.Random(seed)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        read(path)


def test_every_byte_of_the_footer_counts(path: Path) -> None:
    whole = path.read_bytes()
    for back in range(1, file.FOOTER.size + 1):
        data = bytearray(whole)
        data[-back] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(DamagedError):
            read(path)


def test_a_file_that_is_cut_off_or_longer_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for damaged in (b"", whole[:10], whole[:-1], whole[: len(whole) // 2], whole + b"\0", whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedError):
            read(path)


def test_a_hole_where_a_page_was_never_written_is_noticed(path: Path) -> None:
    with path.open("r+b") as opened:
        os.pwrite(opened.fileno(), bytes(300), 64)
    with pytest.raises(DamagedError, match="does not fit its checksums"):
        read(path)


def test_a_file_of_another_key_is_refused(path: Path) -> None:
    with pytest.raises(DamagedError, match="another file"):
        read(path, "another key")
