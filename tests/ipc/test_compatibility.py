"""Names of vLLM that are absent: each is refused or warned of where it is used, with what to use instead."""

from __future__ import annotations

from pagewire.cli.compatibility import PATH, document


def test_the_documentation_is_up_to_date() -> None:
    """`python -m pagewire.cli.compatibility` writes it."""
    assert PATH.read_text(encoding="utf-8") == document()
