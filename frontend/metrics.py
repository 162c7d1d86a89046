"""What `get_metrics` returns: the engine's measurements as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """Base of all metrics.

    name: as on the metrics page, a counter's without `_total`. labels: name to value.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """A value as of now."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counts by position."""

    values: list[int]


@dataclass(frozen=True)
class Histogram(Metric):
    """A distribution: `buckets` maps each upper bound (as text, "+Inf" last) to the count at or below it."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(rows: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """The metrics in what the core answers to `metrics`."""
    return [read_metric(row) for row in rows]


def read_metric(row: Mapping[str, Any]) -> Metric:
    """One metric.

    Raises:
        ValueError: a type that is not known here.
    """
    name, labels, kind = row["name"], dict(row.get("labels") or {}), row["type"]
    if kind == "counter":
        return Counter(name.removesuffix("_total"), labels, int(row["value"]))
    if kind == "gauge":
        return Gauge(name, labels, float(row["value"]))
    if kind == "vector":
        return Vector(name, labels, [int(value) for value in row["values"]])
    if kind == "histogram":
        return Histogram(name, labels, int(row["count"]), float(row["sum"]), dict(row["buckets"]))
    raise ValueError(f"metric {name!r} has the unknown type {kind!r}")
