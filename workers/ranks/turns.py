"""Turns in which the ranks of a group load weights, where a machine lacks the memory for all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.ranks.interface import Collective


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
