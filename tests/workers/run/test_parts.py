"""Parts that a model may have: what stands in for them, and what an extension gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.errors import LoadError
from pagewire.workers.process.calls import call
from pagewire.workers.run.runner import Runner
from tests.workers.driver import GREEDY, load_runner

HERE = "tests.workers.run.test_parts"


class Watcher:
    """An extension that looks at the runner when it is made."""

    def __init__(self, worker: Any) -> None:
        self._seen = [len(worker.caches), worker.num_blocks, worker.memory()["kv_cache"] > 0]

    def seen(self) -> list[Any]:
        return self._seen


class Clash:
    """An extension with a method that workers have."""

    def __init__(self, worker: Any) -> None:
        pass

    def ping(self) -> str:
        return "pang"


def test_what_stands_in_for_parts(runner: Runner) -> None:
    assert not runner.adapters.are_served and not runner.media.are_taken and runner.drafter.name is None
    assert "adapters" not in runner.memory() and not runner.load_more()
    init = SlotInit(0, [3, 4, 5], 3, [0], GREEDY, 0, adapter=7)
    with pytest.raises(RuntimeError, match="a row has an adapter, but enable_lora is off"):
        runner.step(StepPlan(0, [Row(0, 0, 3, num_samples=1)], [init]))


def test_an_extension_gets_a_runner_that_is_whole(llama: Path) -> None:
    runner, _ = load_runner(llama, worker_extension=f"{HERE}:Watcher")
    assert call(runner, "seen", [], {}) == [2, 64, True]
    with pytest.raises(ValueError, match=r"no method 'rm'; it has .*, seen"):
        call(runner, "rm", [], {})


def test_extensions_that_are_refused(llama: Path, tmp_path: Path) -> None:
    """One that cannot be imported, before there is a model."""
    with pytest.raises(LoadError, match=r"worker_extension: .*:Nobody: .*cannot be imported"):
        load_runner(tmp_path / "no model", worker_extension=f"{HERE}:Nobody")
    with pytest.raises(LoadError, match=r"worker_extension: .*:Clash: workers have a method ping already"):
        load_runner(llama, worker_extension=f"{HERE}:Clash")
    with pytest.raises(LoadError, match=r"worker_extension: .*:HERE: TypeError"):
        load_runner(llama, worker_extension=f"{HERE}:HERE")
