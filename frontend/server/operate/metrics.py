"""The core's metrics as Prometheus text.

The core measures, over all its frontends, so every server attached to it gives the same figures; only those of
`http/traffic.py` are the server's own. There is no
OpenMetrics form: the library's turns the colon of names into an underscore, so that the names would depend on the
format that a scraper accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Snapshot(Collector):
    """The core's answer to `metrics`, in the form that the encoders of prometheus_client take."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        """Families of samples: rows of one name belong together."""
        families: dict[str, Metric] = {}
        for row in self._rows:
            name, kind = row["name"], row["type"]
            if name not in families:
                plain = name.removesuffix("_total") if kind == "counter" else name
                families[name] = Metric(plain, row["documentation"], kind)
            for sample in samples(row):
                families[name].add_sample(*sample)
        yield from families.values()


def samples(row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each sample in a row."""
    name, labels = row["name"], row["labels"]
    if row["type"] != "histogram":
        yield name, labels, row["value"]
        return
    for bound, count in row["buckets"].items():
        yield f"{name}_bucket", {**labels, "le": bound}, count
    yield f"{name}_count", labels, row["count"]
    yield f"{name}_sum", labels, row["sum"]


def exposition(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A snapshot as text of type `CONTENT_TYPE`."""
    return generate_latest(Snapshot(rows))
