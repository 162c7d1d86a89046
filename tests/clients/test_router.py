"""The example of a router, whose requests OpenAI's client sends; it runs in the project's Python."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "67108864")


def test_the_example_of_a_router() -> None:
    command = [os.environ["SERVER_PYTHON"], "examples/router.py", "--cores", "2", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    texts, cores = done.stdout.splitlines()
    assert len(ast.literal_eval(texts)) == 4
    assert [core["state"] for core in json.loads(cores)] == ["up", "up"]
