"""The code in README and `docs/` runs as it stands there: shell blocks beside one core and one server, and Python.

tests/documents.py says which blocks do not run, and why.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.documents import ENDLESS, ROOT, Block, blocks
from tests.end_to_end.conftest import Daemon
from tests.end_to_end.server_process import ServerProcess

pytestmark = pytest.mark.documents

CORE, SERVER = "ipc:///tmp/demo.sock", "http://127.0.0.1:8000"
"""Addresses in the documents."""


def by_document(language: str) -> list[tuple[str, list[Block]]]:
    """The blocks that run, by their document: they follow each other, as its reader would type them."""
    running = [block for block in blocks(language) if block.runs and not block.text.startswith("make ")]
    groups = groupby(running, lambda block: str(block.document.relative_to(ROOT)))
    return [(name, list(members)) for name, members in groups]


def script(parts: list[Block]) -> str:
    """The commands of a document that come to an end. curl is to fail when the server does not like a request."""
    kept = []
    for line in "".join(block.text for block in parts).replace("\\\n", " ").splitlines():
        words = line.split()
        if words[:1] != ["pagewire"] or words[1] not in ENDLESS:
            kept.append(re.sub(r"^curl ", "curl -sS --fail-with-body ", line))
    return "\n".join(kept)


PROGRAMS = dict(by_document("python"))
SCRIPTS = {name: text for name, parts in by_document("sh") if (text := script(parts).strip())}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A core on the demo model and a server attached to it, by the addresses that the documents give them."""
    core = Daemon(f"ipc://{tmp_path_factory.mktemp('documents')}/demo.sock")
    server = ServerProcess(core.address)
    yield {CORE: core.address, SERVER: server.url}
    server.stop()
    core.stop()


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_shell(text: str, addresses: dict[str, str], tmp_path: Path) -> None:
    for written, real in addresses.items():
        text = text.replace(written, real)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PAGEWIRE_CPU_KVCACHE_SPACE": "1"}
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.stdout or list(tmp_path.iterdir()), "nothing came of it"


@pytest.mark.parametrize("name", PROGRAMS)
def test_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KVCACHE_SPACE", "1")
    names: dict[str, object] = {"__name__": name}
    for block in PROGRAMS[name]:
        exec(compile(block.text, block.place, "exec"), names)


def test_blocks_are_found() -> None:
    assert len(SCRIPTS) > 5 and len(PROGRAMS) > 4
