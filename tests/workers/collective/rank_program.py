"""A process that runs the battery as one rank of a group: RANK SIZE RENDEZVOUS PORT (0: all are on one machine).

With `wait` as a further argument it enters an operation in which it waits for ever, and says so before.
"""

from __future__ import annotations

import socket
import sys

import torch

from pagewire.ipc.worker_messages import Parallel
from pagewire.workers.collective.open import open_collective
from tests.workers.collective import battery


def main() -> None:
    rank, size, rendezvous, port, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    listener = None
    if int(port) and rank == "0":
        listener = socket.create_server(("127.0.0.1", int(port)))
    parallel = Parallel(
        rank=int(rank),
        size=int(size),
        local_rank=int(rank),
        local_size=int(size),
        rendezvous=rendezvous,
        host="127.0.0.1" if int(port) else "",
        port=int(port),
        shared_memory=not int(port) and "gloo" not in rest,
    )
    group = open_collective(parallel, torch.device("cpu"), listener)
    print(type(group).__name__, battery.run(group), flush=True)
    group.close()


if __name__ == "__main__":
    main()
