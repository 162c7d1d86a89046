"""How many steps one plan is for: where nothing can change between them, the worker runs several by itself.

Each takes the tokens that the one before has sampled, so between two of them there is no way to the core and back.
Together they take a few milliseconds: so often does a client get tokens. A message of the core, such as the plan
for a request that has just come, ends a launch behind the step that runs.
"""

from __future__ import annotations

from collections.abc import Collection

from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step import PlannedStep
from pagewire.engine_core.schedule.step_costs import StepCosts
from pagewire.ipc.wire.steps import StepResult

LAUNCH_SECONDS = 0.004


class LaunchLength:
    """Chooses the number of steps of a launch by what such steps have taken. most: steps of a launch."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._costs = StepCosts()

    def prolong(self, step: PlannedStep, running: Collection[Sequence], kv: KVCache) -> None:
        """Make a planned step the first of several, if it is the next one of all running sequences."""
        if len(step.rows) < len(running) or step.inits or step.masked or not self._costs.known:
            return
        if any(row.num_tokens > 1 or not row.num_samples for row in step.rows):
            return
        fitting = int(LAUNCH_SECONDS / self._costs.seconds(len(step.rows)))
        count = min(fitting, self._most, 1 + min(num_further(sequence) for sequence in step.sequences))
        while count > 1 and not self._fit(step.sequences, kv, count - 1):
            count //= 2
        if count < 2:
            return
        step.num_steps = count
        for sequence, row in zip(step.sequences, step.rows, strict=True):
            sequence.prolong(count - 1)
            if missing := kv.missing(sequence, sequence.computed):
                row.new_block_ids = [*row.new_block_ids, *kv.grow(sequence, missing)]

    def measure(self, step: PlannedStep, result: StepResult) -> None:
        """Take in what the steps of a launch took; those that compute prompts or drafts say nothing."""
        if self._most == 1 or not result.busy_us or any(row.num_tokens > 1 for row in step.rows):
            return
        self._costs.observe(len(step.rows), step.seconds(result))

    @staticmethod
    def _fit(sequences: Collection[Sequence], kv: KVCache, num_tokens: int) -> bool:
        """True if there are blocks for this many tokens more of each sequence, and one more for each."""
        missing = sum(kv.missing(sequence, sequence.computed + num_tokens) for sequence in sequences)
        return missing + len(sequences) <= kv.pool.num_free


def num_further(sequence: Sequence) -> int:
    """The most tokens that a sequence can run behind those that it has launched."""
    left = sequence.max_output - sequence.num_output_tokens - sequence.num_pending
    return min(left, sequence.angles_end - sequence.computed)
