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
    "itl": "between chunks of a stream",
    "e2e": "from request to end",
}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` percent of the sorted values lie, interpolated between neighbours."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 90th and 99th percentile, in milliseconds, of values in seconds; empty if there are none."""
    if not values:
        return {}
    ordered = sorted(values)
    found = {"mean": math.fsum(ordered) / len(ordered)}
    found |= {("median" if p == 50 else f"p{p}"): percentile(ordered, p) for p in PERCENTILES}
    return {name: round(1e3 * value, 3) for name, value in found.items()}


def summary(replies: Sequence[LoadResult], seconds: float) -> dict[str, Any]:
    """All figures of a run that took `seconds`. Latencies are of the requests that succeeded."""
    good = [reply for reply in replies if not reply.error]
    num_in = sum(reply.input_tokens for reply in good)
    num_out = sum(reply.output_tokens for reply in good)
    messages: dict[str, str] = {}
    for reply in replies:
        if reply.error:
            messages.setdefault(reply.error, reply.message)
    return {
        "seconds": round(seconds, 6),
        "completed": len(good),
        "failed": len(replies) - len(good),
        "errors": dict(Counter(reply.error for reply in replies if reply.error).most_common()),
        "error_examples": messages,
        "input_tokens": num_in,
        "output_tokens": num_out,
        "requests_per_s": round(len(good) / seconds, 4),
        "input_tokens_per_s": round(num_in / seconds, 2),
        "output_tokens_per_s": round(num_out / seconds, 2),
        "total_tokens_per_s": round((num_in + num_out) / seconds, 2),
        "ttft_ms": distribution([reply.ttft for reply in good if reply.ttft]),
        "tpot_ms": distribution([tpot for reply in good if (tpot := reply.tpot) is not None]),
        "itl_ms": distribution([gap for reply in good for gap in reply.gaps]),
        "e2e_ms": distribution([reply.e2e for reply in good]),
        "late_ms": distribution([reply.late for reply in replies]),
    }


def details(replies: Sequence[LoadResult]) -> list[dict[str, Any]]:
    """One dict per request, with times in seconds."""
    return [asdict(reply) for reply in replies]


def table(found: dict[str, Any]) -> str:
    """The figures of `summary` as lines of text."""
    counts = (
        ("requests completed", f"{found['completed']:,}"),
        ("requests failed", f"{found['failed']:,}"),
        ("seconds", f"{found['seconds']:,.2f}"),
        ("input tokens", f"{found['input_tokens']:,}"),
        ("output tokens", f"{found['output_tokens']:,}"),
        ("requests per second", f"{found['requests_per_s']:,.2f}"),
        ("input tokens per second", f"{found['input_tokens_per_s']:,.1f}"),
        ("output tokens per second", f"{found['output_tokens_per_s']:,.1f}"),
        ("all tokens per second", f"{found['total_tokens_per_s']:,.1f}"),
    )
    lines = [f"{name:<26}{value:>14}" for name, value in counts]
    lines += ["", "milliseconds" + "".join(f"{name:>11}" for name in ("mean", "median", "p90", "p99"))]
    for name, meaning in MEASURES.items():
        if values := found[f"{name}_ms"]:
            cells = "".join(f"{value:>11,.2f}" for value in values.values())
            lines.append(f"{name.upper():<12}{cells}   {meaning}")
    if (late := found["late_ms"].get("p99", 0.0)) > 1:
        lines.append(f"99 % were sent within {late:,.1f} ms of when they were due")
    for kind, count in found["errors"].items():
        lines.append(f"{count:,} x {kind}: {found['error_examples'][kind]}")
    return "\n".join(lines)
