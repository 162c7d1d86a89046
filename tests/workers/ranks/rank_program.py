"""A process that runs the battery as one rank of a group: RANK SIZE RENDEZVOUS PORT (0: all are on one machine) ...

Further arguments: `gloo`: not through shared memory. `stages=N`: the ranks are a pipeline. `--lifeline FD`: in the
end rank 1 waits for ever for the others, in an operation of each kind of group, and says so before; the process
ends with its parent.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

import msgspec
import torch

from pagewire.ipc.host.lifeline import die_with_parent
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.open import open_collective
from tests.workers.ranks import battery


def main() -> None:
    rank, size, rendezvous, port, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    listener = None
    if int(port) and rank == "0":
        listener = socket.create_server(("127.0.0.1", int(port)))
    stages = next((int(text.partition("=")[2]) for text in rest if text.startswith("stages=")), 1)
    parallel = Parallel(
        rank=int(rank),
        stages=stages,
        size=int(size),
        local_rank=int(rank),
        local_size=int(size),
        rendezvous=rendezvous,
        host="127.0.0.1" if int(port) else "",
        port=int(port),
        shared_memory=not int(port) and "gloo" not in rest,
    )
    group = open_collective(parallel, torch.device("cpu"), listener)
    count = battery.run(group) + (battery.run_pipeline(group, stages) if stages > 1 else 0)
    say(f"{type(group).__name__} {count}")
    if "--lifeline" in rest:
        wait_for_ever(group, parallel, int(rest[-1]))
    group.close()


def say(text: str) -> None:
    """Print a line at once: ranks that share a pipe must not mix theirs."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def wait_for_ever(group: Collective, parallel: Parallel, lifeline: int) -> None:
    """Let rank 1 wait in two operations, and the others elsewhere; and all end with the parent."""
    die_with_parent(lifeline)
    other = open_collective(
        msgspec.structs.replace(parallel, rendezvous=parallel.rendezvous + "-2", shared_memory=False),
        torch.device("cpu"),
    )
    say(str(os.getpid()))
    if parallel.rank == 1:
        threading.Thread(target=other.barrier, daemon=True).start()
        group.barrier()
    threading.Event().wait()


if __name__ == "__main__":
    main()
