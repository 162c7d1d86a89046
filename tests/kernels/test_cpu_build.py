"""Compiling, caching, falling back."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagewire.kernels import layers
from pagewire.kernels.cpu import build as build_module
from pagewire.kernels.cpu import native
from pagewire.kernels.cpu.build import BuildError, build, cache_directory, supported_instruction_sets

PORTABLE = supported_instruction_sets()[-1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE_ROOT", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def fresh_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """`native.load()` decides anew, in this test only."""
    monkeypatch.setattr(native, "load", native.load.__wrapped__)


def fake_compiler(directory: Path, body: str) -> Path:
    """A compiler that notes every call in `calls`, then does what `body` says."""
    script = directory / "fake-cxx"
    script.write_text(f'#!/bin/sh\necho "$@" >> {directory}/calls\n{body}\n')
    script.chmod(0o755)
    return script


WRITES = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done'


def test_second_build_does_not_compile(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, WRITES)))
    library = build(PORTABLE)
    assert library.parent == cache_directory() == cache
    assert build(PORTABLE) == library
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("-o" in call.split() for call in calls) == 1
    assert [path.name for path in cache.iterdir()] == [library.name]


def test_the_key_covers_compiler_flags_and_source(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo version 1\n" + WRITES)))
    libraries = {build(PORTABLE)}
    fake_compiler(tmp_path, "echo version 2\n" + WRITES)
    libraries.add(build(PORTABLE))
    monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-g"))
    libraries.add(build(PORTABLE))
    monkeypatch.setattr(build_module, "HEADERS", ())
    libraries.add(build(PORTABLE))
    assert len(libraries) == 4


def test_a_failing_compiler_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"case \"$1\" in --version) ;; *) {WRITES}; echo 'error: no luck' >&2; exit 1;; esac"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, body)))
    with pytest.raises(BuildError, match="no luck"):
        build(PORTABLE)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache", "fresh_load")
def test_without_a_compiler_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.delenv("PAGEWIRE_CPU_ISA", raising=False)
    with caplog.at_level(logging.WARNING, logger="pagewire.kernels"):
        out = layers.silu_and_mul(torch.ones(2, 4))
    assert out.shape == (2, 2)
    assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text


@pytest.mark.usefixtures("fresh_load")
def test_a_forced_instruction_set_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        native.load()
    monkeypatch.setenv("PAGEWIRE_CPU_ISA", "reference")
    assert native.load() is None


def test_one_openmp_runtime_in_the_process(best_kernels: native.NativeKernels) -> None:
    """The kernels use the threads that PyTorch has: a second runtime's would spin beside them."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    command = """if True:
        import re, torch
        from pathlib import Path
        from pagewire.kernels.cpu import native
        def runtimes():
            return set(re.findall(r"/\\S*/lib(?:gomp|iomp5|omp)\\b\\S*", Path("/proc/self/maps").read_text()))
        before = runtimes()
        assert native.load() is not None
        assert runtimes() == before, (before, runtimes())
        """
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)


def test_transformers_does_not_mistake_our_kernels_for_its_own() -> None:
    """transformers looks for a top-level module `kernels`; ours must not be one, wherever Python is started."""
    pytest.importorskip("transformers")
    root = Path(__file__).parents[2]
    command = (
        "import importlib.util, pagewire.kernels.attention, transformers.integrations.hub_kernels\n"
        "spec = importlib.util.find_spec('kernels')\n"
        f"assert spec is None or {str(root)!r} not in str(spec.origin), spec\n"
    )
    subprocess.run([sys.executable, "-P", "-c", command], cwd=root, check=True, timeout=120)
