"""Sleep at level 2: workers end, and are lost, fail or hang at each stage of their end and of their start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine_core.calls.test_control import asleep, assert_runs, attached
from tests.engine_core.conftest import RawFrontend, RunningCore
from tests.engine_core.test_core import roll_out

StartCore = Callable[..., RunningCore]
ASLEEP = {"alive": True, "ready": False, "reason": "the engine sleeps"}


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that stops workers at their start while it exists."""
    path = tmp_path / "hang"
    monkeypatch.setenv("HANG_WHILE_STARTING", str(path))
    yield path
    path.unlink(missing_ok=True)


def value(frontend: RawFrontend, name: str) -> float:
    """A metric of the core without labels."""
    (found,) = [row for row in frontend.call("metrics").result if row["name"] == name]
    return float(found["value"])


def put_to_sleep(core: RunningCore, frontend: RawFrontend) -> list[int]:
    """Let the engine sleep at level 2, and wait for the end of its workers; returns the ids that they had."""
    pids = core.workers.pids
    assert frontend.call("sleep", 2).error is None
    while frontend.status()["worker_pid"] is not None:
        pass
    return pids


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_workers_end_and_others_are_started(start_core: StartCore, num_workers: int) -> None:
    core = start_core(num_workers=num_workers)
    frontend = attached(core)
    assert_runs(frontend, 1)
    for round in (1, 2):
        pids = put_to_sleep(core, frontend)
        assert len(pids) == num_workers and not any(map(psutil.pid_exists, pids))
        state = frontend.status()
        assert (state["worker_ready"], state["sleeping"], state["sleep_level"]) == (False, True, 2)
        assert frontend.call("check_health").result == ASLEEP and value(frontend, "pagewire:sleep_level") == 2
        assert frontend.call("sleep", 2).error is None and frontend.call("sleep", 1).error is None
        frontend.submit(10 + round, [round, 1])
        assert frontend.call("wake_up").error is None
        frontend.finish((10 + round, 0))
        assert frontend.outputs[10 + round, 0] == roll_out([round, 1], 8)
        assert frontend.call("check_health").result["ready"] and value(frontend, "pagewire:sleep_level") == 0
        assert asleep(frontend) == [[]] * num_workers
        assert frontend.status()["worker_starts"] == 1 + round, "none was started ahead of a loss, or in vain"
        assert value(frontend, "pagewire:worker_wakes_total") == round
        assert value(frontend, "pagewire:worker_restarts_total") == 0


def test_calls_that_need_workers_are_refused(start_core: StartCore) -> None:
    core = start_core()
    frontend = attached(core)
    put_to_sleep(core, frontend)
    for method, *args in (
        ["collective_rpc", "echo", [5]],
        ["start_profile"],
        ["begin_weights", [["w", "F32", [4]]]],
    ):
        answer = frontend.call(method, *args)
        assert answer.error_type == "EngineAsleepError" and "wake_up comes first" in str(answer.error), answer
    assert frontend.call("wake_up").error is None
    assert frontend.call("collective_rpc", "echo", [5]).result == [[5]]


def test_calls_that_waited_for_the_worker_learn_that_it_has_ended(start_core: StartCore) -> None:
    core = start_core()
    frontend = attached(core)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.begin_call(7, "sleep", 2)
    frontend.begin_call(8, "sleep", 2)
    frontend.begin_call(9, "collective_rpc", "echo")
    assert frontend.call("is_sleeping").result is False  # all of them have come
    os.kill(core.workers.pids[0], signal.SIGCONT)
    answers = {answer.call_id: answer.error_type for answer in (frontend.answer() for _ in range(3))}
    assert answers == {7: None, 8: None, 9: "EngineAsleepError"}
    assert frontend.call("wake_up").error is None
    assert_runs(frontend, 1)


def test_requests_are_refused_if_so_ordered(start_core: StartCore) -> None:
    frontend = attached(start_core(while_asleep="refuse"))
    for key, level in ((1, 1), (2, 2)):
        assert frontend.call("sleep", level).error is None
        frontend.submit(key, [key, 1])
        frontend.finish((key, 0))
        assert frontend.ends[key, 0].error_type == "EngineAsleepError"
        assert frontend.call("wake_up").error is None
        assert_runs(frontend, 10 + key)


def test_a_worker_that_is_killed_as_it_ends_is_not_replaced(start_core: StartCore) -> None:
    core = start_core(num_workers=2)
    frontend = attached(core)
    os.kill(core.workers.pids[1], signal.SIGSTOP)
    frontend.begin_call(7, "sleep", 2)
    assert frontend.call("is_sleeping").result is False
    os.kill(core.workers.pids[1], signal.SIGKILL)
    answer = frontend.answer()
    assert answer.error_type == "RuntimeError" and "SIGKILL" in str(answer.error), "it had not agreed"
    assert_runs(frontend, 1)
    assert frontend.status()["worker_restarts"] == 1
    put_to_sleep(core, frontend)
    assert frontend.call("wake_up").error is None
    assert_runs(frontend, 2)
    assert frontend.status()["worker_restarts"] == 1


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_a_worker_that_is_killed_while_it_starts_leaves_the_engine_asleep(
    start_core: StartCore, hang: Path, tags: list[str] | None
) -> None:
    core = start_core()
    frontend = attached(core)
    put_to_sleep(core, frontend)
    frontend.submit(1, [1, 1])
    hang.touch()
    frontend.begin_call(7, "wake_up", tags)
    frontend.wait_for_start(2)
    assert frontend.call("check_health").result == ASLEEP
    hang.unlink()
    os.kill(core.workers.pids[0], signal.SIGKILL)
    answer = frontend.answer()
    assert answer.call_id == 7 and "SIGKILL" in str(answer.error)
    state = frontend.status()
    assert (state["sleep_level"], state["worker_pid"], state["worker_starts"]) == (2, None, 2)
    assert frontend.call("wake_up").error is None
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 1], 8)
    assert frontend.status()["worker_restarts"] == 0


def test_a_worker_that_hangs_while_it_starts_leaves_the_engine_asleep(
    start_core: StartCore, hang: Path
) -> None:
    core = start_core()
    frontend = attached(core)
    put_to_sleep(core, frontend)
    hang.touch()
    core.core.supervisor.start_limit = 0.3
    answer = frontend.call("wake_up")
    assert "no progress for 0.3 s" in str(answer.error) and frontend.status()["sleep_level"] == 2
    core.core.supervisor.start_limit = 60.0
    hang.unlink()
    assert frontend.call("wake_up").error is None
    assert_runs(frontend, 1)


@pytest.mark.parametrize(
    ("option", "problem"), [("--lack-memory", "too large for now"), ("--lose-states", "only 8 state slots")]
)
def test_what_cannot_be_loaded_now_leaves_the_engine_asleep(
    start_core: StartCore, tmp_path: Path, option: str, problem: str
) -> None:
    file = tmp_path / "short"
    core = start_core(worker_options=["--num-states", "16", option, str(file)])
    frontend = attached(core)
    put_to_sleep(core, frontend)
    file.touch()
    for _ in range(2):
        answer = frontend.call("wake_up")
        assert answer.error_type == "RuntimeError" and problem in str(answer.error)
        assert frontend.call("is_sleeping").result is True and frontend.status()["sleep_level"] == 2
    file.unlink()
    assert frontend.call("wake_up").error is None
    assert_runs(frontend, 1)


def test_a_start_that_the_machine_refuses_leaves_the_engine_asleep(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core()
    frontend = attached(core)
    put_to_sleep(core, frontend)

    def start(*args: Any, **kwargs: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("pagewire.engine_core.workers.launchers.local.Child", start)
        answer = frontend.call("wake_up")
        assert "Too many open files" in str(answer.error) and frontend.status()["sleep_level"] == 2
    assert frontend.call("wake_up").error is None
    assert_runs(frontend, 1)


def test_a_worker_that_dies_after_it_was_woken_is_replaced(start_core: StartCore) -> None:
    core = start_core()
    frontend = attached(core)
    put_to_sleep(core, frontend)
    assert frontend.call("wake_up").error is None
    os.kill(core.workers.pids[0], signal.SIGKILL)
    assert_runs(frontend, 1)
    state = frontend.status()
    assert (state["worker_starts"], state["worker_restarts"], state["sleep_level"]) == (3, 1, 0)


def test_a_core_that_sleeps_stops(start_core: StartCore) -> None:
    core = start_core()
    frontend = attached(core)
    put_to_sleep(core, frontend)
    frontend.submit(1, [1, 1])
    assert frontend.status()["waiting"] == 1
    core.core.stop(0.0)
    core.thread.join(10)
    assert not core.thread.is_alive() and core.error is None
