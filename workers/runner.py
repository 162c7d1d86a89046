"""Runs steps: slots, batch, model, sampler."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from pagewire.ipc.messages import LoadModel, LogprobRows, Masks, Ready, Row, SlotInit, StepPlan, StepResult
from pagewire.ipc.params import SamplingParams
from pagewire.kernels.cpu.arena import Reserve
from pagewire.kernels.cpu.memory import reserved
from pagewire.workers.attention import Paged
from pagewire.workers.batch import Batch, build_batch
from pagewire.workers.device import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.loading import LoadedModel, Phases, load_model
from pagewire.workers.masks import TokenMasks
from pagewire.workers.memory import kv_budget, num_kv_blocks
from pagewire.workers.methods import METHODS
from pagewire.workers.sampler import logprob_rows, sample
from pagewire.workers.slots import Slots

LOGIT_CHUNK = 1 << 24  # logits computed at a time for prompt log probabilities


class Runner:
    """A model, its KV memory and the requests' slots.

    `loaded` is None while weights are dropped, `caches` is empty while there is no KV memory.
    """

    def __init__(self, load: LoadModel, phases: Phases, reserve: Reserve | None = None) -> None:
        self.load, self.phases = load, phases
        self.device = Device.open(load.device, load.num_threads)
        with reserved(reserve):
            self.loaded: LoadedModel | None = load_model(load, phases)
        self.block_bytes = sum(shape.block_bytes(load.block_size) for shape in self.loaded.kv_shapes)
        self.num_blocks = self._size_kv(self.loaded)
        self.slots = Slots(
            load.max_num_seqs, self.loaded.max_model_len, load.block_size, self.loaded.vocab_size
        )
        self.caches: list[tuple[Tensor, Tensor]] = []
        self.allocate_kv()
        self.profile: Any = None

    @classmethod
    def start(
        cls, load: LoadModel, report: Callable[[str, float], None], reserve: Reserve | None = None
    ) -> tuple[Runner, Ready]:
        """Load, take memory and run a first step.

        report: hears of each phase and its seconds. reserve: memory for the weights.

        Raises:
            LoadError: the configuration cannot work, and why.
        """
        phases = Phases(report)
        runner = cls(load, phases, reserve)
        phases.end("kv")
        runner.warm_up()
        phases.end("warmup")
        return runner, runner.ready()

    def ready(self) -> Ready:
        """What was learned while loading."""
        loaded = self.model
        return Ready(
            architecture=loaded.architecture,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=self.device.name,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            num_blocks=self.num_blocks,
            bytes_per_block=self.block_bytes,
            weight_bytes=loaded.weight_bytes,
            eos_token_id=loaded.eos_token_id,
            startup_seconds=dict(self.phases.seconds),
            memory=self.memory(),
        )

    @property
    def model(self) -> LoadedModel:
        """The loaded model.

        Raises:
            RuntimeError: its weights are dropped.
        """
        if self.loaded is None:
            raise RuntimeError("the worker sleeps without weights: wake it up first")
        return self.loaded

    def memory(self) -> dict[str, int]:
        """Bytes: of the device, of this process, of weights and KV cache."""
        weights = 0 if self.loaded is None else self.loaded.weight_bytes
        kv = sum(k.nbytes + v.nbytes for k, v in self.caches)
        return {**self.device.memory(), "weights": weights, "kv_cache": kv}

    @torch.inference_mode()
    def step(self, plan: StepPlan, masks: Callable[[], Masks | None] = lambda: None) -> StepResult:
        """Run a plan: every row's tokens in one batch, then sample. `masks` waits for those of a masked plan."""
        self.slots.apply(plan)
        result = StepResult(plan.step_id, [])
        if not plan.rows:
            return result
        batch = build_batch(plan.rows, self.slots)
        model = self.model.model
        with self._span("model"):
            hidden = model.hidden_states(
                batch.input_ids, batch.positions, Paged(batch.attention, self.caches)
            )
        if batch.sample_rows:
            self._sample(plan, batch, hidden, masks, result)
        for i, row in enumerate(plan.rows):
            if row.num_prompt_logprobs:
                result.prompt_logprobs[i] = self._prompt_logprobs(row, hidden[batch.starts[i] :])
        return result

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of `methods.METHODS`.

        Raises:
            ValueError: no such method. Others: whatever the method raises.
        """
        if method not in METHODS:
            raise ValueError(f"the worker has no method {method!r}; it has {', '.join(sorted(METHODS))}")
        return METHODS[method](self, *args, **kwargs)

    def allocate_kv(self) -> None:
        """Take KV memory, zeroed.

        Raises:
            LoadError: there is not enough.
        """
        try:
            self.caches = [
                shape.allocate(self.num_blocks, self.load.block_size, self.device)
                for shape in self.model.kv_shapes
            ]
        except OSError as error:
            raise LoadError(
                f"cannot take {self.num_blocks * self.block_bytes} bytes of KV memory: {error}"
            ) from error
        self.device.populate([cache for pair in self.caches for cache in pair])

    def warm_up(self) -> None:
        """Run one token, so that no request pays for what happens only once. Writes nowhere that matters."""
        params = SamplingParams(temperature=0.0)
        self.step(StepPlan(-1, [Row(0, 0, 1, sample=True)], [SlotInit(0, [0], 1, [0], params, 0)]))
        self.step(StepPlan(-1, [], [], [0]))
        for k, v in self.caches:
            k[0].zero_()
            v[0].zero_()

    def _size_kv(self, loaded: LoadedModel) -> int:
        memory = self.device.memory()
        widest = min(self.load.max_num_batched_tokens, LOGIT_CHUNK // loaded.vocab_size + 1)
        headroom = widest * loaded.vocab_size * 8 + (256 << 20)
        budget = kv_budget(self.load, memory["available"], headroom)
        return num_kv_blocks(self.load, loaded.max_model_len, self.block_bytes, budget)

    def _span(self, name: str) -> AbstractContextManager[object]:
        """A part of a step in a profile, where the compiled kernels do not show."""
        return nullcontext() if self.profile is None else record_function(f"pagewire.{name}")

    def _sample(
        self,
        plan: StepPlan,
        batch: Batch,
        hidden: Tensor,
        masks: Callable[[], Masks | None],
        result: StepResult,
    ) -> None:
        """Sample, append to the slots, and fill in the result."""
        with self._span("logits"):
            logits = self.model.model.logits(hidden[batch.sample_indices])
        rows = [plan.rows[i] for i in batch.sample_rows]
        with self._span("masks"):
            allowed = TokenMasks.of(masks() if plan.masked else None, batch.sample_rows)
        with self._span("sample"):
            output = sample(logits, [self.slots.sampling[row.slot] for row in rows], allowed)
        for row, token_id in zip(rows, output.token_ids, strict=True):
            self.slots.append(row.slot, token_id)
        result.token_ids = output.token_ids
        result.logprobs = {batch.sample_rows[i]: found for i, found in output.logprobs.items()}
        result.errors = {batch.sample_rows[i]: error for i, error in output.errors.items()}

    def _prompt_logprobs(self, row: Row, hidden: Tensor) -> LogprobRows:
        """Log probabilities of what follows the row's first positions; hidden [n, H]: from its first token on."""
        k = self.slots.sampling[row.slot].params.prompt_logprobs or 0
        first = row.start + 1
        successors = self.slots.tokens[row.slot, first : first + row.num_prompt_logprobs].tolist()
        step = max(1, LOGIT_CHUNK // self.model.vocab_size)
        logits = [
            self.model.model.logits(hidden[start : min(start + step, len(successors))])
            for start in range(0, len(successors), step)
        ]
        return logprob_rows(torch.cat(logits), successors, k)


def timed_step(
    runner: Runner, plan: StepPlan, idle_since: float, masks: Callable[[], Masks | None] = lambda: None
) -> StepResult:
    """`runner.step`, with how long it took and how long the worker had waited since `idle_since`."""
    begin = time.monotonic()
    result = runner.step(plan, masks)
    result.busy_us = int((time.monotonic() - begin) * 1e6)
    result.idle_us = int((begin - idle_since) * 1e6)
    return result
