"""Models of one's own, by name: the class of each architecture, and the tables of families.

Only names travel to other processes, such as "acme.model:AcmeForCausalLM", and each process imports what it needs.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from typing import Any

import msgspec

from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire")

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
MAX_NAME = 200  # characters of an architecture or an import path


class Registrations(msgspec.Struct, frozen=True, omit_defaults=True):
    """Registrations for the processes that one starts: a frontend hands them to its core, a core to its workers.

    models: import path of the class, by architecture. families: import paths of `Family` tables.
    plugins: names of the plugins that the core has loaded, and that workers load as well.
    """

    models: dict[str, str] = {}
    families: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


_models: dict[str, str] = {}
_families: dict[str, None] = {}  # a set that keeps its order


def all_registrations(plugins: tuple[str, ...] = ()) -> Registrations:
    """All that is registered in this process. plugins: those that are loaded."""
    return Registrations(dict(_models), tuple(_families), plugins)


def adopt(registrations: Registrations) -> None:
    """Register what another process has registered."""
    for architecture, path in registrations.models.items():
        add_model(architecture, path)
    for path in registrations.families:
        add_family(path)


def add_model(architecture: str, path: str) -> None:
    """Register the class at an import path for an architecture of config.json, in place of any before.

    Raises:
        ValueError: the architecture is no name, or the path no import path.
    """
    if not architecture.isidentifier() or len(architecture) > MAX_NAME:
        raise ValueError(f"an architecture is a name as in config.json, got {quoted(architecture)}")
    before = _models.get(architecture)
    _models[architecture] = checked_path(path)
    if before not in (None, path):
        logger.warning("%s is now the model %s, no longer %s", architecture, path, before)


def add_family(path: str) -> None:
    """Register the `Family` table at an import path, before any that are registered.

    Raises:
        ValueError: it is no import path.
    """
    _families.pop(checked_path(path), None)
    _families[path] = None


def checked_path(path: str) -> str:
    """The import path itself.

    Raises:
        ValueError: it is not of the form "package.module:Name".
    """
    if len(path) > MAX_NAME or not IMPORT_PATH.fullmatch(path):
        raise ValueError(f"an import path is of the form 'package.module:Name', got {quoted(path)}")
    return path


def import_path(kind: type) -> str:
    """The path by which other processes import a class.

    Raises:
        ValueError: they would not find it there.
    """
    path = f"{kind.__module__}:{kind.__qualname__}"
    advice = "put it into a module of its own, which the workers can import"
    if kind.__module__ == "__main__":
        raise ValueError(f"{quoted(kind.__qualname__)} is a class of the program that runs: {advice}")
    try:
        found = _attribute(sys.modules[kind.__module__], kind.__qualname__)
    except (KeyError, AttributeError):
        found = None
    if found is not kind:
        raise ValueError(f"no other process finds {quoted(path)}: {advice}")
    return path


def import_object(path: str) -> Any:
    """The object at an import path.

    Raises:
        ValueError: it cannot be imported; the text has the path and the cause.
    """
    module, _, name = path.partition(":")
    try:
        return _attribute(import_module(module), name)
    except Exception as error:  # a module may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is registered, but cannot be imported in this process ({cause:.300}); install its package "
            "where the engine runs, or set PYTHONPATH"
        ) from error


def model_path(values: Mapping[str, Any]) -> str | None:
    """The import path of the class that is registered for a config.json; None if there is none."""
    names = values.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return next((_models[name] for name in names if name in _models), None)


def family_paths() -> tuple[str, ...]:
    """The import paths of the tables of families, the last one first."""
    return tuple(reversed(_families))


def _attribute(owner: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), owner)
