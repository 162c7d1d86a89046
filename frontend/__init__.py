"""Frontends of an engine core, for programs and servers; and names that are loaded when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    module: str, package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a module.

    module: its `__name__`. package: of the homes. homes: the names, with spaces between them, by the module that
    defines them.
    """
    home_of = {name: f"{package}.{home}" for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if (home := home_of.get(name)) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[module], name, value)  # asked for once
        return value

    return get, lambda: sorted(home_of)
