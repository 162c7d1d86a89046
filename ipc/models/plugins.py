"""Plugins: functions of installed packages, in the entry-point group `pagewire.general_plugins`.

The core loads them when it starts, and its workers the same ones; a frontend only when it is asked for models. A
plugin registers models (`ModelRegistry`). It may do more, and is called once in each process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from pagewire.ipc.models.registrations import adopt, all_registrations
from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire")

GROUP = "pagewire.general_plugins"
ALLOWED = "PAGEWIRE_PLUGINS"

_loaded: set[str] = set()


def load_allowed_plugins() -> tuple[str, ...]:
    """Load the plugins that `PAGEWIRE_PLUGINS` names, all if it is not set; their names.

    Where the variable does not name it, a plugin that fails is left out, with an error in the log. What the program
    itself has registered before stays, whatever plugins register.

    Raises:
        ValueError: a plugin that the variable names is not installed, or fails.
    """
    own = all_registrations()
    try:
        listed = os.environ.get(ALLOWED)
        return _load_all() if listed is None else _load_listed(listed)
    finally:
        adopt(own)


def _load_listed(listed: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in listed.split(",")))))
    load_plugins(names)
    return names


def _load_all() -> tuple[str, ...]:
    names: tuple[str, ...] = ()
    for name, entry in sorted(find_plugins().items()):
        try:
            _load(name, entry)
        except ValueError as error:
            logger.error("%s; the engine goes on without it", error, exc_info=error.__cause__)
        else:
            names += (name,)
    return names


def load_plugins(names: Iterable[str]) -> None:
    """Load these plugins, but for those that this process has loaded before.

    Raises:
        ValueError: one is not installed, or fails.
    """
    if missing := sorted(set(names) - _loaded):
        entries = find_plugins()
        for name in missing:
            if name not in entries:
                others = ", ".join(sorted(entries)) or "none"
                raise ValueError(f"the plugin {quoted(name)} is not installed here; installed: {others}")
            _load(name, entries[name])


def find_plugins() -> dict[str, EntryPoint]:
    """The plugins of all installed packages, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(name: str, entry: EntryPoint) -> None:
    if name in _loaded:
        return
    try:
        entry.load()()
    except Exception as error:  # it is a stranger's code
        raise ValueError(
            f"the plugin {quoted(name)} ({quoted(entry.value)}) fails: {type(error).__name__}: {error!s:.300}"
        ) from error
    _loaded.add(name)
    logger.info("loaded the plugin %s (%s)", name, entry.value)
