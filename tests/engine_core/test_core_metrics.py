"""The metrics of a whole core: what they count for work that is known."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagewire.engine_core.metrics.metrics import PreemptionWarnings
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Submit
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request
from tests.engine_core.conftest import RawFrontend
from tests.engine_core.fake_worker import FAIL


def metrics_of(frontend: RawFrontend) -> dict[str, Any]:
    """Values and histograms by name; counters by finish reason are summed up in a dict."""
    metrics: dict[str, Any] = {}
    for row in frontend.call("metrics").result:
        if "finished_reason" in row["labels"]:
            reasons = metrics.setdefault(row["name"], {})
            reasons[row["labels"]["finished_reason"]] = row["value"]
        else:
            metrics[row["name"]] = row if row["type"] == "histogram" else row["value"]
    return metrics


@pytest.fixture
def frontend(start_core: Callable) -> RawFrontend:
    frontend: RawFrontend = start_core().frontend()
    frontend.attach()
    return frontend


def test_a_request_for_several_sequences_counts_once(frontend: RawFrontend) -> None:
    frontend.submit(1, [1, 2, 3], n=3, max_tokens=5, ignore_eos=True)
    frontend.finish((1, 0), (1, 1), (1, 2))
    metrics = metrics_of(frontend)
    assert metrics["vllm:request_success_total"] == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds"):
        assert metrics[f"vllm:{name}"]["count"] == 1, name
    names = ("request_prompt_tokens", "request_generation_tokens", "request_params_n")
    assert [(metrics[f"vllm:{name}"]["count"], metrics[f"vllm:{name}"]["sum"]) for name in names] == [
        (1, 3),
        (1, 15),
        (1, 3),
    ]
    assert metrics["vllm:inter_token_latency_seconds"]["count"] == 12
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0


def test_requests_that_wait_are_counted_and_those_without_a_token_when_they_end(
    frontend: RawFrontend,
) -> None:
    assert frontend.call("pause").error is None
    frontend.submit(1, [1, 2], n=4)
    frontend.submit(2, [1, 2])
    assert metrics_of(frontend)["vllm:num_requests_waiting"] == 2
    assert frontend.call("abort_request", "r1").result == 4
    metrics = metrics_of(frontend)
    assert metrics["vllm:num_requests_waiting"] == 1
    assert metrics["vllm:request_success_total"]["abort"] == 1
    assert metrics["vllm:e2e_request_latency_seconds"]["count"] == 1
    assert metrics["vllm:request_prefill_time_seconds"]["count"] == 0


def test_a_request_of_which_a_sequence_failed_has_failed(frontend: RawFrontend) -> None:
    frontend.submit(1, [1, FAIL])
    frontend.finish((1, 0))
    assert metrics_of(frontend)["vllm:request_success_total"] == {
        "stop": 0,
        "length": 0,
        "abort": 0,
        "error": 1,
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_the_tokens_of_steps_are_prompt_tokens_and_generated_ones(
    start_core: Callable, overlap: bool
) -> None:
    frontend = start_core(async_scheduling=overlap, max_num_batched_tokens=4).frontend()
    frontend.attach()
    frontend.submit(
        1, list(range(10)), max_tokens=6, ignore_eos=True
    )  # three chunks, the last one gives a token
    frontend.finish((1, 0))
    tokens = metrics_of(frontend)["vllm:iteration_tokens_total"]
    assert (tokens["count"], tokens["sum"]) == (3 + 5, 10 + 6)


def test_a_token_behind_the_end_does_not_count(frontend: RawFrontend) -> None:
    frontend.submit(1, [1, 2, 3], max_tokens=9)
    frontend.finish((1, 0))
    third = frontend.outputs[1, 0][2]
    before = metrics_of(frontend)["vllm:iteration_tokens_total"]["sum"]
    frontend.submit(2, [1, 2, 3], max_tokens=9, stop_token_ids=[third])
    frontend.finish((2, 0))  # the next step was in flight by then
    assert frontend.outputs[2, 0] == frontend.outputs[1, 0][:3]
    frontend.submit(3, [7], max_tokens=1)
    frontend.finish((3, 0))  # that step has returned
    after = metrics_of(frontend)["vllm:iteration_tokens_total"]["sum"]
    assert after - before == (3 + 3) + (1 + 1)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "label"), [("auto", "float32"), ("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")]
)
def test_the_label_of_the_cache_names_its_type(start_core: Callable, kv_cache_dtype: str, label: str) -> None:
    frontend = start_core(kv_cache_dtype=kv_cache_dtype).frontend()
    frontend.attach()
    (row,) = (row for row in frontend.call("metrics").result if row["name"] == "vllm:cache_config_info")
    assert row["labels"]["cache_dtype"] == label


def test_every_core_has_a_label_of_its_own(start_core: Callable) -> None:
    engines = []
    for _ in range(2):
        core = start_core()
        labels = []
        for name in ("a", "b"):
            frontend = core.frontend(name)
            frontend.attach()
            labels.append({row["labels"]["engine"] for row in frontend.call("metrics").result})
        assert labels[0] == labels[1] and len(labels[0]) == 1
        engines += labels[0]
    assert len(set(engines)) == 2


def test_latencies_count_from_the_arrival_of_a_request(frontend: RawFrontend) -> None:
    frontend.say(Submit([Request(1, "r", Prompt([1]), SamplingParams(max_tokens=2), 7, age=1000.0)]))
    frontend.finish((1, 0))
    timing = frontend.ends[1, 0].timing
    assert timing is not None and timing.scheduled - timing.arrived >= 1000
    metrics = metrics_of(frontend)
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
        assert 1000 <= metrics[f"vllm:{name}_seconds"]["sum"] < 1100, name
    assert metrics["vllm:request_inference_time_seconds"]["sum"] < 100


def test_preemptions_are_in_the_log(start_core: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """With the advice what to raise, and their count in the periodic line."""
    caplog.set_level(logging.INFO, "pagewire.core")
    options = {"disable_log_stats": False, "log_stats_interval": 0.1}
    frontend = start_core(["--num-blocks", "12"], **options).frontend()
    frontend.attach()
    places = [(key, 0) for key in range(1, 5)]
    for key, _ in places:
        frontend.submit(key, [key] * 20, max_tokens=60, ignore_eos=True)
    frontend.finish(*places)
    count = frontend.status()["num_preemptions"]
    assert count > 0
    while not any(f"Preemptions: {count}" in record.getMessage() for record in caplog.records):
        frontend.submit(9, [1], max_tokens=1)
        frontend.finish((9, 0))
        del frontend.ends[9, 0]
    (warning,) = (
        record for record in caplog.records if "preemptions for lack of KV cache" in record.getMessage()
    )
    assert warning.levelno == logging.WARNING and "--gpu-memory-utilization" in warning.getMessage()


def test_preemptions_are_warned_of_once_a_minute() -> None:
    warnings = PreemptionWarnings()
    assert warnings.text(0, 5.0) is None
    assert "2 preemptions" in str(warnings.text(2, 10.0))
    assert warnings.text(2, 500.0) is None and "1 preemptions" in str(warnings.text(3, 500.0))
    assert warnings.text(9, 559.0) is None
    assert "6 preemptions for lack of KV cache (9 since the start)" in str(warnings.text(9, 560.0))


def test_workers_are_not_ready_while_one_starts(
    start_core: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> tuple[float, float]:
        metrics = metrics_of(frontend)
        return metrics["pagewire:worker_restarts_total"], metrics["pagewire:workers_ready"]

    monkeypatch.setenv("HANG_WHILE_STARTING", str(tmp_path / "hang"))
    frontend = start_core().frontend()
    frontend.attach()
    assert state() == (0, 1)
    (tmp_path / "hang").touch()
    frontend.kill_worker()
    frontend.wait_for_start(2)
    assert state() == (1, 0)
    (tmp_path / "hang").unlink()
    frontend.kill_worker()
    while state() != (2, 1):
        pass


@pytest.mark.parametrize("age", [-1.0, math.nan, math.inf, 1e300])
def test_a_request_of_an_age_that_none_has_is_refused(frontend: RawFrontend, age: float) -> None:
    frontend.say(Submit([Request(1, "r", Prompt([1]), SamplingParams(), 7, age=age)]))
    frontend.finish((1, 0))
    assert frontend.ends[1, 0].error_type == "ValueError"
    assert (frontend.ends[1, 0].error or "").startswith("age must be")
