"""Opens the collective of a worker's group: what suits its device and the places of the ranks."""

from __future__ import annotations

import os
import socket

import torch

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.kernels.cpu import library
from pagewire.kernels.cpu.collective import SharedMemoryGroup, region_bytes
from pagewire.workers.ranks import meeting
from pagewire.workers.ranks.check import check
from pagewire.workers.ranks.distributed import DistributedGroup
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.single import SingleRank


def open_collective(
    parallel: Parallel, device: torch.device, listener: socket.socket | None = None
) -> Collective:
    """The collective of a group; waits until all ranks have opened theirs.

    listener: the socket that this worker listens at, where ranks may be on several machines.

    Raises:
        LoadError, OSError, RuntimeError: the ranks cannot meet, or NCCL gives them other numbers than were sent.
    """
    if listener is not None and (parallel.rank > 0 or not parallel.host):
        listener.close()  # the ranks meet elsewhere
        listener = None
    if parallel.size == 1:
        return SingleRank()
    if device.type != "cpu":
        group = DistributedGroup("nccl", device, parallel, listener)
        check(group, device)  # its launches, and the ways between the GPUs
        return group
    if parallel.shared_memory and (compiled := library.choose()) is not None:
        return shared_memory_group(compiled, parallel)
    return DistributedGroup("gloo", device, parallel, listener)


def shared_memory_group(compiled: library.Library, parallel: Parallel) -> SharedMemoryGroup:
    """The group whose ranks share memory: rank 0 makes it, and hands it to the others.

    Raises:
        OSError: there is too little memory, or the ranks cannot meet.
    """
    if parallel.rank == 0:
        descriptor = os.memfd_create("pagewire-ranks")
    else:
        isa, received = meeting.visit(parallel.rendezvous)
        if isa != compiled.isa.name or received is None:
            raise OSError(f"rank 0 computes with {isa}, and rank {parallel.rank} with {compiled.isa.name}")
        descriptor = received
    try:
        if parallel.rank == 0:
            os.ftruncate(descriptor, region_bytes(compiled.functions, parallel.size, parallel.stages))
            meeting.host(parallel.rendezvous, parallel.size - 1, compiled.isa.name, descriptor)
        return SharedMemoryGroup(
            compiled.functions, descriptor, parallel.rank, parallel.size, parallel.stages
        )
    finally:
        os.close(descriptor)
