"""What a worker of packed weights imports: counted, and late rather than never."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.workers.process import deferred_imports
from pagewire.workers.process.deferred_imports import (
    DEFERRED,
    VERSIONS,
    DeferredModule,
    DeferringFinder,
    torch_version,
)
from tests.test_imports import run_python

FILES = {
    "__init__.py": "",
    "heavy.py": "RUNS.append('heavy')\nimport deferral.user\nvalue = 1\n",
    "user.py": "import deferral.heavy\nfrom deferral import heavy\ndef value():\n    return heavy.value\n",
    "wide/__init__.py": "RUNS.append('wide')\nown = 2\n",
    "eager/__init__.py": "RUNS.append('eager')\nimport deferral.eager.part\n",
    "eager/part.py": "RUNS.append('eager part')\n",
    "wide/part.py": "RUNS.append('part')\n",
    "broken.py": "RUNS.append('broken')\nraise OSError('not now')\n",
}
NAMES = frozenset(f"deferral.{name}" for name in ("heavy", "wide", "eager", "broken"))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What has run of a package on the path, of whose modules `NAMES` are deferred."""
    runs: list[str] = []
    for name, text in FILES.items():
        path = tmp_path / "deferral" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from builtins import DEFERRAL_RUNS as RUNS\n{text}")
    monkeypatch.setattr("builtins.DEFERRAL_RUNS", runs, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    finder = DeferringFinder(NAMES)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.setattr(deferred_imports, "_finder", finder)
    yield runs
    for name in [name for name in sys.modules if name.partition(".")[0] == "deferral"]:
        del sys.modules[name]


def test_code_runs_when_a_name_is_asked_for(runs: list[str]) -> None:
    user = importlib.import_module("deferral.user")
    heavy = sys.modules["deferral.heavy"]
    assert runs == [] and isinstance(heavy, DeferredModule)
    assert heavy.__name__ == "deferral.heavy" and heavy.__spec__ is not None
    assert user.value() == 1 and runs == ["heavy"]
    assert not isinstance(heavy, DeferredModule) and importlib.import_module("deferral.heavy") is heavy
    assert not hasattr(heavy, "other") and not hasattr(heavy, "loading")


def test_a_package_runs_before_its_parts(runs: list[str]) -> None:
    importlib.import_module("deferral.wide")
    assert runs == []
    part = importlib.import_module("deferral.wide.part")
    assert runs == ["wide", "part"] and sys.modules["deferral.wide"].part is part


def test_a_part_that_its_package_imports_runs_once(runs: list[str]) -> None:
    importlib.import_module("deferral.eager")
    part = importlib.import_module("deferral.eager.part")
    assert runs == ["eager", "eager part"] and sys.modules["deferral.eager"].part is part


def test_what_fails_fails_when_it_is_used_and_is_tried_again(runs: list[str]) -> None:
    broken = importlib.import_module("deferral.broken")
    for _ in range(2):
        with pytest.raises(OSError, match="not now"):
            _ = broken.value
    assert runs == ["broken"] * 2


def test_all_can_be_run(runs: list[str]) -> None:
    importlib.import_module("deferral.heavy")
    deferred_imports.run_deferred()
    assert runs == ["heavy"]
    importlib.import_module("deferral.wide")  # which is deferred no more
    assert runs == ["heavy", "wide"]


ENGINE = """
import json, sys
from pagewire.workers.process.deferred_imports import DeferredModule
from pagewire.workers.process.engine_import import import_engine

def deferred():
    return [name for name, module in sys.modules.items() if isinstance(module, DeferredModule)]

import_engine()
first = deferred()
ran = set(sys.modules) - set(first)
for name in sys.argv[1:]:
    __import__(name)
import torch
normed = torch.linalg.qr(torch.empty(3, 2, device="meta"))[0].shape if sys.argv[1:] else ()
print(json.dumps({"deferred": first, "ran": sorted(ran), "left": deferred(), "normed": list(normed)}))
"""
MOST_MODULES = 1330
"""That may run before a worker knows its model, those of the interpreter included. They may become fewer."""
UNUSED = {
    "transformers",
    "torch._dynamo",
    "torch._inductor",
    "safetensors",
    "sympy",
    "cupy",
    "ray",
    "tokenizers",
}


def test_few_modules_run_before_a_worker_loads_packed_weights(tmp_path: Path) -> None:
    answer = json.loads(run_python(ENGINE, cwd=tmp_path))
    assert len(answer["ran"]) <= MOST_MODULES
    assert not UNUSED & set(answer["ran"])
    if torch_version() in VERSIONS:
        assert set(answer["deferred"]) == DEFERRED
        assert not {"torch._refs.linalg", "torch.ao.quantization"} & set(answer["ran"])


def test_what_may_need_all_of_pytorch_gets_it(tmp_path: Path) -> None:
    answer = json.loads(run_python(ENGINE, "transformers", cwd=tmp_path))
    assert answer["left"] == [] and answer["normed"] == [3, 2]


def test_versions_that_are_not_tested_are_imported_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for installed, defers in (("1.13.1", False), (f"{min(VERSIONS)}.7+cpu", True)):
        finder = DeferringFinder(frozenset())
        monkeypatch.setattr(deferred_imports, "_finder", finder)
        monkeypatch.setattr(deferred_imports, "version", lambda _, installed=installed: installed)
        deferred_imports.defer()
        assert (finder in sys.meta_path) == defers == bool(finder.names)
