"""The model of larger installations: its limits, and its circle of steps beside the formula for closed queues."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.loading import load

model = load("scale_model")
FREE = model.Network(0.0, float("inf"))
NO_COSTS = model.Costs(*[0.0] * 8)
# 8 KV heads, and nothing but reading, multiplying and exchanging takes time.
WORKER = model.Worker(1e12, 1e15, 1e12, step_seconds=0.0, layer_seconds=0.0)
LLAMA = model.MODELS["8b"]
WORK = model.Work()


def rate(network: Any = FREE, costs: Any = NO_COSTS, work: Any = WORK, **sizes: int) -> Any:
    return model.engine_rate(LLAMA, WORKER, network, costs, work, **sizes)


# ---------------------------------------------------------------- the circle of a step


@given(
    seconds=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6),
    delay=st.floats(0.0, 10.0),
    depth=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_the_slowest_station_or_the_time_around_decides(
    seconds: list[float], delay: float, depth: int
) -> None:
    stations = [model.Station(f"{number}", each) for number, each in enumerate(seconds)]
    stations.insert(1, model.Station("delay", delay, shared=False))
    expected = max(max(seconds), (sum(seconds) + delay) / depth)
    assert model.period(stations, depth) == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------- an engine


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_network_and_other_costs_ranks_scale_linearly(ranks: int) -> None:
    assert rate(ranks=ranks).tokens == pytest.approx(ranks * rate().tokens)
    assert rate(ranks=ranks).limit.startswith("workers: ")


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_scale_linearly_where_work_fills_them(stages: int) -> None:
    many = replace(
        WORK, rows=100_000
    )  # products, not reading, take the time, also with a stage's share of the rows
    assert rate(work=many, stages=stages).tokens == pytest.approx(stages * rate(work=many).tokens)


def test_a_saturated_core_bounds_any_number_of_ranks() -> None:
    costs = replace(NO_COSTS, core_step=1e-3, core_row=1e-3)
    for ranks in model.SIZES:
        assert rate(costs=costs, ranks=ranks).tokens == pytest.approx(256 / (1e-3 + 256 * 1e-3))
        assert rate(costs=costs, ranks=ranks).limit == "core"
    slower = replace(costs, core_rank_row=1e-3)
    assert rate(costs=slower, ranks=8).tokens == pytest.approx(256 / (1e-3 + 256 * 8e-3))


def test_the_core_costs_nothing_beside_slower_workers() -> None:
    step = 256 / rate().tokens
    assert rate(costs=replace(NO_COSTS, core_step=0.9 * step)).tokens == pytest.approx(rate().tokens)


def test_requests_cost_the_more_the_shorter_their_answers_are() -> None:
    costs = replace(NO_COSTS, core_request=1.0)
    long, short = (rate(costs=costs, work=replace(WORK, answer=answer)).tokens for answer in (1000, 10))
    assert long == pytest.approx(1000) and short == pytest.approx(10)


def test_a_socket_is_saturated_by_its_messages() -> None:
    slow = rate(costs=replace(NO_COSTS, socket_message=1.0), ranks=4)
    assert slow.tokens == pytest.approx(256 / 8) and slow.limit == "socket"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_more_bandwidth_or_less_latency_never_costs_tokens(ranks: int) -> None:
    by_bandwidth = [rate(model.Network(1e-5, 10.0**power), ranks=ranks).tokens for power in range(6, 14)]
    assert by_bandwidth == sorted(by_bandwidth) and by_bandwidth[0] < by_bandwidth[-1]
    by_latency = [rate(model.Network(10.0**-power, 1e10), ranks=ranks).tokens for power in range(1, 8)]
    assert by_latency == sorted(by_latency) and by_latency[0] < by_latency[-1]
    assert rate(model.Network(1.0, 1e10), ranks=ranks).limit == "workers: network"


def test_a_step_has_two_sums_for_each_layer_one_for_the_embedding_and_gathers_logits() -> None:
    network = model.Network(1.0, float("inf"))
    parts = model.stage_parts(LLAMA, WORKER, network, WORK, ranks=2, rows=1)
    assert parts["network"] == pytest.approx(2 * LLAMA.num_layers + 1 + 1)


def test_large_sums_are_exchanged_twice_in_shares() -> None:
    network = model.Network(0.5, 1.0)
    assert network.sum_seconds(100, 1) == 0.0
    assert network.sum_seconds(100, 8) == 0.5 + 7 * 100
    assert network.sum_seconds(80_000, 2) == 0.5 + 80_000
    assert network.sum_seconds(80_000, 8) == 2 * (0.5 + 7 * 10_000)


def test_keys_and_values_are_not_divided_beyond_their_heads() -> None:
    few = replace(LLAMA, num_kv_heads=2)
    parts = [model.stage_parts(few, WORKER, FREE, WORK, ranks=ranks, rows=256) for ranks in (2, 8)]
    assert parts[0]["keys and values"] == parts[1]["keys and values"]
    assert parts[1]["weights"] == pytest.approx(parts[0]["weights"] / 4)


def test_rows_are_read_for_nothing_until_products_take_longer() -> None:
    work = replace(WORK, context=0)
    one, some, many = (rate(work=replace(work, rows=rows)) for rows in (1, 100, 100_000))
    assert some.tokens == pytest.approx(100 * one.tokens) and some.limit == "workers: weights"
    weights = LLAMA.num_layers * LLAMA.layer_weights + LLAMA.hidden_size * LLAMA.vocab_size
    assert (
        many.tokens == pytest.approx(WORKER.flop_rate / (2 * weights)) and many.limit == "workers: products"
    )


# ---------------------------------------------------------------- several engines


def test_cores_scale_linearly_until_a_router_is_saturated() -> None:
    engine = model.Rate(1000.0, "workers: weights", {"core": 0.5})
    table = [model.installation_rate(engine, cores, 1, 1 / 8000) for cores in model.CORES]
    assert [each.tokens for each in table] == [1000, 2000, 4000, 8000, 8000, 8000, 8000]
    assert [each.limit for each in table[:5]] == ["workers: weights"] * 4 + ["router"]
    assert [each.busy["router"] for each in table[:5]] == [0.125, 0.25, 0.5, 1.0, 1.0]
    assert [each.busy["core"] for each in table[3:5]] == [0.5, 0.25]
    assert model.installation_rate(engine, 64, 8, 1 / 8000).tokens == 64_000


# ---------------------------------------------------------------- the measured costs


def test_the_kept_costs_make_all_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = json.loads(model.newest_costs().read_text(encoding="utf-8"))
    assert all(seconds >= 0.0 for seconds in measured["costs"].values())
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["scale_model", "--model", str(tmp_path)])
    model.main()
    printed = capsys.readouterr().out
    assert measured["processor"] in printed
    for name in ("TP 8", "PP 4", "64 core(s)", "PP 3", "router without HTTP"):
        assert name in printed


def test_costs_that_were_never_measured_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match="scale_costs"):
        model.newest_costs()
