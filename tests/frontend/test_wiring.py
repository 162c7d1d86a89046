"""What a plain request does not need is opened in one place."""

from __future__ import annotations

from importlib import import_module

import pytest

from pagewire.frontend import wiring
from tests.test_imports import MODULES, ROOT, modules_imported

FACES = ["api.llm", "api.async_llm"]
MAX_FILES = 105  # that one may have to read to follow a plain request from `LLM` or `AsyncLLM` to the socket

# Homes of names of the wiring that a plain request reaches all the same, and why.
REACHED = {
    "ipc.options.engine_args": "the type of what `open_session.spawn` and `from_engine_args` take",
    "frontend.requests.decisions": "the type of what `LLM.decide` returns",
}


def reached(first: str) -> set[str]:
    """Our modules that one imports, and those that these import, and so on, also those for type checkers."""
    found, pending = set[str](), {first}
    while pending:
        found |= pending
        pending = {other for name in pending for other in modules_imported(MODULES[name])} - found
    return found


@pytest.mark.parametrize("face", FACES)
def test_a_plain_request_needs_none_of_it(face: str) -> None:
    way = {name.removeprefix("pagewire.") for name in reached(f"pagewire.frontend.{face}")}
    assert "frontend.core.client" in way and "frontend.wiring" in way
    assert way & set(wiring._HOMES) <= set(REACHED)
    assert len(way) <= MAX_FILES


def test_each_name_is_there_and_is_used() -> None:
    for home, names in wiring._HOMES.items():
        for name in names.split():
            assert getattr(wiring, name) is getattr(import_module(f"pagewire.{home}"), name)
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "frontend").rglob("*.py")]
    assert [name for name in dir(wiring) if not any(f"wiring.{name}" in text for text in sources)] == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        wiring.Nothing  # noqa: B018
