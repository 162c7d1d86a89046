"""What the ranks of a group decide together, so that all of them take the same way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.ranks.interface import Collective


def all_have(it: bool, collective: Collective, device: torch.device) -> bool:
    """True if all ranks of a group have something. device: of the group's tensors."""
    lacking = torch.tensor([float(not it)], device=device)
    return not collective.all_reduce(lacking).item()


def from_rank(source: int, content: bytes, collective: Collective, device: torch.device) -> bytes:
    """A few kilobytes of one rank, at least one byte, on all ranks, which call this together.

    content: of this rank. device: of the group's tensors.
    """
    size = collective.broadcast(torch.tensor([len(content)], device=device), source)
    data = torch.zeros(int(size.item()), dtype=torch.uint8)
    if collective.rank == source:
        data = torch.tensor(list(content), dtype=torch.uint8)
    return bytes(collective.broadcast(data.to(device), source).tolist())


@contextmanager
def own_turn(collective: Collective, parallel: Parallel) -> Iterator[None]:
    """A context that begins with the turn of this rank, and ends when all ranks have had theirs.

    Within it nothing may wait for the other ranks. An error ends the turn, too: the others may meet the same one.
    """
    if parallel.num_turns == 1:
        yield
        return
    for _ in range(parallel.turn):
        collective.barrier()
    try:
        yield
    finally:
        for _ in range(parallel.turn, parallel.num_turns):
            collective.barrier()
