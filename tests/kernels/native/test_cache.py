"""Kernels come from files that nobody else can have written; any other file is compiled anew."""

import hashlib
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.kernels.cpu.build import build, compiler_command, supported_instruction_sets
from pagewire.kernels.cpu.library import load
from pagewire.kernels.native import cache as cache_module
from pagewire.kernels.native.cache import cache_folder, locked, read, write

STRANGER = 65533
PORTABLE = supported_instruction_sets()[-1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path / "cache"))
    cache_module.warn.cache_clear()
    return tmp_path / "cache" / "kernels"


def stored(content: bytes) -> bytes:
    """A file with the right checksum, which a stranger can compute as well."""
    return content + hashlib.sha256(content).digest()


def test_what_was_written_is_read(cache: Path) -> None:
    assert read("a.so") is None
    write("a.so", b"content")
    assert read("a.so") == b"content" and [path.name for path in cache.iterdir()] == ["a.so"]
    write("a.so", b"other")
    assert read("a.so") == b"other"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_a_damaged_file_is_a_miss(
    cache: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    write("a.so", b"content")
    damage(cache / "a.so")
    assert read("a.so") is None and read("a.so") is None
    assert caplog.messages == [f"ignored a.so in {cache}: it is damaged"]


def open_to_all(file: Path) -> None:
    file.chmod(0o666)


def open_to_the_group(file: Path) -> None:
    file.chmod(0o660)


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize("change", [open_to_all, open_to_the_group, link, pipe])
def test_a_file_that_others_may_have_written_is_a_miss_and_is_replaced(
    cache: Path, change: Callable[[Path], None]
) -> None:
    write("a.so", b"content")
    (cache / "a.so").write_bytes(stored(b"planted"))
    change(cache / "a.so")
    assert read("a.so") is None
    write("a.so", b"content")
    assert read("a.so") == b"content" and not (cache / "a.so").is_symlink()


def test_a_file_of_another_user_is_a_miss(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.so", b"content")
    if os.geteuid() == 0:
        os.chown(cache / "a.so", STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert read("a.so") is None


def test_a_folder_that_others_may_write_to_is_not_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir(parents=True)
    (cache / "a.so").write_bytes(stored(b"planted"))
    cache.chmod(0o777)
    assert read("a.so") is None
    write("a.so", b"content")
    write("b.so", b"content")
    assert (cache / "a.so").read_bytes() == stored(b"planted") and not (cache / "b.so").exists()
    assert len(caplog.messages) == 2 and "set PAGEWIRE_CACHE_ROOT to another folder" in caplog.messages[1]
    with locked():  # does not wait for whoever can open the folder
        pass


def test_a_planted_or_damaged_library_is_compiled_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cxx"
    writes = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done'
    compiler.write_text(f"#!/bin/sh\n{writes}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build(PORTABLE) == b"library\n"
    caplog.clear()
    (file,) = cache.iterdir()
    for content, mode in ((stored(b"planted"), 0o666), (b"damaged", 0o600)):
        file.write_bytes(content)
        file.chmod(mode)
        with caplog.at_level(logging.INFO, logger="pagewire.kernels"):
            assert build(PORTABLE) == b"library\n"
        assert read(file.name) == b"library\n"
    assert sum("once for this machine" in message for message in caplog.messages) == 2


def test_without_a_cache_kernels_are_compiled_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (a_file := tmp_path / "file").touch()
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(a_file))
    with locked():
        write("a.so", b"content")
    assert read("a.so") is None and cache_folder().parent == a_file
    assert "compiled kernels are not kept" in caplog.text


def test_a_library_is_loaded_from_the_content_that_was_checked(tmp_path: Path) -> None:
    """And the next one is another library, though no file has a name."""
    answers = []
    for number in (1, 2):
        source, library = tmp_path / f"{number}.cpp", tmp_path / "library.so"
        source.write_text(f'extern "C" int answer() {{ return {number}; }}\n')
        subprocess.run([*compiler_command(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        loaded = load(stored(library.read_bytes()))  # more than the library itself does no harm
        library.unlink()
        answers.append(loaded.answer())
    assert answers == [1, 2]
    with pytest.raises(OSError):
        load(b"no library")
