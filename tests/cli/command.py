"""Runs the `pagewire` command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

COMMAND = [sys.executable, "-m", "pagewire.cli.main"]
PROMPT = 'The "with" statement is used to'
QUESTION = "What is the with statement?"
SAMPLING = ["--temperature", "0", "--max-tokens", "12"]
ENDLESS = ["--max-tokens", "900", "--ignore-eos"]
# An idle core pre-faults a KV cache of the default size, which costs up to two seconds of a processor.
SMALL_KV = ["--kv-cache-memory-bytes", "67108864"]
# Output is buffered as for users, whatever the tests are run with.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def pagewire(*arguments: str, stdin: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    options = {"capture_output": True, "env": ENVIRONMENT} | options
    return subprocess.run([*COMMAND, *arguments], input=stdin, text=True, timeout=120, **options)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start it."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT} | options
    return subprocess.Popen([*COMMAND, *arguments], text=True, **options)


def start_core(address: str, *options: str, **more: Any) -> subprocess.Popen[str]:
    """Start `pagewire core`, and wait until it is ready."""
    core = start("core", "--listen", address, *options, **{"stderr": subprocess.DEVNULL} | more)
    assert core.stdout is not None and core.stdout.readline() == f"ready {address}\n"
    return core
