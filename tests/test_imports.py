"""Who may import whom, and what must stay out of a light frontend.

frontend -> ipc <- engine_core        workers -> ipc        workers -> kernels        cli -> anything

What one that attaches may import is held by `tests/frontend/api/test_attach.py`.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("cli", "engine_core", "frontend", "ipc", "kernels", "pagewire", "workers")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
ALL_SOURCES = sorted(
    path for folder in (*FOLDERS, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)

# Folder to what it may import, beside itself.
MAY_IMPORT = {
    "cli": set(FOLDERS),
    "engine_core": {"ipc"},
    "frontend": {"ipc"},
    "ipc": {"demo"},  # where the embedded model is
    "kernels": set(),
    "pagewire": {
        "cli",
        "frontend",
        "ipc",
    },  # the public face; `cli`: servers under vLLM's names (`python -m`)
    "workers": {"ipc", "kernels"},
}
HEAVY = {"torch", "transformers", "numpy", "PIL", "soundfile", "soxr"}
IMPURE = {"threading", "time", "zmq"}
# What the standard library has since Python 3.11 or later; the wheel installs on 3.10.
NEWER = {
    f"{module}.{name}"
    for module, names in {
        "asyncio": "Runner TaskGroup timeout",
        "contextlib": "chdir",
        "datetime": "UTC",
        "enum": "ReprEnum StrEnum",
        "hashlib": "file_digest",
        "itertools": "batched",
        "typing": "LiteralString Never NotRequired Required Self Unpack assert_never assert_type override",
        "warnings": "deprecated",
    }.items()
    for name in names.split()
} | {"tomllib"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of all that a file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    return ".".join(("pagewire", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


# The public face and the demo are `pagewire` and `pagewire.demo`.
MODULES = {module_of(path).replace("pagewire.pagewire", "pagewire"): path for path in SOURCES}


def modules_imported(path: Path) -> set[str]:
    """Our modules that a file imports, also where only type checkers look."""
    ours = {name if name in MODULES else name.rpartition(".")[0] for name in imports(path)}
    return ours & set(MODULES)


def run_python(program: str, *args: str, cwd: Path) -> str:
    """What a fresh interpreter prints that has nothing of ours on its path but the installed package."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", program, *args], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def offenders(paths: list[Path], offends: Callable[[Path], object]) -> list[str]:
    """Names of those files that offend, in one test: a test for each of them would take longer than reading it."""
    assert paths
    return [name_of(path) for path in paths if offends(path)]


def test_the_arrows_between_folders() -> None:
    def against(path: Path) -> set[str]:
        folder = path.relative_to(ROOT).parts[0]
        ours = [name.split(".")[1:] for name in imports(path) if name.split(".")[0] == "pagewire"]
        others = {rest[0] for rest in ours if len(rest) > 1 or rest[0] in FOLDERS}
        return others - MAY_IMPORT[folder] - {folder}

    assert offenders(SOURCES, against) == []


def test_no_import_circles() -> None:
    """Not even for type checkers: of two files that know each other, neither can be read alone."""
    graph = {name: modules_imported(path) for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > len(graph)  # they do import each other
    TopologicalSorter(graph).prepare()


def test_scheduling_is_pure() -> None:
    """No clock, no threads, no sockets: neither in its files nor in what they import of ours."""
    pending = {name for name in MODULES if name.startswith("pagewire.engine_core.schedule.")}
    reached: set[str] = set()
    while pending:
        reached |= pending
        pending = {other for name in pending for other in modules_imported(MODULES[name])} - reached
    for name in reached:
        assert not {imported.split(".")[0] for imported in imports(MODULES[name])} & IMPURE, name


def test_a_runner_is_built_from_few_finished_objects() -> None:
    """Each part is built from what it needs: neither a list of all parts to import, nor half a runner to take.

    The list of all parts is `workers/process/wiring.py`.
    """
    files = (
        "workers/run/runner.py",
        "workers/run/launch.py",
        "workers/process/open_parts.py",
        "engine_core/core.py",
    )
    counts = {name: len(modules_imported(ROOT / name)) for name in files}
    assert max(counts.values()) <= 20, counts
    parameters = [
        f"{name_of(path)}:{node.lineno}"
        for path in (ROOT / "workers" / "run").glob("*.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.arg)
        and node.annotation is not None
        and "Runner" in ast.unparse(node.annotation)
    ]
    assert parameters == []


def test_nothing_needs_a_newer_python_than_the_wheel() -> None:
    def newer(path: Path) -> set[str]:
        attributes = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute))
        named = {f"{node.value.id}.{node.attr}" for node in attributes if isinstance(node.value, ast.Name)}
        return (imports(path) | named) & NEWER

    assert offenders(SOURCES, newer) == []


def test_sources_import_by_full_names() -> None:
    """So that an arrow can be seen, and searched for."""

    def relative(path: Path) -> bool:
        return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(parse(path)))

    assert offenders(SOURCES, relative) == []


def test_no_bare_folder_names() -> None:
    """`import kernels` would find ours only by accident, and what it should find, never."""
    bare = set(FOLDERS) - {"pagewire"}
    assert offenders(ALL_SOURCES, lambda path: {name.split(".")[0] for name in imports(path)} & bare) == []


def test_nothing_touches_the_search_path() -> None:
    def touches(path: Path) -> bool:
        return any(is_search_path(node, path) for node in ast.walk(parse(path)))

    assert offenders(ALL_SOURCES, touches) == []


def is_search_path(node: ast.AST, path: Path) -> bool:
    """Whether a node of a file names it. This file may name the variable."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return (node.value.id, node.attr) in {("sys", "path"), ("site", "addsitedir")}
    if isinstance(node, ast.ImportFrom) and node.module == "sys":
        return "path" in {alias.name for alias in node.names}
    return isinstance(node, ast.Constant) and path != Path(__file__) and node.value == "PYTHONPATH"


def test_tests_are_imported_without_touching_the_search_path(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("importmode") == "importlib"
    assert pytestconfig.getini("pythonpath") == []


IMPORT_ALL = """
import importlib, json, pkgutil, sys
names = []
for folder in sys.argv[1:]:
    package = importlib.import_module(f"pagewire.{folder}")
    names.append(package.__name__)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        names.append(module.name)
print(json.dumps({"imported": names, "loaded": sorted({name.split(".")[0] for name in sys.modules})}))
"""


@pytest.mark.parametrize("folder", ["frontend", "ipc", "engine_core"])
def test_light_folders_load_nothing_heavy(folder: str, tmp_path: Path) -> None:
    answer = json.loads(run_python(IMPORT_ALL, folder, cwd=tmp_path))
    files = [path.relative_to(ROOT).with_suffix("") for path in SOURCES if name_of(path).startswith(folder)]
    expected = {".".join(("pagewire", *file.parts)).removesuffix(".__init__") for file in files}
    assert set(answer["imported"]) == expected
    assert not HEAVY & set(answer["loaded"])


def test_the_public_face_loads_nothing_until_asked(tmp_path: Path) -> None:
    loaded = run_python("import pagewire, sys; print(*sys.modules)", cwd=tmp_path).split()
    assert [name for name in loaded if name.startswith("pagewire")] == ["pagewire"]
    assert not {"zmq", "msgspec", *HEAVY} & set(loaded)


FIND_ALL = """
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))
"""


def test_no_folder_is_a_top_level_module(tmp_path: Path) -> None:
    """Some libraries look for an optional package called `kernels`."""
    bare = sorted({*FOLDERS, "tests", "benchmarks"} - {"pagewire"})
    assert run_python(FIND_ALL, *bare, "pagewire", cwd=tmp_path).split() == ["pagewire"]


def test_a_package_that_lacks_its_parts_says_so(tmp_path: Path) -> None:
    """As where its folder lies in the search path, but it is not installed."""
    package = tmp_path / "pagewire"
    package.mkdir()
    (package / "__init__.py").write_bytes((ROOT / "pagewire" / "__init__.py").read_bytes())
    program = "import pagewire.kernels"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: No module named 'pagewire.")
