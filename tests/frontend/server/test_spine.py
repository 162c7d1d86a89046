"""What a plain chat needs of the server, and what it does not."""

from __future__ import annotations

import ast

from tests.test_imports import MODULES, ROOT, imports, modules_imported, parse

SERVER = "pagewire.frontend.server."
START = (SERVER + "app", SERVER + "openai.chat")
DOOR = "pagewire.frontend.client"
WINGS = (
    "anthropic",
    "audio",
    "batches",
    "decisions",
    "demonstration",
    "ollama",
    "page",
    "pooling",
    "responses",
    "shelf",
)
MAX_FILES = 184  # that one may have to read to follow a chat from the application to the socket


def homes_at_the_door() -> dict[str, str]:
    """The module that defines each name of the door."""
    nodes = ast.walk(parse(ROOT / "frontend" / "client" / "__init__.py"))
    inside = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in inside for alias in node.names}


def reached() -> set[str]:
    """Our modules that these import, in functions too; names at the door count for the module that defines them."""
    homes = homes_at_the_door()
    found, pending = set[str](), set(START)
    while pending:
        found |= pending
        named = {
            name for module in pending for name in imports(MODULES[module]) if name.startswith(DOOR + ".")
        }
        ours = {other for module in pending for other in modules_imported(MODULES[module])} - {DOOR}
        pending = (ours | {homes[name.removeprefix(DOOR + ".")] for name in named}) - found
    return found


def test_a_chat_needs_no_other_api() -> None:
    way = reached()
    assert {SERVER + "serving.service", "pagewire.frontend.core.client"} <= way
    assert SERVER + "wiring" not in way
    assert [name for name in sorted(way) if name.startswith(tuple(SERVER + wing for wing in WINGS))] == []
    assert len(way) <= MAX_FILES
