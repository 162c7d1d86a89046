"""What the engine measures: every name, label and bucket, and counts that agree with work that is known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from pagewire import LLM, SamplingParams
from pagewire.frontend.server.operate.metrics import exposition
from pagewire.ipc.wire.params import StructuredOutputsParams

# Bounds that dashboards may ask for; ours may be finer, and go further.
FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5]
WHOLE = [1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60]
REQUEST = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60]
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
SEQUENCES = [1, 2, 5, 10, 20]
STEP_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]

GAUGES: dict[str, set[str]] = {
    "pagewire:retained_prefixes": set(),
    "pagewire:retained_blocks": {"kind"},
    "vllm:num_requests_running": set(),
    "vllm:num_requests_waiting": set(),
    "vllm:num_requests_swapped": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:gpu_cache_usage_perc": set(),
    "vllm:cpu_cache_usage_perc": set(),
    "vllm:gpu_prefix_cache_hit_rate": set(),
    "vllm:cpu_prefix_cache_hit_rate": set(),
    "vllm:avg_prompt_throughput_toks_per_s": set(),
    "vllm:avg_generation_throughput_toks_per_s": set(),
    "vllm:spec_decode_draft_acceptance_rate": set(),
    "vllm:spec_decode_efficiency": set(),
    "vllm:cache_config_info": {
        *("block_size", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching"),
        *("cache_dtype", "device"),
    },
    "pagewire:frontends": set(),
    "pagewire:frontend_requests": {"frontend", "pid", "number", "phase"},
    "pagewire:paused": set(),
    "pagewire:asleep": set(),
    "pagewire:sleep_level": set(),
    "pagewire:workers_ready": set(),
    "pagewire:grammars_cached": set(),
}
COUNTERS: dict[str, set[str]] = {
    "vllm:num_preemptions_total": set(),
    "vllm:prompt_tokens_total": set(),
    "vllm:generation_tokens_total": set(),
    "vllm:prefix_cache_queries_total": set(),
    "vllm:prefix_cache_hits_total": set(),
    "vllm:spec_decode_num_accepted_tokens_total": set(),
    "vllm:spec_decode_num_drafts_total": set(),
    "vllm:spec_decode_num_draft_tokens_total": set(),
    "vllm:spec_decode_num_emitted_tokens_total": set(),
    "vllm:request_success_total": {"finished_reason"},
    "pagewire:requests_refused_total": {"reason"},
    "pagewire:grammar_queries_total": set(),
    "pagewire:grammar_hits_total": set(),
    "pagewire:worker_restarts_total": set(),
    "pagewire:worker_wakes_total": set(),
    "pagewire:worker_busy_seconds_total": set(),
    "pagewire:worker_idle_seconds_total": set(),
    "pagewire:worker_steps_total": {"way"},
    "pagewire:steps_over_limit_total": set(),
    "pagewire:retentions_refused_total": set(),
}
HISTOGRAMS: dict[str, list[float]] = {
    "vllm:time_to_first_token_seconds": FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": PER_TOKEN,
    "vllm:time_per_output_token_seconds": PER_TOKEN,
    "vllm:request_time_per_output_token_seconds": PER_TOKEN,
    "vllm:e2e_request_latency_seconds": WHOLE,
    "vllm:request_queue_time_seconds": REQUEST,
    "vllm:time_in_queue_requests": REQUEST,
    "vllm:request_inference_time_seconds": REQUEST,
    "vllm:request_prefill_time_seconds": REQUEST,
    "vllm:request_decode_time_seconds": REQUEST,
    "vllm:request_prompt_tokens": LENGTHS,
    "vllm:request_generation_tokens": LENGTHS,
    "vllm:request_params_n": SEQUENCES,
    "vllm:request_params_best_of": SEQUENCES,
    "vllm:request_params_max_tokens": LENGTHS,
    "vllm:iteration_tokens_total": STEP_TOKENS,
    "pagewire:worker_step_seconds": [0.001, 0.01, 0.1, 1],
    "pagewire:grammar_time_seconds": REQUEST,
    "pagewire:stream_gap_seconds": PER_TOKEN,
    "pagewire:core_turn_seconds": [0.001, 0.01, 0.1, 1],
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine of our own, so that we know all that it ever did."""
    with LLM("demo", dtype="float32", kv_cache_memory_bytes=64 << 20, log_stats_interval=0.5) as engine:
        yield engine


def snapshot(llm: LLM) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = llm.llm_engine.session.call("metrics").result(30)
    return result


def families(llm: LLM) -> dict[str, Metric]:
    by_name: dict[str, Metric] = {}
    for family in text_string_to_metric_families(exposition(snapshot(llm)).decode()):
        assert family.name not in by_name
        by_name[family.name] = family
    return by_name


def value(by_name: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample of this name that has these labels."""
    (sample,) = (
        sample
        for family in by_name.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
    return sample.value


def test_every_name_label_and_bucket(llm: LLM) -> None:
    by_name = families(llm)
    counters = {name.removesuffix("_total"): labels for name, labels in COUNTERS.items()}
    assert {(name, family.type) for name, family in by_name.items()} == {
        *((name, "gauge") for name in GAUGES),
        *((name, "counter") for name in counters),
        *((name, "histogram") for name in HISTOGRAMS),
    }
    for name, labels in {**GAUGES, **counters}.items():
        assert by_name[name].documentation.endswith(".")
        assert by_name[name].samples, name
        for sample in by_name[name].samples:
            assert sample.name == name + "_total" * (name in counters)
            assert set(sample.labels) == labels | {"model_name", "engine"}
            assert sample.labels["model_name"] == "demo"
    for name, bounds in HISTOGRAMS.items():
        samples = by_name[name].samples
        upper_bounds = [float(sample.labels["le"]) for sample in samples if sample.name == f"{name}_bucket"]
        assert upper_bounds == sorted(set(upper_bounds)) and upper_bounds[-1] == float("inf")
        assert set(bounds) <= set(upper_bounds), name
        assert {sample.name for sample in samples} == {
            f"{name}_{part}" for part in ("bucket", "count", "sum")
        }
        assert all(sample.labels.keys() <= {"model_name", "engine", "le"} for sample in samples)


def test_counts_agree_with_the_work(llm: LLM) -> None:
    before = families(llm)
    prompt = [7] * 40
    params = SamplingParams(max_tokens=10, ignore_eos=True, n=2, temperature=1.0, seed=1)
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    stopped = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0, stop=["e"])
    (output,) = llm.generate(["The with statement is"], stopped, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop" and output.prompt_token_ids is not None
    after = families(llm)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    long, short = len(prompt), len(output.prompt_token_ids)
    assert grown("vllm:request_success_total", finished_reason="length") == 1
    assert grown("vllm:request_success_total", finished_reason="stop") == 1
    assert grown("vllm:request_success_total", finished_reason="abort") == 0
    # The second sequence finds two whole blocks of the first; a last token is always computed anew.
    assert grown("vllm:prefix_cache_queries_total") == 2 * long + short
    assert grown("vllm:prefix_cache_hits_total") == 32
    assert grown("vllm:prompt_tokens_total") == 2 * long - 32 + short
    tokens = grown("vllm:generation_tokens_total")
    # The core generates on until it learns of the stop string, a few tokens later.
    assert 20 + len(output.outputs[0].token_ids) <= tokens <= 20 + 30
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"vllm:{name}_count") == 2
    assert grown("vllm:inter_token_latency_seconds_count") == tokens - 3
    assert grown("vllm:request_generation_tokens_sum") == tokens
    assert grown("vllm:request_generation_tokens_bucket", le="5.0") == (tokens - 20 <= 5)
    assert grown("vllm:request_prompt_tokens_sum") == long + short
    assert (grown("vllm:request_params_n_count"), grown("vllm:request_params_n_sum")) == (2, 3)
    assert grown("vllm:request_params_max_tokens_sum") == 40
    assert grown("vllm:iteration_tokens_total_sum") == 2 * long - 32 + short + tokens
    assert grown("vllm:iteration_tokens_total_count") == grown("pagewire:worker_step_seconds_count")
    assert grown("pagewire:worker_busy_seconds_total") == pytest.approx(
        grown("pagewire:worker_step_seconds_sum")
    )
    assert 0 < grown("vllm:e2e_request_latency_seconds_sum") < 60
    parts = [grown(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(grown("vllm:e2e_request_latency_seconds_sum"))
    assert value(after, "vllm:num_requests_running") == value(after, "vllm:kv_cache_usage_perc") == 0
    assert value(after, "pagewire:frontends") == 1
    assert value(after, "pagewire:paused") == value(after, "pagewire:asleep") == 0


def test_grammars_are_counted(llm: LLM) -> None:
    before = families(llm)
    choice = StructuredOutputsParams(choice=["with", "without"])
    params = SamplingParams(max_tokens=10, structured_outputs=choice, n=2)
    for _ in range(2):
        llm.generate("x", params, use_tqdm=False)
    after = families(llm)
    names = ("grammar_queries_total", "grammar_hits_total", "grammars_cached", "grammar_time_seconds_count")
    grown = [value(after, f"pagewire:{name}") - value(before, f"pagewire:{name}") for name in names]
    assert grown == [2, 1, 1, 2]


def test_every_frontend_gets_the_same_metrics(llm: LLM) -> None:
    address = llm.llm_engine.session._spawned.address  # type: ignore[union-attr]
    with LLM.attach(address) as other:
        other.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
        ours, theirs = families(llm), families(other)
        for name in (*COUNTERS, "vllm:request_generation_tokens_count"):
            if not name.startswith("pagewire:worker") and not COUNTERS.get(name):
                assert value(ours, name) == value(theirs, name), name
        assert value(ours, "pagewire:frontends") == 2
        phases = ours["pagewire:frontend_requests"].samples
        assert {sample.labels["frontend"] for sample in phases} == {"owner", "attached"}
        assert len(phases) == 6 and not any(sample.value for sample in phases)


def test_the_dashboard_queries_metrics_that_exist() -> None:
    text = (
        resources.files("pagewire.frontend.server.operate")
        .joinpath("grafana.json")
        .read_text(encoding="utf-8")
    )
    panels = json.loads(text)["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    known = {*GAUGES, *COUNTERS} | {
        f"{name}_{end}" for name in HISTOGRAMS for end in ("bucket", "sum", "count")
    }
    names = {name for query in queries for name in re.findall(r"\b(?:vllm|pagewire):\w+", query)}
    assert len(queries) > 15 and all(re.search(r"(vllm|pagewire):", query) for query in queries)
    assert names <= known, names - known
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_dashboard_counts_a_core_once_however_many_servers_report_it() -> None:
    path = resources.files("pagewire.frontend.server.operate").joinpath("grafana.json")
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    by_engine = r"\(max by \(engine[a-z_, ]*\) \((?:rate\(|increase\()?(?:vllm|pagewire):"
    num_sums = 0
    for query in queries:
        names, sums = (re.findall(pattern, query) for pattern in (r"\b(?:vllm|pagewire):", r"\bsum\b"))
        num_sums += len(sums)
        if sums:
            assert (
                len(names) == len(sums) == len(re.findall(r"\bsum(?: by \([a-z_, ]+\) )?" + by_engine, query))
            )
    assert num_sums > 50
