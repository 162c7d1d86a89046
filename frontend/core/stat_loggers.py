"""A program's own loggers of statistics, which get the engine's figures at regular intervals.

core --call "metrics"--> StatLoggers (a thread) --Stats--> StatLoggerBase.log
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from pagewire.frontend.core.metrics import Counter, Gauge, Metric
from pagewire.ipc.bounds import check_number
from pagewire.ipc.errors import EngineDeadError

logger = logging.getLogger("pagewire.frontend")

MIN_INTERVAL = 0.1
STOP_SECONDS = 2.0  # how long `stop` waits for a logger that is at work


class Stats(msgspec.Struct, frozen=True):
    """The figures of an engine, over all its frontends.

    Those that end in `_iter` count from the logger's last call, the others are values of now, named as in vLLM.

    Attributes:
        now: seconds since the epoch.
        num_running_sys, num_waiting_sys: requests. num_swapped_sys: preempted ones with KV blocks in
            swap_space or kv_cache_dir alone.
        gpu_cache_usage_sys: share of KV blocks in use, on any device.
        cpu_cache_usage_sys: share of swap_space in use, or else of kv_cache_disk.
        gpu_prefix_cache_hit_rate: share of prompt tokens found in the prefix cache since the engine's start.
        num_prompt_tokens_iter: prompt tokens computed. num_generation_tokens_iter: tokens generated.
        num_preemption_iter: sequences sent back to the queue.
        metrics: every metric, as `get_metrics` returns them.
    """

    now: float
    num_running_sys: int
    num_waiting_sys: int
    num_swapped_sys: int
    gpu_cache_usage_sys: float
    cpu_cache_usage_sys: float
    gpu_prefix_cache_hit_rate: float
    num_prompt_tokens_iter: int
    num_generation_tokens_iter: int
    num_preemption_iter: int
    metrics: list[Metric]


class StatLoggerBase(ABC):
    """Base class of a program's own loggers of statistics, for `from_engine_args(stat_loggers={name: logger})`.

    local_interval: seconds between two calls of `log`, at least 0.1.

    Raises:
        ValueError, TypeError: a bad interval.
    """

    def __init__(self, local_interval: float) -> None:
        check_number("local_interval", local_interval, MIN_INTERVAL, math.inf)
        self.local_interval = local_interval

    @abstractmethod
    def log(self, stats: Stats) -> None:
        """Log the figures. Called on a thread of its own; an exception is logged and ends nothing."""


class StatLoggers:
    """Calls the loggers of a program, each at its own interval, until `stop`; none is called without any logger.

    read: returns every metric of the engine.
    """

    def __init__(self, loggers: Mapping[str, StatLoggerBase], read: Callable[[], list[Metric]]) -> None:
        self._loggers, self._read = loggers, read
        self._counts: dict[str, dict[str, int]] = {name: {} for name in loggers}  # at each logger's last call
        self._calling = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagewire-stat-loggers", daemon=True)
        if loggers:
            self._thread.start()

    def log(self, names: Iterable[str] | None = None) -> None:
        """Read the metrics and call the loggers with these names, or all, on this thread.

        Raises:
            EngineDeadError: the core is lost. TimeoutError: it does not answer.
        """
        names = list(self._loggers if names is None else names)
        if not names:
            return
        metrics = self._read()
        with self._calling:
            for name in names:
                stats, self._counts[name] = stats_of(metrics, self._counts[name])
                try:
                    self._loggers[name].log(stats)
                except Exception:
                    logger.exception("the stat logger %r failed", name)

    def stop(self) -> None:
        """Call no logger any more. Waits for one that is at work, for at most two seconds."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        now = time.monotonic()
        due = {name: now + each.local_interval for name, each in self._loggers.items()}
        while not self._stopping.wait(max(0.0, min(due.values()) - time.monotonic())):
            now = time.monotonic()
            names = [name for name, moment in due.items() if moment <= now]
            due.update({name: now + self._loggers[name].local_interval for name in names})
            try:
                self.log(names)
            except EngineDeadError:
                pass  # it has been reported, and there may be another core by the next time
            except Exception as error:
                logger.warning("no figures for the stat loggers: %s", error or type(error).__name__)


def status_line(status: Mapping[str, Any]) -> str:
    """The core's answer to `status` as one line for a log, without the frontends."""
    return "engine: " + ", ".join(f"{name} {value}" for name, value in status.items() if name != "clients")


def check_loggers(loggers: Any) -> dict[str, StatLoggerBase]:
    """The loggers given as `stat_loggers`; {} for None.

    Raises:
        TypeError: it is no mapping of names to `StatLoggerBase`.
    """
    if loggers is None:
        return {}
    if not isinstance(loggers, Mapping) or not all(
        isinstance(name, str) and isinstance(each, StatLoggerBase) for name, each in loggers.items()
    ):
        raise TypeError(
            f"stat_loggers must map names to instances of pagewire.StatLoggerBase, got {loggers!r}"
        )
    return dict(loggers)


def stats_of(metrics: list[Metric], before: Mapping[str, int]) -> tuple[Stats, dict[str, int]]:
    """The figures of a snapshot, given the counters of the one before, and its own counters by name."""
    gauges = {each.name: each.value for each in metrics if isinstance(each, Gauge)}
    counts = {each.name: each.value for each in metrics if isinstance(each, Counter)}

    def grown(name: str) -> int:
        now, then = counts[name], before.get(name, 0)
        return now - then if now >= then else now  # a new core counts from 0

    stats = Stats(
        now=time.time(),
        num_running_sys=int(gauges["vllm:num_requests_running"]),
        num_waiting_sys=int(gauges["vllm:num_requests_waiting"]),
        num_swapped_sys=int(gauges["vllm:num_requests_swapped"]),
        gpu_cache_usage_sys=gauges["vllm:gpu_cache_usage_perc"],
        cpu_cache_usage_sys=gauges["vllm:cpu_cache_usage_perc"],
        gpu_prefix_cache_hit_rate=gauges["vllm:gpu_prefix_cache_hit_rate"],
        num_prompt_tokens_iter=grown("vllm:prompt_tokens"),
        num_generation_tokens_iter=grown("vllm:generation_tokens"),
        num_preemption_iter=grown("vllm:num_preemptions"),
        metrics=metrics,
    )
    return stats, counts


def ignore_usage_context(usage_context: Any) -> None:
    """Log a warning if a usage context is given: no usage statistics are collected."""
    if usage_context is not None:
        logger.warning("usage_context has no effect: usage statistics are never collected")
