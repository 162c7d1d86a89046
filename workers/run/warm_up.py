"""What a worker does before its first request, as no request shall pay for it."""

from __future__ import annotations

from collections.abc import Callable

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.run.interface import RecordedSteps
from pagewire.workers.run.launch import StepLauncher
from pagewire.workers.run.trial_steps import GREEDY, TrialSteps, of_first_stage


class WarmUp:
    """Runs steps once the memory for KV blocks is there: after the start, and after each sleep.

    record: records steps as graphs, or returns None where they compute something else; None: nothing is recorded.
    """

    def __init__(
        self,
        config: WorkerConfig,
        launcher: StepLauncher,
        record: Callable[[], RecordedSteps | None] | None,
    ) -> None:
        self._config, self._launcher, self._record = config, launcher, record

    @property
    def records(self) -> bool:
        """True if steps are recorded as graphs."""
        return self._record is not None

    def run(self) -> int:
        """Run a token, and record graphs. Writes nowhere that matters.

        Returns how many numbers an embedding has that may take the place of a token's; 0: none may.
        """
        launcher, env = self._launcher, self._launcher.env
        loaded = env.model.current
        TrialSteps(launcher.run, self._config, loaded).run([1], GREEDY)
        size = of_first_stage(loaded.model.base.embedding_size, env.collective, env.device)
        if self._record is not None:
            launcher.graphs = self._record()
        launcher.kv.zero_first_block()
        return size
