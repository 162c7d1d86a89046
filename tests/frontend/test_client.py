"""The door between the frontend and its servers."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from pagewire.frontend import client
from tests.test_imports import ROOT, imports, name_of, parse, run_python

SERVERS = [path for room in ("server", "route") for path in (ROOT / "frontend" / room).rglob("*.py")]
ROOMS = {path.name for path in (ROOT / "frontend").iterdir() if path.is_dir()} - {"__pycache__", "client"}
DOOR = "pagewire.frontend.client."


def test_servers_use_the_door_alone() -> None:
    inside = tuple(f"pagewire.frontend.{room}." for room in ROOMS - {"server", "route"})
    assert len(SERVERS) > 100 and len(inside) >= 6
    beside = [
        f"{name_of(path)}: {name}" for path in SERVERS for name in imports(path) if name.startswith(inside)
    ]
    assert beside == []


def test_nothing_in_the_rooms_knows_a_server() -> None:
    outside = ("pagewire.frontend.server", "pagewire.frontend.route", "pagewire.frontend.client")
    rooms = [
        path for room in ROOMS - {"server", "route"} for path in (ROOT / "frontend" / room).rglob("*.py")
    ]
    assert [name_of(path) for path in rooms if any(name.startswith(outside) for name in imports(path))] == []


def test_each_name_of_the_door_is_used_by_a_server() -> None:
    used = {name.removeprefix(DOOR) for path in SERVERS for name in imports(path) if name.startswith(DOOR)}
    assert used == set(dir(client))


def test_type_checkers_see_the_same_homes() -> None:
    (block,) = (
        node for node in parse(ROOT / "frontend" / "client" / "__init__.py").body if isinstance(node, ast.If)
    )
    seen = {
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = client._HOMES.items()
    assert seen == {(f"pagewire.frontend.{home}", name) for home, names in homes for name in names.split()}
    for home, name in seen:
        assert getattr(client, name) is getattr(import_module(str(home)), name)


def test_the_door_loads_nothing_until_asked(tmp_path: Path) -> None:
    program = "import sys; from pagewire.frontend import client; print(*sys.modules)"
    loaded = [name for name in run_python(program, cwd=tmp_path).split() if name.startswith("pagewire")]
    assert loaded == ["pagewire", "pagewire.frontend", "pagewire.frontend.client"]
    with pytest.raises(AttributeError, match="no attribute 'LLMEngine'"):
        client.LLMEngine  # noqa: B018
