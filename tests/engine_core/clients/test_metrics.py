"""Distributions, which must agree with those of the official client library, and rates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from pagewire.engine_core.clients.metrics import PER_TOKEN, Distribution, Metrics, Rates, one_two_five
from pagewire.engine_core.schedule.scheduler import SchedulerStats
from pagewire.ipc.messages import TokenDelta

values = st.floats(0.0, 200.0) | st.sampled_from(PER_TOKEN)


@given(st.lists(st.tuples(values, st.integers(1, 5)), max_size=30))
def test_a_distribution_is_a_prometheus_histogram(observed: list[tuple[float, int]]) -> None:
    ours = Distribution(PER_TOKEN)
    theirs = Histogram("x", "x", buckets=PER_TOKEN, registry=CollectorRegistry())
    for value, times in observed:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    (family,) = theirs.collect()
    found = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    told = ours.values()
    assert {le: found["x_bucket", le] for le in told["buckets"]} == told["buckets"]
    assert sum(name == "x_bucket" for name, _ in found) == len(told["buckets"])
    assert told["count"] == found["x_count", None]
    assert told["sum"] == pytest.approx(found["x_sum", None])


def outcome(gap: float, token_ids: list[int]) -> Any:
    return SimpleNamespace(token_gap=gap, arrival_time=7.0), TokenDelta(1, 0, token_ids)


def test_a_step_adds_its_tokens_in_one_piece() -> None:
    kept = Metrics(1000)
    outcomes = [outcome(0.0, [1]), *[outcome(0.02, [1])] * 5, outcome(0.3, [1]), outcome(0.02, [])]
    kept.step(outcomes, 40, 5000, now=8.0)
    assert kept.first_token.values()["sum"] == 1.0
    between = kept.between_tokens.values()
    assert (between["count"], between["sum"]) == (6, pytest.approx(0.4))
    assert (between["buckets"]["0.01"], between["buckets"]["0.025"]) == (0, 5)
    assert kept.step_tokens.values()["buckets"]["64.0"] == 1
    assert kept.step_seconds.values()["sum"] == 0.005


def test_rates_are_of_the_last_interval() -> None:
    rates, stats = Rates(), SchedulerStats()
    rates.update(stats, 100.0)
    stats.num_prompt_tokens, stats.num_output_tokens = 50, 20
    rates.update(stats, 110.0)
    assert (rates.prompt, rates.output) == (5.0, 2.0)
    rates.update(stats, 112.0)
    assert (rates.prompt, rates.output) == (0.0, 0.0)


def test_bounds_for_lengths() -> None:
    assert one_two_five(1) == [1]
    assert one_two_five(300) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert one_two_five(500)[-1] == 500
