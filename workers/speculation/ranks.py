"""Over which ranks of a group a model that proposes tokens is divided.

As a rule it is divided as the model that is served is. What cannot be divided so, or shall not be
(`speculative_draft_tensor_parallel_size=1`), is whole on every rank. In both cases all ranks propose the same
tokens: they start from the same hidden states, and what they put together has the same bits on each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from pagewire.kernels.data.weight import Linear, Weight
from pagewire.workers.errors import IndivisibleError, LoadError
from pagewire.workers.module.parallel_layers import Gather, GatheredLinear
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.shares import width_spans
from pagewire.workers.ranks.single import SingleRank

logger = logging.getLogger("pagewire.worker")

T = TypeVar("T")


def over_ranks(size: int | None, collective: Collective, make: Callable[[Collective], T]) -> T:
    """What `make` makes, given the ranks over which it is divided: those of the group, or this one alone.

    size: `SpeculativeConfig.draft_tensor_parallel_size`.

    Raises:
        LoadError: see `make`; or that many ranks were asked for, and it cannot be divided over them.
    """
    if collective.size == 1 or size == 1:
        return make(SingleRank())
    try:
        return make(collective)
    except IndivisibleError as error:
        if size is not None:
            raise LoadError(
                f"{error}; with speculative_draft_tensor_parallel_size=1 every worker has the whole of it"
            ) from error
        logger.info("every worker has the whole of the model that proposes tokens: %s", error)
    return make(SingleRank())


def gathered_product(matrix: Weight, ranks: Collective, pack: Callable[[Weight], Linear]) -> Linear:
    """The product with a matrix [N, K] of which each rank multiplies with some rows; all ranks get all N outputs.

    pack: makes a product of a rank's rows.
    """
    if ranks.size == 1:
        return pack(matrix)
    spans = width_spans(matrix.shape[0], ranks.size)
    own = spans[ranks.rank]
    return GatheredLinear(pack(matrix.slice(own.start, own.stop)), Gather(spans, ranks))
