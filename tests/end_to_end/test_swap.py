"""Swap space end to end: sixteen streams with half the blocks that they need get what they get with all of them."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.ipc.options.engine_args import EngineArgs

NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 100, 160
PROMPTS = [[Random(n).randrange(300, 2000) for _ in range(PROMPT_TOKENS)] for n in range(NUM_STREAMS)]
PARAMS = [
    SamplingParams(temperature=n % 2, seed=n, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
    for n in range(NUM_STREAMS)
]
NEEDED = NUM_STREAMS * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // 16)
HALF = {"num_gpu_blocks_override": NEEDED // 2}


def engine(**options: Any) -> LLM:
    return LLM("demo", device="cpu", dtype="float32", num_threads=1, max_model_len=512, **options)


def run(llm: LLM) -> list[Any]:
    """Tokens and log probabilities of all streams at once."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        [
            [(token, entry.logprob) for token, entry in place.items()]
            for place in output.outputs[0].logprobs or []
        ]
        for output in outputs
    ]


def figures(llm: LLM) -> dict[str, float]:
    """The metrics of preemption and of swap space."""
    figures = {}
    for row in llm.session.call("metrics").result():
        if row["name"] == "pagewire:swap_blocks_total":
            figures[row["labels"]["event"]] = row["value"]
        elif "value" in row:
            figures[row["name"].partition(":")[2]] = row["value"]
    return figures


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What an engine computes that has all blocks."""
    with engine(num_gpu_blocks_override=NEEDED + NUM_STREAMS) as llm:
        outputs = run(llm)
        told = figures(llm)
    assert told["num_preemptions_total"] == told["num_requests_swapped"] == told["cpu_cache_usage_perc"] == 0
    assert "swap_blocks" not in told
    return outputs


@pytest.mark.parametrize("mode", ["swap", "auto", "recompute"])
def test_no_bit_depends_on_preemption(expected: list[Any], mode: str) -> None:
    with engine(**HALF, swap_space=0.25, preemption_mode=mode) as llm:
        assert run(llm) == expected
        told = figures(llm)
        assert told["num_preemptions_total"] > 0 and told["out"] > 0
        assert told["num_requests_swapped"] == 0 < told["cpu_cache_usage_perc"] <= 1
        if mode == "swap":
            assert 0 < told["hit"] == told["back"] and told["swap_bytes_total"] > 0
        if mode == "recompute":
            assert told["hit"] == told["back"] == told["swap_bytes_total"] == 0
        assert (
            told["cpu_prefix_cache_hit_rate"] == 0
        )  # each prompt was looked up once, before any was preempted
        assert llm.reset_prefix_cache() and figures(llm)["swap_blocks"] == 0
        assert run(llm) == expected


def test_swap_space_and_disk_together(expected: list[Any], tmp_path: Any) -> None:
    with engine(**HALF, swap_space=0.25, preemption_mode="swap", kv_cache_dir=str(tmp_path)) as llm:
        assert run(llm) == expected
        told = figures(llm)
        assert told["hit"] > 0 and told["kv_tier_blocks"] > 0 and told["kv_tier_reads"] == 0


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_worker_of_a_group_swaps_its_part(name: str) -> None:
    with engine(num_gpu_blocks_override=NEEDED + NUM_STREAMS, **{name: 2}) as llm:
        expected = run(llm)
    with engine(**HALF, swap_space=0.25, preemption_mode="swap", **{name: 2}) as llm:
        assert run(llm) == expected
        assert figures(llm)["hit"] > 0


def test_a_worker_that_is_killed_takes_nothing_but_time(expected: list[Any]) -> None:
    """What was in its swap space is computed again."""
    with engine(**HALF, swap_space=0.25, preemption_mode="swap") as llm, ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, llm)
        swapped = 0.0
        while not swapped and not running.done():
            swapped = figures(llm)["num_requests_swapped"]
        assert swapped, "nothing was swapped"
        os.kill(llm.session.call("status").result()["worker_pid"], signal.SIGKILL)
        assert running.result() == expected
        assert run(llm) == expected


def test_sleep_forgets_what_was_swapped(expected: list[Any]) -> None:
    with engine(**HALF, swap_space=0.25, preemption_mode="swap") as llm:
        assert run(llm) == expected and figures(llm)["swap_blocks"] > 0
        llm.sleep()
        assert figures(llm)["swap_blocks"] == 0
        llm.wake_up()
        assert run(llm) == expected


def test_what_does_not_go_together_is_refused_by_name() -> None:
    for options, text in (
        ({"swap_space": -1.0}, "swap_space must be"),
        (
            {"preemption_mode": "swap", "swap_space": 0.0},
            "preemption_mode='swap' needs swap_space or kv_cache_dir",
        ),
        ({"preemption_mode": "sometimes"}, "preemption_mode"),
        (
            {"swap_space": 1.0, "speculative_model": "demo", "num_speculative_tokens": 2},
            "swap_space does not go with a model that proposes tokens: its own cache cannot be kept yet",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            EngineArgs.from_kwargs({"model": "demo", **options})
    tier = EngineArgs.from_kwargs({"model": "demo", "preemption_mode": "swap"}).resolved_tier()
    assert tier is not None and tier.swap_bytes == 4 << 30 and not tier.folder
    assert EngineArgs.from_kwargs({"model": "demo", "preemption_mode": "recompute"}).resolved_tier() is None
    with pytest.raises(
        ValueError, match="swap_space: blocks of pictures and sounds cannot be kept elsewhere yet"
    ):
        LLM("demo-vision", device="cpu", swap_space=0.25)
