"""A server that serves what its clients pull, from a hub in this process; it runs in the project's Python.

The hub has the demo model as safetensors (`demo/plain`), and files that are named as GGUF files (`demo/gguf`),
which can be pulled and removed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.ipc.files.stores import HubHandler, Store


def main(cache: str, demo: str, *options: str) -> int:
    """Serve until the process is to end."""
    files = {f"demo/plain/{path.name}": path.read_bytes() for path in Path(demo).glob("*.*")}
    files |= {f"demo/gguf/Demo-{name}.gguf": name.encode() * 500_000 for name in ("Q4_K_M", "Q8_0")}
    with Store(files).serving(HubHandler) as store:
        os.environ.update(
            HF_ENDPOINT=store.address, HF_HOME=f"{cache}/hub", PAGEWIRE_PULLED_DIR=f"{cache}/pulled"
        )
        from pagewire.cli.main import (
            main as pagewire,
        )  # the hub's client reads HF_ENDPOINT when it is imported

        return pagewire(["serve", "--pulled", "--enable-admin", *options])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
