"""The worker's spine: what a plain step runs is read without what a model may have beside it.

    wings (adapters, media, drafts, compiled and recorded ways, loading) -> spine (runner, step, network, kernels)

`workers/process/wiring.py` alone imports both. A wing has one door, the `interface.py` of its folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_imports import MODULES, ROOT, imports, module_of, modules_imported, name_of, parse

FILES = {"workers/run/runner.py": 110, "workers/network/network.py": 38, "kernels/stack.py": 30}
"""Files that one follows, that one included, to read a file to the ground. They may shrink."""
SPINE = (
    "workers/run/runner.py",
    "workers/run/launch.py",
    "workers/run/step.py",
    "workers/run/route.py",
    "workers/batch/slots.py",
    "workers/batch/flat_batch.py",
    "workers/network/network.py",
    "workers/step/context.py",
    "workers/sample/sampler.py",
)
WINGS = (
    "kernels/cpu",
    "kernels/cuda",
    "workers/adapters",
    "workers/checkpoint",
    "workers/estimate",
    "workers/families",
    "workers/media",
    "workers/module",
    "workers/process",
    "workers/ranks",
    "workers/run/decoding.py",
    "workers/run/encoding.py",
    "workers/run/graphs.py",
    "workers/run/processors.py",
    "workers/seq2seq",
    "workers/speculation",
    "workers/tiers",
    "workers/weight_cache",
)
PLAIN = {"workers/ranks/cut.py", "workers/ranks/stages.py"}
"""Data of wings that a loaded model is made of."""
OFFENDERS: set[str] = set()
"""Files of wings that the spine still reaches."""
BY_NAME = {"pagewire.kernels.cpu.kernels", "pagewire.kernels.cuda.kernels"}
"""What is imported by its name alone, when a tensor of such a device comes (`kernels/dispatch.py`)."""


def reached(*files: str) -> set[str]:
    """All our files that some need, in functions and for type checkers too; they are among them."""
    pending, found = {module_of(ROOT / file) for file in files}, set[str]()
    while pending:
        found |= pending
        pending = {other for name in pending for other in modules_imported(MODULES[name])} - found
    return {name_of(MODULES[name]) for name in found}


def in_wings(files: set[str]) -> set[str]:
    """Those of wings but their doors."""
    inner = {file for file in files if file.startswith(tuple(WINGS)) and not file.endswith("/interface.py")}
    return inner - PLAIN


def named(file: str) -> Iterator[str]:
    """Our modules that a file has the names of, as text."""
    for node in ast.walk(parse(ROOT / file)):
        if isinstance(node, ast.Constant) and node.value in MODULES and node.value != "pagewire":
            yield node.value


@pytest.mark.parametrize("file", FILES)
def test_closures_do_not_grow(file: str) -> None:
    assert len(reached(file)) <= FILES[file], sorted(reached(file))


def test_the_spine_imports_no_wing() -> None:
    assert in_wings(reached(*SPINE)) == OFFENDERS


def test_the_spine_does_not_import_by_name() -> None:
    """An import that is hidden in a text would be one that nobody sees."""
    names = {(file, name) for file in reached(*SPINE) for name in named(file)}
    assert names == {("kernels/dispatch.py", name) for name in BY_NAME}


def test_the_spine_knows_pytorch_alone() -> None:
    outside = {name.split(".")[0] for file in reached(*SPINE) for name in imports(ROOT / file)}
    assert not outside & {"ctypes", "cupy", "transformers", "safetensors", "zmq"}


def test_wings_come_in_by_the_wiring() -> None:
    """So that there is one place which says what a worker may have."""
    wings = {"workers/run/decoding.py", "workers/run/encoding.py", "workers/run/graphs.py"}
    assert wings <= reached("workers/process/wiring.py")
    importers = {
        name_of(path)
        for path in MODULES.values()
        if module_of(ROOT / "workers/run/runner.py") in modules_imported(path)
    }
    assert importers == {"workers/process/wiring.py", "workers/process/main.py", "workers/process/calls.py"}
