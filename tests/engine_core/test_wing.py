"""A part that the core knows nothing of plugs into its loop, and hears of all that it could act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagewire.engine_core.wings.wing import Wing

HOOKS = [name for name in vars(Wing) if not name.startswith("_")]


class Recorder(Wing):
    """Records which hooks were called, each change once."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in HOOKS:
            calls = object.__getattribute__(self, "calls")
            if not calls or calls[-1] != name:
                calls.append(name)
        return object.__getattribute__(self, name)

    def before(self, first: str, second: str) -> bool:
        return self.calls.index(first) < self.calls.index(second)


class Holding(Wing):
    """Holds all steps back until it is told to let them go."""

    def __init__(self) -> None:
        self.holds = True

    @property
    def holds_steps(self) -> bool:
        return self.holds


def test_a_wing_hears_of_requests_steps_and_workers(start_core: Callable[..., Any]) -> None:
    running = start_core()
    recorder = Recorder()
    running.serving.engine.wings.append(recorder)
    frontend = running.frontend()
    frontend.attach()
    frontend.submit(0, [1, 2, 3], max_tokens=4)
    frontend.finish((0, 0))
    frontend.submit(1, [], max_tokens=4)  # is refused
    frontend.finish((1, 0))
    assert recorder.before("submitted", "committed") and recorder.before("committed", "ended")
    assert recorder.before("planned", "committed") and recorder.before("flush", "turned")
    frontend.kill_worker()
    frontend.wait_for_start(2)
    frontend.submit(2, [4, 5], max_tokens=2)
    frontend.finish((2, 0))
    assert "worker_ready" in recorder.calls[recorder.calls.index("worker_lost") :]
    running.stop()
    missing = set(HOOKS) - set(recorder.calls)
    assert missing <= {"start_failed", "has_saved", "receive", "tidy"}, missing
    assert recorder.calls[-1] == "close" and "refused" in recorder.calls


@pytest.mark.parametrize("count", [1, 3])
def test_a_wing_holds_steps(start_core: Callable[..., Any], count: int) -> None:
    running = start_core()
    wings = [Holding() for _ in range(count)]
    running.serving.engine.wings.extend(wings)
    frontend = running.frontend()
    frontend.attach()
    frontend.submit(0, [1, 2, 3], max_tokens=2)
    assert frontend.status()["num_steps"] == 0
    for wing in wings:
        assert frontend.status()["in_flight"] == 0
        wing.holds = False
    frontend.finish((0, 0))
    assert frontend.status()["num_steps"] > 0
