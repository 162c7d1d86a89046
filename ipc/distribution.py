"""A histogram, as Prometheus counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from itertools import accumulate
from typing import Any


class Distribution:
    """A histogram with buckets up to each of `bounds` (ascending), and the sum of all values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Collection[float]) -> None:
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def values(self) -> dict[str, Any]:
        """The histogram in Prometheus' form: cumulative `buckets` by upper bound, `sum` and `count`."""
        cumulative = list(accumulate(self._counts))
        names = [*map(str, self._bounds), "+Inf"]
        return {
            "buckets": dict(zip(names, cumulative, strict=True)),
            "sum": self._sum,
            "count": cumulative[-1],
        }
