"""Pausing and sleeping: what counts as asleep, and what becomes of it when workers die or refuse meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.engine_core.conftest import RawFrontend, RunningCore
from tests.engine_core.test_core import roll_out


def attached(core: RunningCore) -> RawFrontend:
    frontend = core.frontend()
    frontend.attach()
    return frontend


def asleep(frontend: RawFrontend) -> list[list[str]]:
    """What each worker says it has given back."""
    result: list[list[str]] = frontend.call("collective_rpc", "asleep").result
    return result


def assert_runs(frontend: RawFrontend, key: int) -> None:
    frontend.submit(key, [key, 1])
    frontend.finish((key, 0))
    assert frontend.outputs[key, 0] == roll_out([key, 1], 8)


@pytest.mark.parametrize(
    ("level", "tags", "left"),
    [
        (1, [["weights"], ["kv_cache"]], [True, False]),
        (1, [["kv_cache"]], [False]),
        (2, [["weights"], ["kv_cache"]], [True, False]),
        (2, [["kv_cache"]], [False]),
        (2, [["weights"], ["weights"], None], [True, True, False]),
        (2, [["weights", "kv_cache"]], [False]),
        (1, [None], [False]),
    ],
)
def test_the_engine_sleeps_until_all_is_taken_again(
    start_core: Callable[..., RunningCore], level: int, tags: list[list[str] | None], left: list[bool]
) -> None:
    frontend = attached(start_core())
    assert frontend.call("sleep", level).error is None
    frontend.submit(1, [1, 1])
    for names, sleeping in zip(tags, left, strict=True):
        assert frontend.call("is_sleeping").result is True and (1, 0) not in frontend.ends
        assert frontend.call("wake_up", names).error is None
        assert frontend.call("is_sleeping").result is sleeping
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 1], 8) and asleep(frontend) == [[]]
    assert frontend.status()["worker_starts"] == level, "at level 2 the worker has ended"


def test_deeper_sleep_adds_to_the_lighter(start_core: Callable[..., RunningCore]) -> None:
    frontend = attached(start_core())
    assert frontend.call("sleep", 1, ["kv_cache"]).error is None
    assert asleep(frontend) == [["kv_cache"]]
    for tags in (None, ["kv_cache"]):
        assert frontend.call("sleep", 1, tags).error is None
    assert asleep(frontend) == [["kv_cache", "weights"]]
    assert frontend.call("wake_up", ["weights"]).error is None and asleep(frontend) == [["kv_cache"]]
    assert frontend.call("wake_up", ["kv_cache"]).error is None
    assert_runs(frontend, 1)


def test_sleeping_forgets_cached_prefixes(start_core: Callable[..., RunningCore]) -> None:
    frontend = attached(start_core())
    prompt = list(range(50))
    for key in (1, 2):
        frontend.submit(key, prompt)
        frontend.finish((key, 0))
        assert frontend.call("sleep").error is None and frontend.call("wake_up").error is None
        assert frontend.ends[key, 0].num_cached_tokens == 0


@pytest.mark.parametrize("tags", [["lunch"], []])
def test_what_cannot_be_given_back_is_refused(
    start_core: Callable[..., RunningCore], tags: list[str]
) -> None:
    frontend = attached(start_core())
    answer = frontend.call("sleep", 1, tags)
    assert answer.error_type == "ValueError" and "sleep: tags must name weights, kv_cache" in answer.error
    answer = frontend.call("sleep", 2, ["weights"])
    assert answer.error_type == "ValueError" and "level 2 ends the workers" in answer.error
    assert frontend.call("is_sleeping").result is False


@pytest.mark.parametrize("tags", [["lunch"], ["weights", "lunch"], []])
@pytest.mark.parametrize("sleep_first", [False, True])
def test_unknown_tags_are_refused(
    start_core: Callable[..., RunningCore], tags: list[str], sleep_first: bool
) -> None:
    frontend = attached(start_core())
    if sleep_first:
        assert frontend.call("sleep").error is None
    answer = frontend.call("wake_up", tags)
    assert answer.error_type == "ValueError" and "must name weights, kv_cache or both" in answer.error
    assert frontend.call("is_sleeping").result is sleep_first


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("sleep", "tags", "left"),
    [
        ([1, ["kv_cache"]], None, ["kv_cache"]),
        ([1], None, ["kv_cache", "weights"]),
        ([1], ["weights"], ["kv_cache"]),
        ([2], ["weights"], ["kv_cache"]),
    ],
)
def test_a_worker_that_dies_asleep_is_replaced_by_one_that_sleeps(
    start_core: Callable[..., RunningCore],
    sleep: list[object],
    tags: list[str] | None,
    left: list[str],
    num_workers: int,
) -> None:
    core = start_core(num_workers=num_workers)
    frontend = attached(core)
    assert frontend.call("sleep", *sleep).error is None
    if tags is not None:
        assert frontend.call("wake_up", tags).error is None
    starts = frontend.status()["worker_starts"]
    os.kill(core.workers.pids[-1], signal.SIGKILL)
    frontend.wait_for_start(starts + 1)
    assert asleep(frontend) == [left] * num_workers
    assert frontend.call("is_sleeping").result is True
    frontend.submit(1, [1, 1])
    assert frontend.call("wake_up").error is None
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 1], 8)
    assert frontend.status()["worker_starts"] == starts + 1
    assert frontend.status()["worker_restarts"] == 1


def test_the_engine_sleeps_only_once_the_worker_has_agreed(start_core: Callable[..., RunningCore]) -> None:
    core = start_core()
    frontend = attached(core)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.begin_call(7, "sleep")
    assert frontend.call("is_sleeping").result is False
    frontend.submit(1, [1, 1])
    assert frontend.status()["in_flight"] == 0, "a step is launched behind the call"
    os.kill(core.workers.pids[0], signal.SIGCONT)
    answer = frontend.answer()
    assert (answer.call_id, answer.error) == (7, None)
    assert frontend.call("is_sleeping").result is True
    assert frontend.call("wake_up").error is None
    frontend.finish((1, 0))
    assert frontend.status()["worker_starts"] == 1


@pytest.mark.parametrize("level", [1, 2])
def test_calls_overtake_each_other_nowhere(start_core: Callable[..., RunningCore], level: int) -> None:
    core = start_core()
    frontend = attached(core)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.begin_call(7, "sleep", level)
    frontend.begin_call(8, "wake_up")
    assert frontend.call("is_sleeping").result is False
    os.kill(core.workers.pids[0], signal.SIGCONT)
    assert [frontend.answer().call_id for _ in range(2)] == [7, 8]
    assert frontend.call("is_sleeping").result is False
    assert_runs(frontend, 1)
    assert frontend.status()["worker_starts"] == level


@pytest.mark.parametrize("rank", ["0", "1"])
def test_workers_that_cannot_sleep_are_replaced_awake(
    start_core: Callable[..., RunningCore], rank: str
) -> None:
    frontend = attached(start_core(num_workers=2, worker_options=["--fail", rank, "sleep"]))
    answer = frontend.call("sleep")
    assert (answer.error, answer.error_type) == (f"sleep failed in rank {rank}", "OSError")
    assert frontend.call("is_sleeping").result is False
    assert_runs(frontend, 1)
    assert frontend.status()["worker_starts"] == 2 and asleep(frontend) == [[], []]


def test_workers_that_cannot_wake_up_still_sleep(start_core: Callable[..., RunningCore]) -> None:
    frontend = attached(start_core(num_workers=2, worker_options=["--fail", "1", "wake_up"]))
    assert frontend.call("sleep").error is None
    assert frontend.call("wake_up").error == "wake_up failed in rank 1"
    assert frontend.call("is_sleeping").result is True


def test_sleep_of_a_worker_that_dies_is_an_error_and_the_engine_is_awake(
    start_core: Callable[..., RunningCore],
) -> None:
    core = start_core()
    frontend = attached(core)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.begin_call(7, "sleep")
    assert frontend.call("is_sleeping").result is False  # the call has reached the worker's socket
    os.kill(core.workers.pids[0], signal.SIGKILL)
    answer = frontend.answer()
    assert answer.call_id == 7 and answer.error_type == "RuntimeError" and "SIGKILL" in answer.error
    assert frontend.call("is_sleeping").result is False
    assert_runs(frontend, 1)


def test_a_call_while_the_worker_starts_again_is_answered_by_the_new_one(
    start_core: Callable[..., RunningCore],
) -> None:
    core = start_core()
    frontend = attached(core)
    os.kill(core.workers.pids[0], signal.SIGKILL)
    while frontend.status()["worker_ready"]:
        pass
    assert frontend.call("collective_rpc", "echo", [5]).result == [[5]]
    assert frontend.status()["worker_starts"] == 2


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
def test_the_core_cannot_be_bypassed(start_core: Callable[..., RunningCore], method: str) -> None:
    frontend = attached(start_core())
    answer = frontend.call("collective_rpc", method)
    assert answer.error_type == "ValueError" and f"call {method} itself" in answer.error
    assert_runs(frontend, 1)


def test_a_resume_ends_a_pause_that_waits(start_core: Callable[..., RunningCore]) -> None:
    core = start_core()
    frontend = attached(core)
    prompt = list(range(50))
    frontend.submit(1, prompt, max_tokens=70)
    frontend.take(frontend.hear())
    os.kill(core.workers.pids[0], signal.SIGSTOP)  # so that the request does not end
    frontend.begin_call(7, "pause", wait_for_inflight_requests=True)
    frontend.begin_call(8, "pause", wait_for_inflight_requests=True)
    assert frontend.call("is_paused").result is True
    frontend.begin_call(9, "resume")
    answers = [frontend.answer() for _ in range(3)]
    assert [(answer.call_id, answer.result, answer.error) for answer in answers] == [
        (7, False, None),
        (8, False, None),
        (9, None, None),
    ]
    os.kill(core.workers.pids[0], signal.SIGCONT)
    frontend.finish((1, 0))
    frontend.submit(2, prompt)
    frontend.finish((2, 0))
    assert frontend.ends[2, 0].num_cached_tokens == 48, "the pause that had ended forgot the prefix"
    assert frontend.call("pause", wait_for_inflight_requests=True).result is True
    frontend.submit(3, prompt)
    assert frontend.call("resume").error is None
    frontend.finish((3, 0))
    assert frontend.ends[3, 0].num_cached_tokens == 0
