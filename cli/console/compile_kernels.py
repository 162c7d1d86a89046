"""Compiles the CPU kernels into the cache, behind all other work, in a process that ends with a user's command."""

from __future__ import annotations

import argparse
import os
import signal
import threading

from pagewire.ipc import logs
from pagewire.ipc.host.lifeline import wait_for_end
from pagewire.ipc.host.priority import go_behind
from pagewire.kernels.cpu.library import choose

NICENESS = 19


def main() -> None:
    """Compile until they are in the cache, or the parent ends. This process leads its session."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lifeline", required=True, type=int, metavar="FD")
    lifeline = parser.parse_args().lifeline
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        wait_for_end(lifeline)
        os.killpg(0, signal.SIGKILL)  # the compilers, too

    threading.Thread(target=end_with_parent, name="lifeline", daemon=True).start()
    logs.configure()
    go_behind(NICENESS)
    choose()


if __name__ == "__main__":
    main()
