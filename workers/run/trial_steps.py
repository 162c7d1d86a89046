"""Steps that no request has asked for: they warm a model up, and find what memory it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pagewire.ipc.wire.items import Task
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan, StepResult, WorkerConfig
from pagewire.workers.device.interface import Device
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.ranks.interface import Collective

GREEDY = SamplingParams(temperature=0.0)


class TrialSteps:
    """Runs prompts through a model, with all their KV in block 0 and their states in slot 0, and frees their slots.

    step: runs a plan, see `Runner.step`.
    """

    def __init__(
        self, step: Callable[[StepPlan], StepResult], config: WorkerConfig, loaded: LoadedModel
    ) -> None:
        self._step, self._config, self._loaded = step, config, loaded

    def run(self, lengths: Sequence[int], params: SamplingParams) -> None:
        """Run prompts of these lengths in one step.

        params: of a model that generates; one that pools makes its default results.
        """
        size, pooler = self._config.block_size, self._loaded.pooler
        task: Task = params if pooler is None else PoolingParams(task=pooler.info.tasks[0])
        samples = int(pooler is None)
        inits, rows = [], []
        for slot, length in enumerate(lengths):
            blocks = [0] * -(-length // size)
            inits.append(SlotInit(slot, [0] * length, length, blocks, task, 0))
            row = Row(slot, 0, length, num_samples=samples, pool=not samples, num_drafts=1)
            row.states = [(length, 0)] if self._loaded.state_shapes else []
            rows.append(row)
        self._step(StepPlan(-1, rows, inits))
        self._step(StepPlan(-1, [], [], list(range(len(lengths)))))

    def run_widest(self, num_most_likely: int) -> None:
        """Run the largest steps, by tokens and by rows, with all sampling stages, to measure their memory."""
        config, longest = self._config, self._loaded.max_model_len
        most = config.max_num_batched_tokens
        if self._loaded.model.encodes:  # the longest prompt runs in one step in any case
            most = max(most, longest)
        num_long, rest = divmod(most, longest)
        prompts = [*[longest] * num_long, *([rest] if rest else [])][: config.max_num_seqs]
        params = SamplingParams(top_k=2, top_p=0.5, logprobs=num_most_likely)
        self.run(prompts, params)
        self.run([1] * min(config.max_num_seqs, config.max_num_batched_tokens), params)


def of_first_stage(number: int, collective: Collective, device: Device) -> int:
    """A number of rank 0, which is on the first stage; all ranks of a group call this together."""
    numbers = torch.tensor([number], device=device.torch_device)
    return int(collective.broadcast(numbers, 0).item())
