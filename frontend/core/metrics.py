"""The types of metrics that `get_metrics` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pagewire.ipc.compatibility import KnowsAttributes


class Metric(msgspec.Struct, frozen=True):
    """Base class of all metrics.

    name: name as in /metrics, for a counter without `_total`. labels: values by name.
    """

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True):
    """A count that never decreases."""

    value: int


class Gauge(Metric, frozen=True):
    """A current value, which may increase and decrease."""

    value: float


class Vector(Metric, frozen=True):
    """Counts by position."""

    values: list[int]


class Histogram(Metric, frozen=True):
    """A distribution: `buckets` maps each upper bound (as text, "+Inf" last) to the count at or below it."""

    count: int
    sum: float
    buckets: dict[str, int]


class MetricList(KnowsAttributes, list[Metric]):
    """Metrics. Several of them may have the same name, and other labels."""


def read_metrics(rows: Iterable[Mapping[str, Any]]) -> MetricList:
    """Convert the core's answer to the call `metrics`."""
    return MetricList(read_metric(row) for row in rows)


def read_metric(row: Mapping[str, Any]) -> Metric:
    """Convert one metric of the core's answer.

    Raises:
        ValueError: the type is unknown.
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
