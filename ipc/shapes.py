"""Shapes that a peer or a file gives: of few dimensions, so that their product is soon computed.

A product of n numbers is one call in C that takes time quadratic in n, and lets nothing else of the process run
meanwhile: that of a list of 500 kB took minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta

from pagewire.ipc.bounds import MAX_INT
from pagewire.ipc.quoting import quoted

MAX_DIMENSIONS = 8  # twice as many as any tensor of a model, an adapter or a message has

Length: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT)]
Shape: TypeAlias = Annotated[list[Length], Meta(max_length=MAX_DIMENSIONS)]
"""A shape in a struct; its product is still to be checked by `num_values`."""


def num_values(shape: Sequence[int]) -> int:
    """Return the number of values of a tensor of this shape: the product of its dimensions, checked first.

    Raises:
        ValueError: it has over `MAX_DIMENSIONS` dimensions, or a negative one, or its product does not fit into 63
            bits. Zeros do not count there: strides are products of the other dimensions.
    """
    if len(shape) <= MAX_DIMENSIONS and min(shape, default=0) >= 0:
        number = math.prod(shape)
        if (number or math.prod(filter(None, shape))) <= MAX_INT:
            return number
    raise ValueError(
        f"a shape has at most {MAX_DIMENSIONS} dimensions, none negative, and less than 2^63 values, got "
        f"{len(shape)} dimensions: {quoted(shape)}"
    )
