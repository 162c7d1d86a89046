"""When another core is started for one that was lost, and how long that waits."""

from __future__ import annotations

import threading

import pytest

from pagewire.frontend.core import core_source, spawned_cores
from pagewire.frontend.core.client import CoreClient
from pagewire.frontend.core.core_source import Attached, Pauses
from pagewire.frontend.core.spawned_cores import SpawnedCores
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.options.engine_args import EngineArgs


def test_pauses_grow_and_begin_anew_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(core_source.time, "monotonic", lambda: now[0])
    pauses = Pauses()
    assert [pauses.next() for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    now[0] += 30 + core_source.HEALTHY_SECONDS
    assert [pauses.next() for _ in range(2)] == [0, 1]


class RecordedWaits(threading.Event):
    """An event that records how long it is waited for; it is set in the wait with the number `closes`."""

    def __init__(self, closes: int = 0) -> None:
        super().__init__()
        self.seconds: list[float | None] = []
        self._closes = closes

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return len(self.seconds) == self._closes


def fail_to_spawn(args: EngineArgs) -> None:
    raise OSError("too many open files")


def no_dial(address: str, **options: object) -> CoreClient:
    raise AssertionError("there is no core")


def replace(source: SpawnedCores, closing: threading.Event) -> Attached:
    return source.replace(no_dial, EngineDeadError("it was killed"), closing)


def test_a_core_that_does_not_start_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as restarts are left; the text names what was lost, and why no other came."""
    monkeypatch.setattr(spawned_cores, "spawn_core", fail_to_spawn)
    closing, source = RecordedWaits(), SpawnedCores(EngineArgs(), restarts=4)
    with pytest.raises(
        EngineDeadError, match=r"it was killed; another core did not start: too many open files"
    ):
        replace(source, closing)
    assert closing.seconds == [0, 1, 2, 4]
    with pytest.raises(EngineDeadError, match=r"^it was killed$"):
        replace(source, closing)


def test_closing_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawned_cores, "spawn_core", fail_to_spawn)
    closing = RecordedWaits(closes=2)
    with pytest.raises(EngineDeadError):
        replace(SpawnedCores(EngineArgs(), restarts=9), closing)
    assert closing.seconds == [0, 1]
