"""Own loggers of statistics get the engine's figures; `from_engine_args` takes nothing that it does not know."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from pagewire import AsyncLLM, EngineArgs, LLMEngine, StatLoggerBase
from pagewire.frontend.core import open_session
from pagewire.frontend.core.metrics import Counter, Gauge, Metric
from pagewire.frontend.core.stat_loggers import StatLoggers, Stats
from pagewire.ipc.errors import EngineDeadError

PATIENCE = 20.0


def snapshot(num_generated: int, num_running: int = 0) -> list[Metric]:
    gauges = {
        "num_requests_running": num_running,
        "num_requests_waiting": 2,
        "num_requests_swapped": 0,
        "gpu_cache_usage_perc": 0.25,
        "cpu_cache_usage_perc": 0,
        "gpu_prefix_cache_hit_rate": 0.5,
    }
    counts = {"prompt_tokens": 10, "generation_tokens": num_generated, "num_preemptions": 1}
    return [
        *(Gauge(f"vllm:{name}", {}, value) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", {}, value) for name, value in counts.items()),
    ]


class Recorder(StatLoggerBase):
    """Keeps what it gets."""

    def __init__(self, local_interval: float = 0.1) -> None:
        super().__init__(local_interval)
        self.stats: queue.Queue[Stats] = queue.Queue()

    def log(self, stats: Stats) -> None:
        self.stats.put(stats)


class Failing(StatLoggerBase):
    def log(self, stats: Stats) -> None:
        raise RuntimeError("the disk is full")


def test_counts_are_those_since_the_last_call() -> None:
    snapshots = iter([snapshot(5, 3), snapshot(12), snapshot(4)])  # the last is of a new core
    recorder = Recorder(1000.0)
    loggers = StatLoggers({"own": recorder}, lambda: next(snapshots))
    for _ in range(3):
        loggers.log()
    loggers.stop()
    first, second, third = (recorder.stats.get_nowait() for _ in range(3))
    assert (first.num_running_sys, first.num_waiting_sys, first.num_swapped_sys) == (3, 2, 0)
    assert (first.gpu_cache_usage_sys, first.gpu_prefix_cache_hit_rate) == (0.25, 0.5)
    assert [each.num_generation_tokens_iter for each in (first, second, third)] == [5, 7, 4]
    assert (first.num_prompt_tokens_iter, second.num_prompt_tokens_iter) == (10, 0)
    assert (first.num_preemption_iter, second.num_preemption_iter) == (1, 0)
    assert second.metrics == snapshot(12)


def test_loggers_are_called_again_and_again_also_after_errors(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Any] = [EngineDeadError("lost"), ValueError("unreadable"), *map(snapshot, range(1, 4))]

    def read() -> list[Metric]:
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    recorder = Recorder()
    loggers = StatLoggers({"failing": Failing(0.1), "own": recorder}, read)
    counts = [recorder.stats.get(timeout=PATIENCE).num_generation_tokens_iter for _ in range(4)]
    loggers.stop()
    assert counts == [1, 1, 1, 0]
    messages = [record.getMessage() for record in caplog.records]
    assert "no figures for the stat loggers: unreadable" in messages
    assert "the stat logger 'failing' failed" in messages and not any("lost" in text for text in messages)


def test_a_stopped_thread_calls_nothing() -> None:
    recorder = Recorder()
    loggers = StatLoggers({"own": recorder}, lambda: snapshot(1))
    recorder.stats.get(timeout=PATIENCE)
    loggers.stop()
    assert not loggers._thread.is_alive()


def test_an_engine_can_be_shut_down_by_its_logger() -> None:
    stopped: Future[None] = Future()

    class Ending(StatLoggerBase):
        def log(self, stats: Stats) -> None:
            loggers.stop()
            stopped.set_result(None)

    loggers = StatLoggers({"own": Ending(0.1)}, lambda: snapshot(1))
    stopped.result(PATIENCE)
    loggers._thread.join(PATIENCE)
    assert not loggers._thread.is_alive()


@pytest.mark.parametrize("interval", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_intervals(interval: float) -> None:
    with pytest.raises(ValueError, match="local_interval must be"):
        Recorder(interval)


# ---------------------------------------------------------------- from_engine_args


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each `open_session.spawn`, which starts nothing here."""
    calls: list[tuple[Any, ...]] = []

    class NoSession:
        def close(self) -> None:
            pass

    def spawn(*arguments: Any) -> NoSession:
        calls.append(arguments)
        return NoSession()

    monkeypatch.setattr(open_session, "spawn", spawn)
    return calls


@pytest.fixture(params=[LLMEngine, AsyncLLM])
def from_engine_args(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param.from_engine_args  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["restart", "stat_logger", "log_stats"])
def test_an_unknown_keyword_is_refused(
    from_engine_args: Callable[..., Any], spawned: list[Any], name: str
) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        from_engine_args(EngineArgs(), **{name: 1})
    assert not spawned


def test_loggers_reach_the_session(from_engine_args: Callable[..., Any], spawned: list[Any]) -> None:
    recorder = Recorder()
    from_engine_args(EngineArgs(), stat_loggers={"own": recorder}, restarts=2)
    assert spawned == [(EngineArgs(), 2, {"own": recorder})]


@pytest.mark.parametrize("loggers", [[Recorder()], {"own": object()}, {1: Recorder()}, Recorder()])
def test_what_is_no_logger_is_refused(
    from_engine_args: Callable[..., Any], spawned: list[Any], loggers: Any
) -> None:
    with pytest.raises(
        TypeError, match=r"stat_loggers must map names to instances of pagewire\.StatLoggerBase"
    ):
        from_engine_args(EngineArgs(), stat_loggers=loggers)
    assert not spawned


def test_a_usage_context_has_no_effect_and_a_warning_says_so(
    from_engine_args: Callable[..., Any], spawned: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    from_engine_args(EngineArgs(), usage_context="LLM_CLASS")
    assert "usage statistics are never collected" in caplog.text and len(spawned) == 1


def test_the_engine_loop_cannot_be_left_out(spawned: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"start_engine_loop=False is not supported: .* pause_generation"):
        AsyncLLM.from_engine_args(EngineArgs(), start_engine_loop=False)
    AsyncLLM.from_engine_args(EngineArgs(), start_engine_loop=True)
    assert len(spawned) == 1


def test_statistics_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(1000.0)

    class StatusSession:
        stat_loggers = StatLoggers({"own": recorder}, lambda: snapshot(7))

        def call(self, name: str) -> Future[dict[str, Any]]:
            answer: Future[dict[str, Any]] = Future()
            answer.set_result({"model": name, "running": 3, "clients": ["one"]})
            return answer

        def close(self) -> None:
            self.stat_loggers.stop()

    caplog.set_level("INFO", logger="pagewire.frontend")
    session: Any = StatusSession()
    LLMEngine(session).do_log_stats()
    asyncio.run(AsyncLLM(session).do_log_stats())
    session.close()
    assert [record.getMessage() for record in caplog.records] == ["engine: model status, running 3"] * 2
    assert [recorder.stats.get_nowait().num_generation_tokens_iter for _ in range(2)] == [7, 0]
