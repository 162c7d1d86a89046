"""A draft model: a smaller language model of the same vocabulary, which continues what the model has sampled.

It is loaded as any model is. Its KV cache has the same blocks by the same ids, so the core counts and shares one
kind of block. It runs when drafts are wanted: first over the tokens that it has not computed yet (a prompt, drafts
that were wrong, tokens of steps without drafts), then over one draft after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan, WorkerConfig
from pagewire.kernels.data.paging import Cache
from pagewire.workers.batch.slots import Slots
from pagewire.workers.device.interface import Device, TokenSampler
from pagewire.workers.errors import LoadError
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.speculation.coverage import Coverage
from pagewire.workers.speculation.interface import RowOver
from pagewire.workers.speculation.places import Places
from pagewire.workers.speculation.sampling import Draft, extend_drafts
from pagewire.workers.step.context import StepContext
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.cached_loading import keep_in_background, load


@dataclass(frozen=True)
class Run:
    """A row's part of a step of the drafter: it runs tokens [start, end), then drafts.

    row: its index in the step. index: its own among the runs, by which it has spare blocks.
    """

    row: int
    index: int
    slot: int
    start: int
    end: int
    draft: Draft


class DraftModel:
    """A drafter that is a language model; methods as in `interface.Drafter`."""

    follows = False

    def __init__(
        self,
        config: WorkerConfig,
        target: LoadedModel,
        num_drafts: int,
        slots: Slots,
        device: Device,
        sampler: TokenSampler,
        collective: Collective,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Load it.

        config: of the draft model. target: the model, whose vocabulary this one must have. num_drafts: that are
        wanted at most. slots, sampler: the model's own. collective: of the ranks that divide it, as
        `config.parallel` says. turn: a context for loading it.

        Raises:
            LoadError: it cannot be loaded, or has another vocabulary. IndivisibleError: see `Shards`.
        """
        self._config, self._num_drafts, self._slots = config, num_drafts, slots
        self._device, self._sampler, self._collective, self._turn = device, sampler, collective, turn
        self._loaded: LoadedModel | None = None
        self._num_blocks = 0
        self._coverage = Coverage(slots, 0)
        self.caches: list[Cache] = []
        self.load(target)
        shapes, size = self.model.kv_shapes, config.block_size
        self.name: str | None = self.model.architecture
        self.block_bytes = sum(shape.block_bytes(size) for shape in shapes)
        self._num_spare = -(-num_drafts // size)
        self.spare_bytes = config.max_num_seqs * self._num_spare * self.block_bytes

    @property
    def model(self) -> LoadedModel:
        """The loaded draft model.

        Raises:
            RuntimeError: its weights are dropped.
        """
        if self._loaded is None:
            raise RuntimeError("the weights of the draft model are dropped")
        return self._loaded

    @property
    def weight_bytes(self) -> int:
        """See `Drafter.weight_bytes`."""
        return 0 if self._loaded is None else self._loaded.weight_bytes

    def features(self, hidden: Tensor) -> Tensor | None:
        """Nothing: it starts from tokens."""
        return None

    def load(self, target: LoadedModel) -> None:
        """See `Drafter.load`."""
        if self._loaded is not None:
            return
        ahead = WeightsAhead(self._config)
        with self._turn():
            loaded = load(ahead, Phases(lambda name, seconds: None), self._device, self._collective)
        if loaded.vocab_size != target.vocab_size:
            raise LoadError(
                f"the draft model {self._config.model_path} has a vocabulary of {loaded.vocab_size} tokens, and "
                f"the model one of {target.vocab_size}: a draft model must have the model's vocabulary"
            )
        if loaded.state_shapes:
            raise LoadError(
                f"the draft model {self._config.model_path} has layers that keep states, which drafts would "
                "change: take one with attention only, or the method 'ngram'"
            )
        self._loaded = loaded
        keep_in_background(loaded, ahead, self._collective)

    def unload(self) -> None:
        """See `Drafter.unload`."""
        self._loaded = None

    def allocate(self, num_blocks: int) -> None:
        """See `Drafter.allocate`."""
        count = num_blocks + self._config.max_num_seqs * self._num_spare
        self.caches = self.model.allocate(count, self._config.block_size, self._device)
        self._num_blocks, self._coverage = num_blocks, Coverage(self._slots, num_blocks)

    def free(self) -> None:
        """See `Drafter.free`."""
        self.caches, self._coverage = [], Coverage(self._slots, 0)

    def apply(self, plan: StepPlan) -> None:
        """See `Drafter.apply`."""
        self._coverage.apply(plan)

    def propose(self, rows: Sequence[RowOver], features: Tensor | None) -> list[list[int]]:
        """See `Drafter.propose`. A row whose tokens do not fit into this step gets its drafts in a later one."""
        runs = self._runs(rows)
        drafts: list[list[int]] = [[] for _ in rows]
        if not runs:
            return drafts
        num_positions = max(run.end + max(run.draft.limit, 1) for run in runs) - 1
        slot_ids = [run.slot for run in runs]
        places = Places(self._slots, slot_ids, num_positions, self._num_blocks, self._num_spare, self._device)
        self._catch_up(runs, places)
        while active := [run for run in runs if run.draft.goes_on]:
            self._go_on(active, places)
        for run in runs:
            drafts[run.row] = run.draft.token_ids
            self._coverage.keep_drafts(run.slot, run.draft.token_ids[:-1])
        return drafts

    def _runs(self, rows: Sequence[RowOver]) -> list[Run]:
        """The parts of a step, of at most as many tokens as a step of the model has."""
        runs: list[Run] = []
        budget = self._config.max_num_batched_tokens
        for index, row in enumerate(rows):
            slot, num_tokens = row.slot, int(self._slots.num_tokens[row.slot])
            limit = min(row.num_drafts, self._num_drafts, self.model.max_model_len - num_tokens)
            if limit < 1 or budget < 1:
                continue
            start = self._coverage.first_missing(slot)
            end = min(num_tokens, start + budget)
            budget -= end - start
            self._coverage.extend(slot, end)
            draft = Draft(self._slots.sampling[slot], limit if end == num_tokens else 0)
            runs.append(Run(index, len(runs), slot, start, end, draft))
        return runs

    def _catch_up(self, runs: Sequence[Run], places: Places) -> None:
        """Run what is missing of the runs' tokens, and draw first drafts."""
        tokens = self._slots.tokens
        input_ids = np.concatenate([tokens[run.slot, run.start : run.end] for run in runs])
        input_ids = self._slots.in_vocabulary(input_ids)
        lengths = [run.end - run.start for run in runs]
        hidden = self._forward(runs, places, input_ids, [run.start for run in runs], lengths)
        whole = [run for run in runs if run.draft.goes_on]
        if not whole:
            return
        lasts = np.cumsum(lengths)[[run.index for run in whole]] - 1
        self._draw(whole, hidden.index_select(0, torch.from_numpy(lasts).to(hidden.device)))

    def _go_on(self, runs: Sequence[Run], places: Places) -> None:
        """Run the last draft of each run, and draw the next one."""
        input_ids = np.array([run.draft.token_ids[-1] for run in runs], np.int64)
        starts = [run.end + len(run.draft.token_ids) - 1 for run in runs]
        self._draw(runs, self._forward(runs, places, input_ids, starts, [1] * len(runs)))

    def _draw(self, runs: Sequence[Run], hidden: Tensor) -> None:
        """Draw the next draft of each run from hidden states [n, H]."""
        logits = self.model.model.logits(hidden)
        extend_drafts(self._sampler, logits, [run.draft for run in runs])

    def _forward(
        self,
        runs: Sequence[Run],
        places: Places,
        input_ids: NDArray[np.int64],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:
        """Final hidden states [T, H] of tokens [start, start + length) of each run."""
        positions, batch = places.tensors([run.index for run in runs], starts, lengths)
        (ids,) = self._device.upload([torch.from_numpy(input_ids)])
        if short := self.model.short_length:  # of a long sequence, too: it only guesses
            positions = positions + short * (positions >= short)
        step = StepContext(batch, positions, self.caches)
        return self.model.model.hidden_states(ids, step)
