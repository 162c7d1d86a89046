"""The results of a load test as figures, a table, and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pagewire.cli.load.client import LoadResult

PERCENTILES = (50, 90, 99)
MEASURES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between chunks of a stream",
    "e2e": "time from request to end of stream",
}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the percentile `share` (0 to 100) of sorted values, interpolated linearly between neighbours."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, 90th and 99th percentile in milliseconds of `values` in seconds; {} without values."""
    if not values:
        return {}
    ordered = sorted(values)
    figures = {"mean": math.fsum(ordered) / len(ordered)}
    figures |= {("median" if p == 50 else f"p{p}"): percentile(ordered, p) for p in PERCENTILES}
    return {name: round(1e3 * value, 3) for name, value in figures.items()}


def summary(results: Sequence[LoadResult], seconds: float) -> dict[str, Any]:
    """Return all figures of a run that took `seconds`. Latencies cover the successful requests only."""
    good = [result for result in results if not result.error]
    num_in = sum(result.input_tokens for result in good)
    num_out = sum(result.output_tokens for result in good)
    messages: dict[str, str] = {}
    for result in results:
        if result.error:
            messages.setdefault(result.error, result.message)
    return {
        "seconds": round(seconds, 6),
        "completed": len(good),
        "failed": len(results) - len(good),
        "errors": dict(Counter(result.error for result in results if result.error).most_common()),
        "error_examples": messages,
        "input_tokens": num_in,
        "output_tokens": num_out,
        "requests_per_s": round(len(good) / seconds, 4),
        "input_tokens_per_s": round(num_in / seconds, 2),
        "output_tokens_per_s": round(num_out / seconds, 2),
        "total_tokens_per_s": round((num_in + num_out) / seconds, 2),
        "ttft_ms": distribution([result.ttft for result in good if result.ttft]),
        "tpot_ms": distribution([tpot for result in good if (tpot := result.tpot) is not None]),
        "itl_ms": distribution([gap for result in good for gap in result.gaps]),
        "e2e_ms": distribution([result.e2e for result in good]),
        "late_ms": distribution([result.late for result in results]),
    }


def details(results: Sequence[LoadResult]) -> list[dict[str, Any]]:
    """Return the measurements of every request; times in seconds."""
    return [asdict(result) for result in results]


def table(figures: dict[str, Any]) -> str:
    """Return the figures of `summary` as a text table."""
    counts = (
        ("requests completed", f"{figures['completed']:,}"),
        ("requests failed", f"{figures['failed']:,}"),
        ("seconds", f"{figures['seconds']:,.2f}"),
        ("input tokens", f"{figures['input_tokens']:,}"),
        ("output tokens", f"{figures['output_tokens']:,}"),
        ("requests per second", f"{figures['requests_per_s']:,.2f}"),
        ("input tokens per second", f"{figures['input_tokens_per_s']:,.1f}"),
        ("output tokens per second", f"{figures['output_tokens_per_s']:,.1f}"),
        ("all tokens per second", f"{figures['total_tokens_per_s']:,.1f}"),
    )
    lines = [f"{name:<26}{value:>14}" for name, value in counts]
    lines += ["", "milliseconds" + "".join(f"{name:>11}" for name in ("mean", "median", "p90", "p99"))]
    for name, meaning in MEASURES.items():
        if values := figures[f"{name}_ms"]:
            cells = "".join(f"{value:>11,.2f}" for value in values.values())
            lines.append(f"{name.upper():<12}{cells}   {meaning}")
    if (late := figures["late_ms"].get("p99", 0.0)) > 1:
        lines.append(f"99 % of requests were sent within {late:,.1f} ms of their due time")
    for kind, count in figures["errors"].items():
        lines.append(f"{count:,} x {kind}: {figures['error_examples'][kind]}")
    return "\n".join(lines)
