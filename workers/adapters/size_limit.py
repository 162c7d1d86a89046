"""How large the file of an adapter's tensors can be, as its configuration and the model say before it is read."""

from __future__ import annotations

from collections.abc import Iterable

from pagewire.workers.adapters.files import MAX_HEADER_BYTES

MAX_NUMBER_BYTES = 8  # of a number in a file; most have 2 or 4
ROOM = MAX_HEADER_BYTES + (8 << 20)  # for names, and what a file's form adds
VECTORS = 3  # for each output: a bias, that of a second matrix, and DoRA's magnitudes


def low_rank_numbers(rank: int, shapes: Iterable[tuple[int, int]]) -> int:
    """How many numbers an adapter of this rank has for linear layers of these outputs and inputs, at most.

    A rank over both counts as the larger of them: a product of such matrices can be anything already.
    """
    return sum(min(rank, max(n, k)) * (n + k) + VECTORS * n for n, k in shapes)


def whole_numbers(shapes: Iterable[tuple[int, int]]) -> int:
    """How many numbers whole weights of these outputs and inputs have."""
    return sum(n * k for n, k in shapes)


def file_bytes(numbers: int) -> int:
    """The most bytes that a file with this many numbers can have."""
    return ROOM + MAX_NUMBER_BYTES * numbers
