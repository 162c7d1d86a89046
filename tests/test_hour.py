"""The page that leads through the engine in an hour: few files, and whatever they import is on it."""

from __future__ import annotations

import re
from fnmatch import fnmatch

from tests.test_imports import MODULES, ROOT, modules_imported, name_of

PAGE = (ROOT / "docs" / "architecture" / "hour.md").read_text(encoding="utf-8")
MAX_FILES, MAX_LINES = 32, 6000

READ, WAITS = PAGE.split("## What can wait")
ROWS = [
    re.findall(r"`([\w/*]+(?:\.py)?)`", line.split("|")[1])
    for line in READ.splitlines()
    if line.startswith("| `")
]
FILES = [name for row in ROWS for name in row]
PATTERNS = [
    name
    for line in WAITS.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([\w/*.]+)`", line.split("|")[1])
]


def test_an_hour_is_long_enough() -> None:
    assert len(FILES) == len(set(FILES)) and 20 < len(FILES) <= MAX_FILES
    lines = [len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in FILES]
    assert sum(lines) <= MAX_LINES
    assert f"{len(FILES)} files" in PAGE


def test_whatever_they_import_is_on_the_page() -> None:
    imported = {name_of(MODULES[module]) for name in FILES for module in modules_imported(ROOT / name)}
    others = imported - set(FILES)
    assert [name for name in others if not any(fnmatch(name, pattern) for pattern in PATTERNS)] == []
    unused = [pattern for pattern in PATTERNS if not any(fnmatch(name, pattern) for name in others)]
    assert unused == []
