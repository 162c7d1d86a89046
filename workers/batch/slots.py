"""The worker's state of each running sequence: one row per slot, updated by every plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.sources import SourceInfo
from pagewire.ipc.wire.tasks import restore_tasks
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.workers.caches.slot_source import SlotSource
from pagewire.workers.caches.sources import SourceBatch
from pagewire.workers.network.pooler import PoolingSlot
from pagewire.workers.sample.logit_edits import NO_TOKEN
from pagewire.workers.sample.sampler import SamplingSlot


class Slots:
    """Token histories and block tables, one row per slot.

    tokens: int64 [max_num_seqs, max_model_len + 1]; num_tokens: int64 [max_num_seqs].
    block_table: int32 [max_num_seqs, blocks of max_model_len tokens]; num_blocks: int64 [max_num_seqs].
    num_used_blocks: up to the last KV block that any slot has had.
    adapters: int64 [max_num_seqs], the index of each one's adapter; 0 for none.
    long_from: int64 [max_num_seqs]: what the positions of long sequences are raised by, to be rows in tables of
        angles (`RotaryTable`); 0 for short ones. A sequence is long if its slot was filled with more tokens than
        `short_length`, unless that is 0.
    sampling: the sampler's state of each slot in use. pooling: likewise, of prompts that are pooled.
    sources: likewise, of an encoder-decoder.

    with_histories: logits processors need the tokens of every sequence, not only of those that name one.
    num_extra_tokens: those that an adapter, by its index, brings behind the vocabulary; None: none do.

    The arrays may be large: np.zeros leaves it to the system to allocate each page when it is first written.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_extra_tokens: Callable[[int], int] | None = None,
        short_length: int = 0,
        with_histories: bool = False,
        source_info: SourceInfo | None = None,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size, self.vocab_size = block_size, vocab_size
        self._num_extra_tokens = num_extra_tokens or (lambda adapter: 0)
        self.short_length, self._with_histories = short_length, with_histories
        self.tokens: NDArray[np.int64] = np.zeros((max_num_seqs, max_model_len + 1), np.int64)
        self.num_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.block_table: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.num_used_blocks = 0
        self.adapters: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.long_from: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.sampling: dict[int, SamplingSlot] = {}
        self.pooling: dict[int, PoolingSlot] = {}
        self.sources: dict[int, SlotSource] = {}
        self._source_info = source_info

    def in_vocabulary(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids for what knows no tokens of adapters: the last id of the vocabulary stands for these."""
        return np.minimum(token_ids, self.vocab_size - 1)

    def apply(self, plan: StepPlan, *, with_tokens: bool = False) -> None:
        """Free slots, fill slots, then append the rows' new blocks.

        with_tokens: append the tokens that rows bring, which the last stage of a pipeline has sampled.
        """
        for slot in plan.freed_slots:
            self.sampling.pop(slot, None)
            self.pooling.pop(slot, None)
            self.sources.pop(slot, None)
        restore_tasks(plan.inits)
        for init in plan.inits:
            self._fill(init)
        for row in plan.rows:
            if row.new_block_ids:
                self._add_blocks(row)
            if with_tokens:
                for token_id in row.token_ids:
                    self.append(row.slot, token_id)

    def append(self, slot: int, token_id: int) -> None:
        """Append a sampled token to a slot's sequence. A plan that was made before it was known may run it next."""
        self.tokens[slot, self.num_tokens[slot]] = token_id
        self.num_tokens[slot] += 1
        self.sampling[slot].append(token_id)

    def clear(self) -> None:
        """Drop the state of all sequences; what the KV blocks hold is lost, too."""
        self.num_used_blocks = 0
        self.sampling.clear()
        self.pooling.clear()
        self.sources.clear()

    def source_batch(self, batch: AttentionBatch, rows: Sequence[Row]) -> SourceBatch | None:
        """The sources of a step's rows; None if the model is no encoder-decoder.

        batch: its attention, on the host.
        """
        if self._source_info is None:
            return None
        return SourceBatch.of(batch, [self.sources.get(row.slot) for row in rows], self.block_size)

    def _fill(self, init: SlotInit) -> None:
        if self._source_info is not None and init.media:
            self.sources[init.slot] = SlotSource.of(init.media[0], self._source_info)
        slot, num_tokens = init.slot, len(init.token_ids)
        self.tokens[slot, :num_tokens] = init.token_ids
        self.num_tokens[slot] = num_tokens
        self.block_table[slot, : len(init.block_ids)] = init.block_ids
        self.num_blocks[slot] = len(init.block_ids)
        self._use(init.block_ids)
        self.adapters[slot] = init.adapter
        self.long_from[slot] = self.short_length if num_tokens > self.short_length else 0
        if isinstance(init.task, PoolingParams):
            self.pooling[slot] = PoolingSlot(init.task, init.num_prompt_tokens)
            return
        assert isinstance(init.task, SamplingParams), "the tasks of a plan are restored first"
        self.sampling[slot] = SamplingSlot(
            init.task,
            init.seed,
            init.stop_ids,
            history(self.tokens[slot], init.media),
            init.num_prompt_tokens,
            num_tokens,
            self.vocab_size + self._num_extra_tokens(init.adapter),
            with_history=self._with_histories or bool(init.task.logits_processors),
        )

    def _add_blocks(self, row: Row) -> None:
        first = self.num_blocks[row.slot]
        last = first + len(row.new_block_ids)
        self.block_table[row.slot, first:last] = row.new_block_ids
        self.num_blocks[row.slot] = last
        self._use(row.new_block_ids)

    def _use(self, block_ids: Sequence[int]) -> None:
        self.num_used_blocks = max(self.num_used_blocks, 1 + max(block_ids, default=-1))


def history(tokens: NDArray[np.int64], media: Sequence[Media]) -> NDArray[np.int64]:
    """The tokens of a sequence as the sampler takes them: `NO_TOKEN` where embeddings take the place of tokens.

    The tokens that stand for a picture count, as they do in transformers.
    """
    brought = [medium for medium in media if medium.embeddings]
    if not brought:
        return tokens
    tokens = tokens.copy()
    for medium in brought:
        tokens[medium.start : medium.end] = NO_TOKEN
    return tokens


class Relay:
    """The last sampled token of each slot, on the device: step N+1 is launched before the host has step N's.

    tokens: int64 [max_num_seqs].
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def keep(self, slots: Tensor, token_ids: Tensor) -> None:
        """Store the tokens int64 [n] sampled for slots int64 [n]."""
        self.tokens.index_copy_(0, slots, token_ids)

    def fill(self, input_ids: Tensor) -> Tensor:
        """`input_ids` int64 [T], with placeholders -1 - slot (see `batch.Batch`) replaced by the slots' tokens."""
        return torch.where(input_ids < 0, self.tokens[(-1 - input_ids).clamp_min(0)], input_ids)
