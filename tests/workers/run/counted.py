"""Which way the plans of a runner go: one compiled call, or the usual step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.wire.worker_messages import StepPlan
from pagewire.workers.run.decoding import Decoding
from pagewire.workers.run.encoding import Encoding
from pagewire.workers.run.runner import Runner
from pagewire.workers.run.step import FinishedStep
from tests.workers.driver import load_runner


class Count:
    """How many plans with rows one of the compiled ways has taken, and left. is_on: it takes any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Decoding | Encoding]) -> None:
        self.taken = self.left = 0
        self.is_on = True
        run: Any = kind.run
        refusal: Any = kind.refusal

        def counted(way: Decoding | Encoding, plan: StepPlan, *others: Any) -> FinishedStep | None:
            step: FinishedStep | None = run(way, plan, *others)
            self.taken += step is not None
            self.left += step is None
            return step

        def refused(way: Decoding | Encoding, plan: StepPlan) -> str:
            why: str = refusal(way, plan) if self.is_on else "it is off"
            self.left += why != ""
            return why

        monkeypatch.setattr(kind, "run", counted)
        monkeypatch.setattr(kind, "refusal", refused)

    def load(self, folder: Path, **options: Any) -> Runner:
        """A runner whose warm-up does not count."""
        runner, _ = load_runner(folder, **options)
        self.taken = self.left = 0
        return runner
