"""The house rules that a reader notices first: names that stand once, classes that fit, rooms that can be known."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from tests.test_imports import FOLDERS, MODULES, ROOT, SOURCES, modules_imported, name_of, parse

MAX_LINES = 300  # of a class: what a reader can hold
MAX_METHODS = 25
MAX_FILES = 24  # in one folder

# Folders that import each other, and why that stays; at most six.
MUTUAL = {
    frozenset(
        {"workers/adapters", "workers/network"}
    ): "an adapter can be merged into weights as they are loaded",
}


DOCUMENTS = [
    *(ROOT / name for name in ("ARCHITECTURE.md", "README.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@cache
def nodes() -> list[tuple[Path, ast.ClassDef | ast.Call]]:
    """All classes and calls of the product, at any depth, with their files: one pass for all tests."""
    return [
        (path, node)
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef | ast.Call)
    ]


def classes() -> list[tuple[Path, ast.ClassDef]]:
    return [(path, node) for path, node in nodes() if isinstance(node, ast.ClassDef)]


def test_a_class_name_stands_once() -> None:
    """So that a name, in a traceback or in a search, leads to one place."""
    files = defaultdict(list)
    for path, node in classes():
        files[node.name].append(name_of(path))
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_classes_fit() -> None:
    sizes = {
        f"{name_of(path)}: {node.name}": (
            (node.end_lineno or node.lineno) - node.lineno + 1,
            sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body),
        )
        for path, node in classes()
    }
    large = {name: size for name, size in sizes.items() if size[0] > MAX_LINES or size[1] > MAX_METHODS}
    assert large == {}


def test_rooms_have_few_files() -> None:
    files: dict[str, int] = defaultdict(int)
    for path in SOURCES:
        files[name_of(path.parent)] += path.name != "__init__.py"
    assert {room: count for room, count in files.items() if count > MAX_FILES} == {}


def test_folders_that_import_each_other() -> None:
    """Of two such folders, neither can be read alone; see `MUTUAL`."""
    arrows = {
        (name_of(path.parent), name_of(MODULES[other].parent))
        for path in SOURCES
        for other in modules_imported(path)
    }
    mutual = {frozenset(arrow) for arrow in arrows if arrow[0] != arrow[1] and arrow[::-1] in arrows}
    assert mutual == set(MUTUAL) and len(mutual) <= 6


def test_nothing_is_packed_to_fit_a_line() -> None:
    """The formatter decides about lines: no `*(a, b), c` in a call, and no switch that turns it off."""
    packed = [
        f"{name_of(path)}:{part.lineno}"
        for path, node in nodes()
        for part in (node.args if isinstance(node, ast.Call) else [])
        if isinstance(part, ast.Starred) and isinstance(part.value, ast.Tuple)
    ]
    switch = re.compile(r"#\s*fmt:\s*(off|skip)")
    unformatted = [name_of(path) for path in SOURCES if switch.search(path.read_text(encoding="utf-8"))]
    assert packed + unformatted == []


def test_documents_name_files_that_exist() -> None:
    """A path from the root, or the name alone of a file that the text has placed before."""
    files = re.compile(r"`([\w./*]+\.(?:py|cpp|h|cuh?))`")
    named = [
        (document, path) for document in DOCUMENTS for path in files.findall(document.read_text("utf-8"))
    ]
    inner = [path for folder in (*FOLDERS, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    names = {path.name for path in (*inner, *ROOT.glob("*.py"))}

    def exists(path: str) -> bool:
        return any(ROOT.glob(path)) if "/" in path else any(fnmatch(name, path) for name in names)

    assert len(named) > 100
    missing = {f"{name_of(document)}: {path}" for document, path in named if not exists(path)}
    assert missing == set()
