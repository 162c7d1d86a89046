"""Workers that hang, crash and cannot be started: what callers are told, and that the engine goes on."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from pagewire.engine_core.calls import worker_calls as calls
from pagewire.engine_core.calls.control import MAX_OPEN_CALLS
from pagewire.engine_core.workers.launchers import early
from pagewire.engine_core.workers.launchers.early import EarlyWorker
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.host.lifeline import Child
from pagewire.ipc.wire.budget import MAX_CALL_BYTES, MAX_NAME_CHARS
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.messages import Refused
from tests.engine_core.conftest import FAKE_WORKER, RawFrontend, RunningCore
from tests.engine_core.fake_worker import CRASH_AFTER_A_STEP
from tests.engine_core.test_core import roll_out

StartCore = Callable[..., RunningCore]


def attached(core: RunningCore) -> RawFrontend:
    frontend = core.frontend()
    frontend.attach()
    return frontend


def assert_runs(frontend: RawFrontend, key: int) -> None:
    frontend.submit(key, [key, 1])
    frontend.finish((key, 0))
    assert frontend.outputs[key, 0] == roll_out([key, 1], 8)


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core checks time limits every tenth of a second."""
    monkeypatch.setattr("pagewire.engine_core.core.TICK_SECONDS", 0.1)


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that stops workers at their start while it exists."""
    path = tmp_path / "hang"
    monkeypatch.setenv("HANG_WHILE_STARTING", str(path))
    yield path
    path.unlink(missing_ok=True)


def limit_start(core: RunningCore, seconds: float) -> None:
    """Set the silence of a starting worker that counts as a hang. On a busy machine a start may take long."""
    core.core.supervisor.start_limit = seconds


def let_start(core: RunningCore, hang: Path) -> None:
    """Let workers start again, and those go on that were stopped."""
    limit_start(core, 10.0)
    hang.unlink()
    for pid in core.workers.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def limit_health(core: RunningCore, seconds: float) -> None:
    """Set the time in which workers must prove that they live."""
    core.serving.engine.control._health._seconds = seconds


def limit_call(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    monkeypatch.setitem(CALLS, name, msgspec.structs.replace(CALLS[name], seconds=seconds))


# ---------------------------------------------------------------- starts


def test_a_worker_that_hangs_while_it_starts_is_replaced_and_no_call_is_lost(
    start_core: StartCore, hang: Path
) -> None:
    core = start_core()
    frontend = attached(core)
    hang.touch()
    limit_start(core, 1.0)
    os.kill(core.workers.pids[0], signal.SIGKILL)
    frontend.wait_for_start(2)
    frontend.begin_call(5, "sleep")
    frontend.begin_call(6, "collective_rpc", "echo", [5])
    frontend.submit(1, [1, 1])
    answers = [frontend.answer() for _ in range(2)]
    assert [answer.call_id for answer in answers] == [5, 6]
    assert all("no progress for 1 s" in (answer.error or "") for answer in answers)
    let_start(core, hang)
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 1], 8)
    assert frontend.call("is_sleeping").result is False


def test_a_first_worker_that_hangs_is_replaced(start_core: StartCore, hang: Path) -> None:
    hang.touch()
    core = start_core()
    limit_start(core, 1.0)
    while core.workers.num_starts < 2:
        pass
    let_start(core, hang)
    frontend = attached(core)
    assert_runs(frontend, 1)


def test_a_core_without_descriptors_starts_workers_again(start_core: StartCore) -> None:
    core = start_core()
    frontend = attached(core)
    assert_runs(frontend, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 8, hard)
    )
    hoard = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                hoard.append(os.open(os.devnull, os.O_RDONLY))
        os.kill(core.workers.pids[0], signal.SIGKILL)
        assert_runs(frontend, 2)
    finally:
        for fd in hoard:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert core.workers.num_starts == 2 and core.error is None


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError("no memory")])
def test_what_the_machine_lacks_for_a_start_it_may_have_later(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    core = start_core(num_workers=2)
    frontend = attached(core)
    tries: list[int] = []

    def start(command: list[str], pass_fds: Sequence[int] = ()) -> Child:
        if pass_fds:
            raise error  # of a process ahead of the next loss, which is no reason to fail
        tries.append(int(command[-1].rpartition("-")[2]))  # the rank, at the end of the identity
        if tries[-1] == 1 and len(tries) <= 6:
            raise error
        return Child(command)

    monkeypatch.setattr("pagewire.engine_core.workers.launchers.local.Child", start)
    os.kill(core.workers.pids[1], signal.SIGKILL)
    assert_runs(frontend, 1)
    assert tries == [0, 1] * 4 and core.error is None and len(core.workers.pids) == 2


@pytest.mark.parametrize("lives", [True, False])
def test_a_worker_that_was_started_early_is_the_first(
    start_core: StartCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    monkeypatch.setattr(early, "WORKER_COMMAND", FAKE_WORKER)
    first = EarlyWorker.start(f"ipc://{tmp_path}/workers.sock")  # the core does not listen there yet
    if not lives:
        first.child.process.kill()
    with zmq.Context() as context:
        launcher = LocalLauncher(context, FAKE_WORKER, first)
        core = start_core(launcher=launcher)
        frontend = attached(core)
        assert_runs(frontend, 1)
        assert (core.workers.pids == [first.child.pid]) is lives
        os.kill(core.workers.pids[0], signal.SIGKILL)
        assert_runs(frontend, 2)
        assert core.workers.num_starts == (2 if lives else 3) and first.child.pid not in core.workers.pids
        core.stop()


@pytest.mark.parametrize("lives", [True, False])
def test_after_a_loss_the_next_worker_waits_ready(start_core: StartCore, lives: bool) -> None:
    with zmq.Context() as context:
        launcher = LocalLauncher(context, FAKE_WORKER)
        core = start_core(launcher=launcher)
        frontend = attached(core)
        assert_runs(frontend, 1)
        assert not launcher._spares, "an engine without losses does not pay for one"
        os.kill(core.workers.pids[0], signal.SIGKILL)
        assert_runs(frontend, 2)
        spare = launcher._spares[0].child
        if not lives:
            spare.kill()
        os.kill(core.workers.pids[0], signal.SIGKILL)
        assert_runs(frontend, 3)
        assert (core.workers.pids == [spare.pid]) is lives
        assert core.workers.num_starts == 3
        last = launcher._spares[0].child
        core.stop()
        assert last.poll() is not None


def test_workers_that_wait_ready_end_when_nothing_is_lost_for_a_while(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.engine_core.workers.supervisor.SPARE_SECONDS", 0.0)
    with zmq.Context() as context:
        launcher = LocalLauncher(context, FAKE_WORKER)
        core = start_core(launcher=launcher)
        frontend = attached(core)
        os.kill(core.workers.pids[0], signal.SIGKILL)
        assert_runs(frontend, 1)
        while launcher._spares:  # until the next tick
            pass
        os.kill(core.workers.pids[0], signal.SIGKILL)
        assert_runs(frontend, 2)
        assert core.workers.num_starts == 3
        core.stop()


def test_a_long_pause_ends_once_somebody_waits(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core with nothing to do leaves killed workers alone for a while: a request or a call brings the next."""
    monkeypatch.setattr("pagewire.engine_core.workers.restarts.FIRST_PAUSE_SECONDS", 1e6)
    monkeypatch.setattr("pagewire.engine_core.workers.restarts.LONGEST_PAUSE_SECONDS", 1e6)
    monkeypatch.setattr("pagewire.engine_core.workers.restarts.LONGEST_AWAITED_SECONDS", 0.5)
    core = start_core()
    frontend = attached(core)

    def kill_idle_worker() -> None:
        os.kill(core.workers.pids[0], signal.SIGKILL)
        while frontend.status()["worker_ready"]:
            pass

    kill_idle_worker()
    frontend.wait_for_start(2)  # the first pause is none
    assert frontend.call("collective_rpc", "echo", [1]).error is None
    kill_idle_worker()
    assert frontend.status()["worker_starts"] == 2
    assert_runs(frontend, 1)
    kill_idle_worker()
    assert frontend.status()["worker_starts"] == 3
    assert frontend.call("collective_rpc", "echo", [1]).result == [[1]]
    assert frontend.status()["worker_starts"] == 4


def test_kills_in_a_row_delay_a_stream_by_the_starts_alone(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses are over while workers load and serve."""
    monkeypatch.setattr("pagewire.engine_core.workers.restarts.FIRST_PAUSE_SECONDS", 1e6)
    monkeypatch.setattr("pagewire.engine_core.workers.restarts.LONGEST_PAUSE_SECONDS", 1e6)
    monkeypatch.setattr("pagewire.engine_core.workers.restarts.LONGEST_AWAITED_SECONDS", 0.0)
    core = start_core()
    frontend = attached(core)
    frontend.submit(1, [1, 2], max_tokens=120)
    for kill in range(8):
        while len(frontend.outputs.get((1, 0), [])) < 12 * (
            kill + 1
        ):  # in eight steps it is cleared of crashes
            frontend.take(frontend.hear())
        frontend.kill_worker()
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 2], 120)


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
def test_a_call_that_is_not_answered_in_time_leaves_the_engine_as_it_was(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    core = start_core()
    frontend = attached(core)
    if method == "wake_up":
        assert frontend.call("sleep").error is None
    limit_call(monkeypatch, method, 0.3)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    answer = frontend.call(method)
    assert (answer.error, answer.error_type) == (f"{method} has not returned within 0.3 s", "TimeoutError")
    limit_call(monkeypatch, method, 60.0)
    assert frontend.call("is_sleeping").result is (method == "wake_up")
    if method == "wake_up":
        assert frontend.call("wake_up").error is None
    assert_runs(frontend, 1)
    assert core.workers.num_starts == 2


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("sleep", "sleep has shown no progress for 0.3 s"),
        ("wake_up", "wake_up has shown no progress for 0.3 s"),
    ],
)
def test_a_worker_that_hangs_in_a_call_is_replaced_as_in_a_step(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch, method: str, text: str
) -> None:
    core = start_core()
    frontend = attached(core)
    if method == "wake_up":
        assert frontend.call("sleep").error is None
    core.core.supervisor.stopwatch.limit = 0.3
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    answer = frontend.call(method)
    assert (answer.error, answer.error_type) == (text, "TimeoutError")
    core.core.supervisor.stopwatch.limit = 60.0
    assert frontend.call("wake_up").error is None
    assert_runs(frontend, 1)
    assert core.workers.num_starts == 2


def test_a_method_that_never_returns_is_ended(start_core: StartCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core = start_core()
    frontend = attached(core)
    core.core.supervisor.stopwatch.limit = 0.3
    answer = frontend.call("collective_rpc", "hang")
    assert (answer.error, answer.error_type) == ("hang has not returned within 0.3 s", "TimeoutError")
    assert_runs(frontend, 1)


def test_a_pause_that_waits_too_long_says_so(start_core: StartCore, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_call(monkeypatch, "pause", 0.3)
    core = start_core()
    frontend = attached(core)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.submit(1, [1, 1])
    answer = frontend.call("pause", wait_for_inflight_requests=True)
    assert answer.error_type == "TimeoutError" and "requests still run after 0.3 s" in (answer.error or "")
    assert frontend.call("is_paused").result is True and frontend.call("resume").error is None
    os.kill(core.workers.pids[0], signal.SIGCONT)
    frontend.finish((1, 0))


def test_calls_that_no_worker_could_take_are_refused(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core()
    frontend = attached(core)
    answer = frontend.call("collective_rpc", "echo", ["x" * MAX_CALL_BYTES])
    assert answer.error_type == "ValueError" and "no more than 1,048,576" in (answer.error or "")
    answer = frontend.call("collective_rpc", "\x01" * (2 * MAX_CALL_BYTES))
    assert answer.error_type == "ValueError" and len(answer.error or "") < 1000
    answer = frontend.call("\x01" * MAX_NAME_CHARS)
    assert answer.error_type == "ValueError" and len(answer.error or "") < 5000
    frontend.begin_call(7, "x" * (1 + MAX_NAME_CHARS))
    refused_call = frontend.hear()
    assert isinstance(refused_call, Refused) and refused_call.call_id == 7
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    for call_id in range(MAX_OPEN_CALLS + 1):
        frontend.begin_call(call_id, "collective_rpc", "echo", [call_id])
    refused = [frontend.answer() for _ in range(MAX_OPEN_CALLS + 1 - calls.MAX_PENDING_CALLS)]
    assert {answer.error_type for answer in refused} == {"EngineBusyError"}
    os.kill(core.workers.pids[0], signal.SIGCONT)
    answered = [frontend.answer() for _ in range(calls.MAX_PENDING_CALLS)]
    assert [answer.result for answer in answered] == [[[i]] for i in range(calls.MAX_PENDING_CALLS)]
    assert core.workers.num_starts == 1
    assert not core.serving.engine.control._num_open


def test_a_frontend_has_a_limited_number_of_open_calls(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.engine_core.calls.control.MAX_OPEN_CALLS", 3)
    core = start_core()
    frontend, other = attached(core), core.frontend("other")
    other.attach()
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    for call_id in range(4):
        frontend.begin_call(call_id, "collective_rpc", "echo", [call_id])
    answer = frontend.answer()
    assert (answer.call_id, answer.error_type) == (3, "EngineBusyError")
    assert other.call("is_paused").error is None
    os.kill(core.workers.pids[0], signal.SIGCONT)
    assert [frontend.answer().call_id for _ in range(3)] == [0, 1, 2]


# ---------------------------------------------------------------- health


def test_health_is_proven_by_a_ping_and_a_worker_that_does_not_answer_is_replaced(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.engine_core.calls.health.FRESH_SECONDS", 0.0)
    core = start_core()
    frontend = attached(core)
    healthy = {"alive": True, "ready": True, "reason": ""}
    limit_health(core, 60.0)
    assert frontend.call("check_health").result == healthy
    limit_health(core, 0.3)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.begin_call(1, "check_health")
    frontend.begin_call(2, "check_health")
    for _ in range(2):
        health = frontend.answer().result
        assert not health["alive"] and not health["ready"] and "has not answered ping" in health["reason"]
    assert core.serving.engine.control._worker_calls.oldest.method == "ping"
    os.kill(core.workers.pids[0], signal.SIGCONT)
    limit_health(core, 60.0)
    assert frontend.call("collective_rpc", "echo", [1]).result == [[1]]
    assert frontend.call("check_health").result == healthy
    limit_call(monkeypatch, "ping", 0.5)
    limit_health(core, 0.3)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    assert frontend.call("check_health").result["alive"] is False
    frontend.wait_for_start(2)
    limit_call(monkeypatch, "ping", 60.0)
    limit_health(core, 60.0)
    assert_runs(frontend, 1)
    assert frontend.call("check_health").result == healthy


def test_health_of_a_step_that_hangs(start_core: StartCore) -> None:
    core = start_core()
    frontend = attached(core)
    limit_health(core, 0.3)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.submit(1, [1, 1])
    while (health := frontend.call("check_health").result)["alive"]:
        pass
    assert "a step has been running" in health["reason"]
    limit_health(core, 60.0)
    os.kill(core.workers.pids[0], signal.SIGCONT)
    frontend.finish((1, 0))
    assert frontend.call("check_health").result["alive"]


def test_an_engine_that_takes_no_requests_is_alive_and_not_ready(start_core: StartCore, hang: Path) -> None:
    core = start_core()
    frontend = attached(core)
    for before, after, reason in (("sleep", "wake_up", "sleeps"), ("pause", "resume", "paused")):
        assert frontend.call(before).error is None
        health = frontend.call("check_health").result
        assert health["alive"] and not health["ready"] and reason in health["reason"]
        assert frontend.call(after).error is None and frontend.call("check_health").result["ready"]
    hang.touch()
    os.kill(core.workers.pids[0], signal.SIGKILL)
    while frontend.status()["worker_ready"]:
        pass
    health = frontend.call("check_health").result
    assert not health["alive"] and "is starting" in health["reason"]
    let_start(core, hang)
    while not frontend.call("check_health").result["ready"]:
        pass


# ---------------------------------------------------------------- crashes


def test_a_request_that_crashes_its_worker_after_every_token_ends(
    start_core: StartCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "crash"
    flag.touch()
    monkeypatch.setenv("CRASH_WHILE", str(flag))
    frontend = attached(start_core())
    frontend.submit(1, [1, 2], max_tokens=60)
    frontend.submit(2, [3, CRASH_AFTER_A_STEP], max_tokens=60)
    frontend.finish((1, 0), (2, 0))
    end = frontend.ends[2, 0]
    assert end.finish_reason == "error" and "crashed 5 times" in (end.error or "")
    assert 0 < len(frontend.outputs[2, 0]) < 10
    assert frontend.outputs[1, 0] == roll_out([1, 2], 60)
