"""An agent that runs fake workers: ADDRESS KEY_FILE RANK ("any" for any) [VERSION to claim]."""

from __future__ import annotations

import sys
from pathlib import Path

from pagewire.ipc import logs
from pagewire.ipc.errors import EngineDeadError
from pagewire.workers.process import agent

FOLDER = next(folder for folder in Path(__file__).parents if folder.name == "engine_core")
FAKE_WORKER = (sys.executable, str(FOLDER / "fake_worker.py"))


def main() -> int:
    address, key_file, rank, *version = sys.argv[1:]
    logs.configure()
    if version:
        agent.__version__ = version[0]
    try:
        number = None if rank == "any" else int(rank)
        agent.Agent(address, Path(key_file), number, patience=20.0, command=FAKE_WORKER).run()
    except (ValueError, OSError, EngineDeadError) as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
