"""JavaScript clients, whose tests are in the folder `javascript`: openai, @anthropic-ai/sdk and ai."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.clients.scripts import ANSWER, TRIP, script

FOLDER = Path(__file__).parent / "javascript"


def test_javascript(url: str, scripted: str) -> None:
    node = shutil.which("node")
    assert node is not None, "`make test-clients` installs it"
    typed = script("Where does it rain?", '{"city": "Oslo", "rains": true}')
    variables = {"SERVER": url, "SCRIPTED": scripted, "TRIP": TRIP, "TYPED": typed, "ANSWER": ANSWER}
    done = subprocess.run(
        [node, "--test", "clients.test.js"],
        cwd=FOLDER,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
