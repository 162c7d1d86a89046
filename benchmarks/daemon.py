"""A core daemon for the length of a benchmark."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagewire import AsyncLLM


@contextmanager
def running_core(*options: str, python: str = sys.executable) -> Iterator[str]:
    """The address of a core, started with these options of `pagewire core`, that ends with the block.

    python: the interpreter of the version of pagewire to run.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/core.sock"
        command = [python, "-m", "pagewire.cli.main", "core", "--listen", address, *options]
        # In a session of its own, as a server's core is: the scheduler of Linux shares processors between sessions
        # first. Not in this folder, where `python -m` would import the version of this folder.
        core = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=folder
        )
        assert core.stdout is not None
        try:
            if not core.stdout.readline().startswith("ready"):
                raise RuntimeError("the core did not start; its log above tells why")
            yield address
        finally:
            core.terminate()
            core.wait()


async def status(llm: AsyncLLM) -> dict[str, Any]:
    """What the core says of itself now."""
    return await asyncio.wrap_future(llm.session.call("status"))  # type: ignore[no-any-return]
