"""Libraries that a wheel brings along, made by a compiler that writes one word."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.kernels.cpu import build as build_module
from pagewire.kernels.cpu import library
from pagewire.kernels.cpu.build import REFERENCE, BuildError, build, ship, supported_instruction_sets
from pagewire.kernels.native import shipped
from tests.kernels.cpu.test_build import WRITES, fake_compiler

BEST, *_, PORTABLE = supported_instruction_sets()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the library for `PORTABLE`, on a machine without a compiler and with an empty cache."""
    folder = tmp_path / "compiled"
    folder.mkdir()
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, WRITES)))
    ship(PORTABLE, folder)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("PAGEWIRE_CPU_ISA", raising=False)
    monkeypatch.setattr(shipped, "FOLDER", folder)
    return folder


@pytest.mark.usefixtures("wheel")
def test_what_came_with_the_wheel_needs_no_compiler(tmp_path: Path) -> None:
    assert build(PORTABLE) == b"library\n" and not (tmp_path / "cache").exists()
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(BEST)
    assert library.expected_isa() == PORTABLE.name


def test_a_compiler_does_not_compile_what_is_there(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "fake-cxx"))
    before = (tmp_path / "calls").read_text()
    assert build(PORTABLE) == b"library\n" and (tmp_path / "calls").read_text() == before
    assert library.expected_isa() == BEST.name, "the best set is compiled"


@pytest.mark.parametrize("part", ["FLAGS", "HEADERS", "SOURCES"])
@pytest.mark.usefixtures("wheel")
def test_a_library_of_other_sources_or_flags_does_not_count(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(build_module, part, getattr(build_module, part)[1:])
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(PORTABLE)
    assert library.expected_isa() == REFERENCE
