"""Modules of `benchmarks`, which is not on the search path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> Any:
    """A module of the benchmarks that imports no other one of them."""
    return load_file(name, BENCHMARKS / f"{name}.py")


def load_from(package: str, name: str) -> Any:
    """A module of a folder of the benchmarks, whose modules may import each other."""
    alias = f"benchmarks_{package}"
    if alias not in sys.modules:
        load_file(alias, BENCHMARKS / package / "__init__.py", [str(BENCHMARKS / package)])
    return importlib.import_module(f"{alias}.{name}")


def load_file(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    """The module of a file, under a name. folders: of its submodules, if it is a package."""
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
