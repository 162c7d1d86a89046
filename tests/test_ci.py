"""The table of what CI runs after which changes: each path exists, and so does each target."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_parts() -> ModuleType:
    """The module of the table, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("ci_parts", ROOT / ".ci" / "parts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


parts = load_parts()


def git(*arguments: str, at: Path = ROOT) -> str:
    """What git prints; the test is skipped where the files are in no repository."""
    done = subprocess.run(["git", *arguments], cwd=at, capture_output=True, text=True, check=False)
    if done.returncode == 128:
        pytest.skip(f"not in a git repository: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_targets() -> set[str]:
    """The names before a colon in the Makefile."""
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_path_of_the_table_is_in_the_tree() -> None:
    paths = [path for part in parts.PARTS for path in part.paths if not path.startswith(":!")]
    missing = [path for path in paths if not git("ls-files", "--", path)]
    assert not missing, f"moved or gone, so that changes of it would run nothing: {missing}"


def test_every_target_of_the_table_is_in_the_makefile() -> None:
    targets = {target for part in parts.PARTS for target in part.targets}
    assert targets <= make_targets()


def test_every_target_that_tests_is_run_by_ci_or_said_to_be_for_hand() -> None:
    by_hand = {
        "test-peers",  # other projects' engines
        "test-cpu",  # kernels as shipped, for every instruction set
        "test-arm",  # needs qemu and a cross compiler, and takes long
    }
    always = {"test", "test-fast", "test-heavy"}
    of_table = {target for part in parts.PARTS for target in part.targets}
    tests = {target for target in make_targets() if target.startswith("test")}
    assert tests == by_hand | always | {target for target in of_table if target.startswith("test")}


def test_a_change_runs_what_it_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("-c", "user.name=a", "-c", "user.email=a@b")
    git("init", "-q", at=tmp_path)

    def commit(name: str, line: str = "line") -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{file.read_text() if file.exists() else ''}{line}\n")
        git("add", "-A", at=tmp_path)
        git(*settings, "commit", "-q", "-m", name, at=tmp_path)
        return git("rev-parse", "HEAD", at=tmp_path).strip()

    first = commit("setup.txt")
    assert parts.targets(first) == []
    second = commit("kernels/cuda/new.cu")
    assert "test-cuda12" not in parts.targets(first), "a new source counts once its kernels are in the list"
    assert {"test-cuda", "test-cuda-faults"} <= set(parts.targets(first))
    assert "test-sets" not in parts.targets(first), "these are the CPU kernels"
    commit("kernels/cuda/new.cu")
    assert "test-cuda12" in parts.targets(second)
    third = commit("docs/a.md")
    commit("kernels/cpu/a.cpp")
    assert parts.targets(third) == ["test-sets", "test-cuda"]
    fourth = commit("setup.txt")
    fifth = commit(parts.PINS, "aiohttp==1.0")
    assert "test-oldest" in parts.targets(fourth) and "test-cuda12" not in parts.targets(fourth)
    commit(parts.PINS, "nvidia-cuda-nvrtc==1.0")
    assert {"test-cuda12", "test-cuda13", "test-cuda-faults"} <= set(parts.targets(fifth))
    with pytest.raises(RuntimeError, match="git diff"):
        parts.targets("no-such-commit")
