"""Log probabilities as a core sends them."""

from __future__ import annotations

import struct
from itertools import chain

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import LogprobRows


def rows(token_ids: list[list[int]], logprobs: list[list[float]], ranks: list[int]) -> LogprobRows:
    """Rows of positions, each with its own token first, then the most likely ones. ranks: of the own tokens."""
    shape = (len(token_ids), len(token_ids[0]))
    ids, values = list(chain(*token_ids)), list(chain(*logprobs))
    return LogprobRows(
        Tensor("int32", shape, struct.pack(f"{len(ids)}i", *ids)),
        Tensor("float32", shape, struct.pack(f"{len(values)}f", *values)),
        Tensor("int32", (len(ranks),), struct.pack(f"{len(ranks)}i", *ranks)),
    )
