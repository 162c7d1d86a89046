"""A core that is spawned by a frontend: `python -m pagewire.engine_core`. See `daemon.py` for what it then does.

Its worker takes longer to start than the core itself, so it is started before the core's modules are imported.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys

import msgspec

from pagewire.engine_core.workers.launchers.early import EarlyWorker
from pagewire.ipc.host.descriptors import raise_descriptor_limit


def main() -> int:
    """Entry point. The frontend writes `EngineArgs` and its `Registrations` as JSON to standard input."""
    parser = argparse.ArgumentParser(description="pagewire engine core (spawned by a frontend)")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--options-stdin", action="store_true", required=True)
    parser.add_argument("--worker-address", help="where a worker will connect that is started at once")
    parser.add_argument("--lifeline", type=int, default=-1)
    options = parser.parse_args()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it logs to the terminal of another process group
    raise_descriptor_limit()  # before the worker, which inherits the limit
    early = start_early(options.worker_address)

    from pagewire.engine_core.daemon import Listen, serve  # while the worker starts
    from pagewire.ipc import logs
    from pagewire.ipc.models.registrations import Registrations, adopt
    from pagewire.ipc.options.engine_args import EngineArgs

    try:
        logs.configure()
    except ValueError as error:
        parser.exit(1, f"engine core failed: {error}\n")
    given = json.load(sys.stdin)
    args = EngineArgs(**given["options"])
    # Its only frontends are of the user who started it, and could write there themselves.
    args.allowed_save_path = args.allowed_save_path or "/"
    adopt(msgspec.convert(given["registrations"], Registrations))
    return serve(args, Listen(options.listen, drain_seconds=0.0), options.lifeline, early)


def start_early(address: str | None) -> EarlyWorker | None:
    """A worker that connects to this address; None without an address, or if none can be started now."""
    try:
        return None if address is None else EarlyWorker.start(address)
    except (OSError, MemoryError):
        return None


if __name__ == "__main__":
    sys.exit(main())
