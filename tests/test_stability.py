"""docs/stability.md lists the public names and the protocol's number, so that neither changes unnoticed."""

from __future__ import annotations

import ast
import re
from importlib import import_module

import pytest

from pagewire.ipc.wire.messages import PROTOCOL
from tests.test_imports import ROOT

TEXT = (ROOT / "docs" / "stability.md").read_text("utf-8")
ROWS = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `(pagewire[\w.]*)` \| (.*) \|$", TEXT, re.M)
}


def public_modules() -> dict[str, list[str]]:
    """The modules of the folder `pagewire` that say which names they have, and these."""
    found = {}
    for path in (ROOT / "pagewire").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[".".join(parts).removesuffix(".__init__")] = ast.literal_eval(node.value)
    return found


def test_every_public_name_is_listed() -> None:
    """A name that goes is a break of the promise; one that comes is promised from then on."""
    assert {module: sorted(names) for module, names in public_modules().items()} == ROWS


@pytest.mark.parametrize("module", ROWS)
def test_listed_names_can_be_imported(module: str) -> None:
    imported = import_module(module)
    assert [name for name in ROWS[module] if not hasattr(imported, name)] == []


def test_the_protocol_is_the_one_that_is_spoken() -> None:
    assert re.findall(r"the same protocol, \*\*(\d+)\*\* now", TEXT) == [str(PROTOCOL)]
