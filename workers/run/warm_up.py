"""What a worker does before its first request, as no request shall pay for it."""

from __future__ import annotations

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.run.graphs import StepGraphs
from pagewire.workers.run.launch import StepLauncher
from pagewire.workers.run.trial_steps import GREEDY, TrialSteps, of_first_stage


class WarmUp:
    """Runs steps once the memory for KV blocks is there: after the start, and after each sleep.

    records: steps are recorded as graphs.
    """

    def __init__(self, config: WorkerConfig, launcher: StepLauncher, *, records: bool) -> None:
        self._config, self._launcher, self.records = config, launcher, records

    def run(self) -> int:
        """Run a token, and record graphs. Writes nowhere that matters.

        Returns how many numbers an embedding has that may take the place of a token's; 0: none may.
        """
        launcher, env = self._launcher, self._launcher.env
        loaded = env.model.current
        trials = TrialSteps(launcher.run, self._config, loaded)
        trials.run([1], GREEDY)
        # The first stage has the embedding. All ranks of a group try together whether others are taken.
        size = of_first_stage(loaded.model.embedding_size, env.collective, env.device)
        size = size if size and trials.take_embeddings(size) else 0
        size = of_first_stage(size, env.collective, env.device)
        if self.records:
            launcher.graphs = StepGraphs.recorded(
                self._config, env.device, loaded, launcher.forward, env.parts.adapters
            )
        launcher.kv.zero_first_block()
        return size
