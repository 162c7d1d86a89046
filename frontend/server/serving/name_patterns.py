"""Names of a model with `*`, as in `claude-*`: patterns of the names that requests may give."""

from __future__ import annotations

from collections.abc import Iterable

ANY = "*"  # any characters, or none


def is_pattern(name: str) -> bool:
    """Return True for a pattern of names."""
    return ANY in name


def name_matches(pattern: str, name: str) -> bool:
    """Return True if a name has the form of a pattern. The time is linear in their lengths."""
    first, *middle, last = pattern.split(ANY)
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    rest, end = len(first), len(name) - len(last)
    for part in middle:
        found = name.find(part, rest, end)
        if found < 0:
            return False
        rest = found + len(part)
    return True


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Return True if a name has the form of one of some patterns."""
    return any(name_matches(pattern, name) for pattern in patterns)
