"""Groups of worker processes: what all ranks get, what counts as their answer, and what ends them."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pagewire.engine_core.workers.group import merged
from pagewire.ipc.wire.messages import PROTOCOL, Hello, Refused
from pagewire.ipc.wire.worker_messages import Ready
from tests.engine_core.conftest import RawFrontend, RunningCore
from tests.engine_core.fake_worker import HANG
from tests.engine_core.test_core import roll_out
from tests.engine_core.test_core_grammar import folder  # noqa: F401 - a fixture

READY = Ready("Llama", "float32", "cuda:0", 1000, 128, 64, 512, 4096, 2, {"weights": 2.0}, {"used": 10})


def test_a_group_has_the_fewest_blocks_and_the_sum_of_the_memory() -> None:
    other = msgspec.structs.replace(
        READY,
        device="cuda:1",
        num_blocks=60,
        weight_bytes=4000,
        startup_seconds={"weights": 1.0, "kv": 3.0},
        memory={"used": 5},
    )
    other.num_states, other.bytes_per_state = 7, 5
    group = merged([READY, other])
    assert group == msgspec.structs.replace(
        READY,
        num_blocks=60,
        bytes_per_block=1024,
        num_states=7,
        bytes_per_state=5,
        weight_bytes=8096,
        startup_seconds={"weights": 2.0, "kv": 3.0},
        memory={"used": 15},
    )
    assert merged([READY]) == READY


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "bfloat16"}, "dtype is float32 in rank 0 and bfloat16 in rank 1"),
        ({"architecture": "Qwen"}, "architecture is Llama in rank 0 and Qwen in rank 1"),
        ({"vocab_size": 999}, "vocab_size is 1000 in rank 0 and 999 in rank 1"),
        ({"max_model_len": 64}, "max_model_len is 128"),
        ({"eos_token_id": None}, "eos_token_id is 2"),
        ({"device": "cpu"}, "the kind of device is cuda in rank 0 and cpu in rank 1"),
    ],
)
def test_ranks_that_disagree_are_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        merged([READY, msgspec.structs.replace(READY, **change)])


@pytest.fixture
def pair(start_core: Callable[..., RunningCore]) -> RunningCore:
    """A core with a group of two, where rank 1 follows rank 0."""
    return start_core(num_workers=2)


@pytest.fixture
def impatient_pair(start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch) -> RunningCore:
    """Such a core, for which a step that takes longer than a second is a hang."""
    monkeypatch.setenv("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", "1")
    return start_core(num_workers=2)


def attached(core: RunningCore) -> RawFrontend:
    frontend = core.frontend()
    frontend.attach()
    return frontend


def assert_both_sampled_the_same(frontend: RawFrontend) -> list[int]:
    first, second = frontend.call("collective_rpc", "sampled").result
    assert first == second and first
    return first  # type: ignore[no-any-return]


def test_every_rank_gets_every_plan_and_the_result_counts_once(pair: RunningCore) -> None:
    frontend = attached(pair)
    for key in range(8):
        frontend.submit(key, [key, 2, 3] * (key + 1), max_tokens=20)
    frontend.finish(*[(key, 0) for key in range(8)])
    for key in range(8):
        assert frontend.outputs[key, 0] == roll_out([key, 2, 3] * (key + 1), 20)
    assert len(assert_both_sampled_the_same(frontend)) >= 8 * 20


def test_every_rank_gets_the_masks(
    start_core: Callable[..., RunningCore],
    folder: Path,  # noqa: F811
) -> None:
    frontend = attached(start_core(num_workers=2, folder=folder))
    frontend.submit(1, [1, 2, 3], structured_outputs={"choice": ["700,800,"]}, max_tokens=40)
    frontend.submit(2, [1, 2, 3], max_tokens=12)
    frontend.finish((1, 0), (2, 0))
    assert frontend.ends[1, 0].finish_reason == "stop"
    assert frontend.outputs[2, 0] == roll_out([1, 2, 3], 12)
    assert set(frontend.outputs[1, 0]) <= set(assert_both_sampled_the_same(frontend))


def test_stages_get_the_tokens_that_the_last_one_samples(
    start_core: Callable[..., RunningCore],
    folder: Path,  # noqa: F811
) -> None:
    frontend = attached(start_core(pipeline_parallel_size=3, folder=folder))
    frontend.submit(1, [1, 2, 3], structured_outputs={"choice": ["700,800,"]}, max_tokens=40)
    for key in range(2, 8):
        frontend.submit(key, [key, 2, 3], max_tokens=12)
    frontend.finish(*[(key, 0) for key in range(1, 8)])
    for key in range(2, 8):
        assert frontend.outputs[key, 0] == roll_out([key, 2, 3], 12)
    known = Counter(token_id for tokens in frontend.outputs.values() for token_id in tokens[:-1])
    *others, last = frontend.call("collective_rpc", "sampled").result
    assert [Counter(sampled) for sampled in others] == [known] * 2
    assert Counter(last) == known + Counter(tokens[-1] for tokens in frontend.outputs.values())


def test_a_call_is_answered_with_the_result_of_each_rank(pair: RunningCore) -> None:
    frontend = attached(pair)
    assert frontend.call("collective_rpc", "echo", [1, "x"]).result == [[1, "x"], [1, "x"]]


def test_an_error_of_any_rank_is_the_answer(start_core: Callable[..., RunningCore]) -> None:
    frontend = attached(start_core(num_workers=2, worker_options=["--fail", "1", "echo"]))
    answer = frontend.call("collective_rpc", "echo")
    assert (answer.error, answer.error_type) == ("echo failed in rank 1", "OSError")


def run_until(frontend: RawFrontend, count: int) -> None:
    """Read until `count` more tokens have come."""
    goal = sum(map(len, frontend.outputs.values())) + count
    while sum(map(len, frontend.outputs.values())) < goal:
        frontend.take(frontend.hear())


def assert_replaced_without_a_change(core: RunningCore, rank: int, number: signal.Signals) -> None:
    """Send a signal to one rank while requests run: all ranks are replaced, and no stream changes."""
    frontend = attached(core)
    for key in range(6):
        frontend.submit(key, [key + 1] * 5, max_tokens=100)
    run_until(frontend, 20)
    before = core.workers.pids
    os.kill(before[rank], number)
    frontend.finish(*[(key, 0) for key in range(6)])
    for key in range(6):
        assert frontend.outputs[key, 0] == roll_out([key + 1] * 5, 100)
    frontend.wait_for_start(2)
    assert len(before) == 2 and not any(psutil.pid_exists(pid) for pid in before)
    assert_both_sampled_the_same(frontend)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_replaces_all(pair: RunningCore, rank: int) -> None:
    assert_replaced_without_a_change(pair, rank, signal.SIGKILL)
    assert pair.workers.num_starts == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_the_hang_of_a_rank_replaces_all(impatient_pair: RunningCore, rank: int) -> None:
    assert_replaced_without_a_change(impatient_pair, rank, signal.SIGSTOP)


def test_a_request_that_stops_a_group_ends_alone(impatient_pair: RunningCore) -> None:
    frontend = attached(impatient_pair)
    frontend.submit(1, [1, HANG])
    frontend.submit(2, [1, 2])
    frontend.finish((1, 0), (2, 0))
    assert "crashed" in (frontend.ends[1, 0].error or "")
    assert frontend.outputs[2, 0] == roll_out([1, 2], 8)


def test_a_group_has_the_blocks_that_every_rank_has(start_core: Callable[..., RunningCore]) -> None:
    core = start_core(num_workers=2, worker_options=["--rank-1", json.dumps({"num_blocks": 40})])
    assert core.frontend().attach().info.num_blocks == 40


def test_ranks_that_disagree_end_the_core_with_the_reason(start_core: Callable[..., RunningCore]) -> None:
    core = start_core(num_workers=2, worker_options=["--rank-1", json.dumps({"dtype": "bfloat16"})])
    frontend = core.frontend()
    frontend.say(Hello(PROTOCOL, "test", os.getpid()))
    refusal = frontend.hear()
    assert isinstance(refusal, Refused)
    assert "dtype is float32 in rank 0 and bfloat16 in rank 1" in refusal.error
    core.thread.join(20)
    assert "dtype is float32" in str(core.error) and core.workers.num_starts == 1
