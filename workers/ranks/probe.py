"""Checks and times the collectives of a group of processes, for `pagewire doctor --distributed`.

    python -m pagewire.workers.ranks.probe KIND RANK SIZE RENDEZVOUS HOST:PORT --lifeline FD

KIND: shared memory, gloo or nccl. HOST:PORT: where rank 0 listens; "-" if all ranks are on this machine. Rank 0
prints a `ProbeReport` as JSON. The exit status is 1, with a line on standard error, if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from pagewire.ipc.host.lifeline import die_with_parent
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.ranks.check import check
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.open import open_collective

SMALL_BYTES, LARGE_BYTES = 8 << 10, 16 << 20  # a row of hidden states, and those of a long prompt
SECONDS = 0.5  # for which each operation is timed
KINDS = ("shared", "gloo", "nccl")


@dataclass(frozen=True)
class ProbeReport:
    """What was measured. collective: the class that the ranks use.

    latency: seconds of a sum of `SMALL_BYTES` of bfloat16. barrier: seconds of a barrier.
    bandwidth: bytes per second of a sum of `LARGE_BYTES`, counted once.
    """

    collective: str
    size: int
    latency: float
    barrier: float
    bandwidth: float


def probe(group: Collective, device: torch.device) -> ProbeReport:
    """Check the operations of a group, and measure them.

    Raises:
        RuntimeError: a result is wrong.
    """
    check(group, device)
    small = torch.zeros(SMALL_BYTES // 2, dtype=torch.bfloat16, device=device)
    large = torch.zeros(LARGE_BYTES // 2, dtype=torch.bfloat16, device=device)
    latency = seconds_of(lambda: group.all_reduce(small), group)
    return ProbeReport(
        type(group).__name__,
        group.size,
        latency,
        seconds_of(group.barrier, group),
        LARGE_BYTES / seconds_of(lambda: group.all_reduce(large), group),
    )


def seconds_of(operation: Callable[[], object], group: Collective) -> float:
    """The mean time of an operation, which all ranks run equally often."""
    count, taken = 2, 0.0
    while taken < SECONDS / 4 and count < 1 << 16:
        count *= 2
        group.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            operation()
        group.barrier()
        longest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        taken = float(group.broadcast(longest.to(group_device(group)), 0)[0])
    return taken / count


def group_device(group: Collective) -> torch.device:
    """The device of the tensors of a group."""
    return getattr(group, "device", torch.device("cpu"))


def main() -> int:
    """Entry point of a rank's process. Returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("rank", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("rendezvous")
    parser.add_argument("address")
    parser.add_argument("--lifeline", required=True, type=int, metavar="FD")
    options = parser.parse_args()
    die_with_parent(options.lifeline)
    host, _, port = ("", "", "0") if options.address == "-" else options.address.rpartition(":")
    parallel = Parallel(
        rank=options.rank,
        size=options.size,
        local_rank=options.rank,
        local_size=options.size,
        rendezvous=options.rendezvous,
        host=host,
        port=int(port),
        shared_memory=options.kind == "shared",
    )
    try:
        device = torch.device("cpu")
        if options.kind == "nccl":
            device = torch.device("cuda", options.rank if not host else 0)
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        listener = socket.create_server((host, int(port))) if host and options.rank == 0 else None
        group = open_collective(parallel, device, listener)
        report = probe(group, device)
        group.close()
    except (RuntimeError, OSError, ValueError) as error:
        print(f"rank {options.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.rank == 0:
        print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
