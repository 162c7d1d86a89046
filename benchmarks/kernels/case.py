"""One kernel at one size: what it computes, what that must cost, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

ROTATED_BYTES = 256 << 20
"""Buffers of a case take at least this together: several times any L2 cache."""
Run = Callable[[int], object]
"""One call of a kernel, on one set of buffers."""


class Extent(Enum):
    """How much is measured. SMALL sizes show that everything runs, on an emulated device as well."""

    FULL = "full"
    QUICK = "quick"
    SMALL = "small"


@dataclass
class Case:
    """One kernel at one size."""

    name: str
    num_bytes: int
    """That must be read or written at least."""
    flops: int
    """That must be done at least."""
    copies: int
    """Sets of buffers."""
    run: Run
    error: Callable[[], float]
    """Of a run on fresh numbers, relative to float64: the norm of the difference by the norm of the truth."""
    tolerance: float
    peers: dict[str, Run] = field(default_factory=dict)


def num_copies(num_bytes: int) -> int:
    """Sets of buffers for a case that touches so many bytes."""
    return max(1, min(64, -(-ROTATED_BYTES // num_bytes)))


def distance(found: Tensor, truth: Tensor) -> float:
    """Relative to the truth."""
    truth = truth.double()
    return float((found.double() - truth).norm() / truth.norm())
