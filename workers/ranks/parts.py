"""The part of a group that divides the layers of a stage."""

from __future__ import annotations

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.single import SingleRank


def shards_of(ranks: Collective, parallel: Parallel) -> Collective:
    """The ranks of this rank's stage, as a group of their own; all ranks of the group call this together.

    ranks: all of them.
    """
    if parallel.stages == 1:
        return ranks
    return SingleRank() if parallel.num_shards == 1 else ranks.part(parallel.num_shards)
