"""Distributions, which agree with those of the official client library; rates; what counts once per request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from pagewire.engine_core.metrics.metrics import (
    PER_TOKEN,
    Metrics,
    Rates,
    num_requests,
    one_two_five,
)
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.schedule.speculation import SpeculationStats
from pagewire.engine_core.schedule.step import SchedulerStats, StepOutcomes
from pagewire.engine_core.tenants.accounts import Account
from pagewire.ipc.distribution import Distribution
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request, TokenDelta

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
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    row = ours.values()
    assert {le: samples["x_bucket", le] for le in row["buckets"]} == row["buckets"]
    assert sum(name == "x_bucket" for name, _ in samples) == len(row["buckets"])
    assert row["count"] == samples["x_count", None]
    assert row["sum"] == pytest.approx(samples["x_sum", None])


def submit(metrics: Metrics, now: float = 7.0, **params: Any) -> list[Sequence]:
    """The sequences of a new request for three prompt tokens."""
    request = Request(1, "r", Prompt([1, 2, 3]), SamplingParams(**params), seed=0)
    group = sequences(
        request, b"client", 0, now, max_model_len=100, share_prefixes=True, tenant=Account(b"client")
    )
    metrics.submitted(group)
    return group


def token(sequence: Sequence, gap: float, token_ids: tuple[int, ...] = (1,)) -> tuple[Sequence, TokenDelta]:
    """What a step that ended `gap` seconds after the sequence's last token gave it."""
    sequence.token_gap = gap
    sequence.token_ids += token_ids
    return sequence, TokenDelta(1, sequence.index, list(token_ids))


def sums(*distributions: Distribution) -> list[tuple[int, float]]:
    """(count, sum) of each."""
    return [(values["count"], values["sum"]) for values in (each.values() for each in distributions)]


def test_a_step_adds_its_tokens_in_one_piece() -> None:
    metrics = Metrics(1000)
    group = [submit(metrics)[0] for _ in range(8)]
    gaps = [0.0, *[0.02] * 5, 0.3, 0.02]
    sizes = [1] * 6 + [3, 0]
    outcomes = [token(s, gap, (1,) * size) for s, gap, size in zip(group, gaps, sizes, strict=True)]
    others = [outcomes[0], *outcomes[4:]]
    metrics.step(StepOutcomes(group[1:4], [1] * 3, others), 40, 5000, now=8.0)
    assert sums(metrics.first_token) == [(1, 1.0)]
    between = metrics.between_tokens.values()
    assert (between["count"], between["sum"]) == (8, pytest.approx(1.0))
    assert (between["buckets"]["0.01"], between["buckets"]["0.025"]) == (0, 5)
    assert sums(metrics.step_tokens) == [(1, 49)]  # 40 tokens of prompts, and 9 were generated
    assert metrics.step_seconds.values()["sum"] == 0.005
    assert sums(metrics.stream_gaps) == [(1, pytest.approx(0.9))]  # three tokens that came together
    metrics.step(StepOutcomes(others=[token(group[0], 0.0)]), 3, 1000, now=9.0)  # a first token follows none
    assert sums(metrics.stream_gaps) == [(1, pytest.approx(0.9))]


def test_steps_that_were_launched_together_count_each() -> None:
    metrics = Metrics(1000)
    group = [submit(metrics)[0] for _ in range(2)]
    outcomes = StepOutcomes(others=[token(sequence, 0.001, (1, 2, 3, 4)) for sequence in group])
    metrics.step(outcomes, 0, 4000, 8.0, num_steps=4)
    assert sums(metrics.step_seconds) == [(4, pytest.approx(0.004))]
    assert sums(metrics.step_tokens) == [(4, 8)]
    assert sums(metrics.between_tokens) == [(8, pytest.approx(0.008))]


def test_a_request_counts_once_whatever_its_n() -> None:
    metrics = Metrics(1000)
    first, second, third = submit(metrics, n=3, max_tokens=9)
    first.scheduled_time, second.scheduled_time = 9.0, 8.0
    metrics.step(StepOutcomes(others=[token(second, 0.0)]), 3, 0, now=10.0)
    metrics.step(StepOutcomes(others=[token(first, 0.0), token(second, 2.0)]), 3, 0, now=12.0)
    first.first_token_time, second.first_token_time = 12.0, 10.0
    metrics.ended(second, "length", now=14.0)
    assert metrics.num_open == 1 and sum(metrics.num_finished.values()) == 0
    metrics.ended(first, "stop", now=15.0)
    metrics.ended(third, "stop", now=16.0)
    assert metrics.num_open == 0 and metrics.num_finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert sums(metrics.first_token, metrics.whole) == [(1, 3.0), (1, 9.0)]
    assert sums(metrics.queued, metrics.prefill, metrics.decode) == [(1, 1.0), (1, 2.0), (1, 6.0)]
    assert sums(metrics.inference) == [(1, 8.0)]
    assert sums(metrics.prompt_tokens, metrics.output_tokens) == [(1, 3), (1, 3)]
    assert sums(metrics.params_n, metrics.params_best_of, metrics.params_max_tokens) == [
        (1, 3),
        (1, 3),
        (1, 9),
    ]
    assert sums(metrics.between_tokens, metrics.per_token) == [(1, 2.0), (1, 4.0)]  # of single sequences


@pytest.mark.parametrize(
    ("reasons", "counted"),
    [
        (("stop", "stop"), "stop"),
        (("length", "stop"), "length"),
        (("length", "abort"), "abort"),
        (("error", "abort"), "error"),
    ],
)
def test_the_reason_of_a_request(reasons: tuple[str, str], counted: str) -> None:
    metrics = Metrics(1000)
    for sequence, reason in zip(submit(metrics, n=2), reasons, strict=True):
        metrics.ended(sequence, reason, now=8.0)
    assert [reason for reason, number in metrics.num_finished.items() if number] == [counted]


def test_a_request_without_a_token_has_no_phases() -> None:
    metrics = Metrics(1000)
    (sequence,) = submit(metrics)
    metrics.ended(sequence, "abort", now=9.0)
    assert sums(metrics.whole, metrics.prompt_tokens, metrics.output_tokens) == [(1, 2.0), (1, 3), (1, 0)]
    assert sums(metrics.queued, metrics.prefill, metrics.decode, metrics.inference) == [(0, 0.0)] * 4


def test_running_and_waiting_are_requests() -> None:
    metrics = Metrics(1000)
    running, waiting = submit(metrics, n=4), submit(metrics, n=2)
    for number, group in enumerate((running, waiting)):
        for sequence in group:
            sequence.request = msgspec.structs.replace(sequence.request, key=number)
    core: Any = SimpleNamespace(metrics=metrics, scheduler=SimpleNamespace(running=running[:3]))
    assert num_requests(core) == (1, 1)
    for sequence in waiting:
        metrics.ended(sequence, "abort", now=8.0)
    assert num_requests(core) == (1, 0)


def test_best_of_is_not_n() -> None:
    metrics = Metrics(1000)
    submit(metrics, n=5, num_returned=2)
    assert sums(metrics.params_n, metrics.params_best_of) == [(1, 2), (1, 5)]


def test_rates_are_of_the_last_interval() -> None:
    rates, stats, drafts = Rates(), SchedulerStats(), SpeculationStats()
    rates.update(stats, drafts, 100.0)
    stats.num_prompt_tokens, stats.num_output_tokens = 50, 20
    rates.update(stats, drafts, 110.0)
    assert (rates.prompt, rates.output) == (5.0, 2.0)
    rates.update(stats, drafts, 112.0)
    assert (rates.prompt, rates.output) == (0.0, 0.0)


def test_bounds_for_lengths() -> None:
    assert one_two_five(1) == [1]
    assert one_two_five(300) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert one_two_five(500)[-1] == 500
