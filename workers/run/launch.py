"""The further steps of a plan for several: each runs the rows of the one before, with the tokens that it gave."""

from __future__ import annotations

from typing import Protocol

from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.worker_messages import Row, RowResult, StepPlan, StepResult
from pagewire.workers.batch.slots import Slots
from pagewire.workers.device.interface import Event
from pagewire.workers.run.decoding import Quiet
from pagewire.workers.run.step import FinishedStep, RunningStep


class StepLauncher(Protocol):
    """The part of a runner that launches steps."""

    slots: Slots

    def launch(self, plan: StepPlan) -> RunningStep | FinishedStep:
        """Launch the model for a plan."""


def go_on(
    launcher: StepLauncher, step: RunningStep | FinishedStep, result: StepResult, quiet: Quiet | None = None
) -> Event:
    """Add the further steps of a plan to the result of its first one; returns the end of the last.

    They end early where a row has failed or ended, or the core wants something. A row that fails later than in the
    first step keeps the tokens that it has: the next plan runs it again, and returns its error.
    """
    plan, slots = step.plan, launcher.slots
    for number in range(1, 1 + step.num_further):
        if not all(_goes_on(slots, row, own) for row, own in zip(plan.rows, result.rows, strict=True)):
            break
        if quiet is not None and not quiet.check():
            break
        rows = [Row(row.slot, row.start + number, 1, num_samples=1) for row in plan.rows]
        step = launcher.launch(StepPlan(plan.step_id, rows))
        step.sample(lambda: None)
        more = step.finish()
        result.busy_us += more.busy_us
        for own, added in zip(result.rows, more.rows, strict=True):
            _extend(own, added)
        if any(added.error is not None for added in more.rows):
            break
    return step.end


def _goes_on(slots: Slots, row: Row, result: RowResult) -> bool:
    """True if a row has neither failed nor ended."""
    return result.error is None and result.token_ids[-1] not in slots.sampling[row.slot].stop_ids


def _extend(result: RowResult, added: RowResult) -> None:
    """Add the token of a further step to the result of a row."""
    if added.error is None:
        result.token_ids.append(added.token_ids[0])
        result.logprobs = LogprobRows.join([x for x in (result.logprobs, added.logprobs) if x is not None])
