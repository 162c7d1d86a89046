"""Encoders: models whose tokens attend to later ones, too, and which keep no keys and values.

All prompts of a step run as one packed sequence, without padding: one call of attention over all of them. The
keys and values of a layer lie in pages that the next layer overwrites. A model with attention of its own
(DeBERTa's, and MPNet's where its layers are no stack) runs prompt by prompt instead; its products use our kernels
all the same. Which pages a prompt has is decided on the host (`in_pages`), so that on a GPU nothing waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.paging import AttentionBatch, Cache, LogitTerms
from pagewire.workers.model.attention import KVShape, StepContext
from pagewire.workers.model.encoder_stack import EncoderStack
from pagewire.workers.model.overlay import laid_over
from pagewire.workers.model.pooling_model import PoolingModel, position_offset

PAGE = 16  # tokens


class Pages:
    """Memory for the keys and values of one layer at a time: [num_pages, num_kv_heads, PAGE, size] each."""

    def __init__(self) -> None:
        self._caches: dict[KVShape, Cache] = {}

    def of(self, shape: KVShape, num_pages: int, device: torch.device) -> Cache:
        """A cache of at least `num_pages` pages on a device, which is always the same one."""
        cache = self._caches.get(shape)
        if cache is None or len(cache.k) < num_pages:
            sizes = (shape.head_dim, shape.v_head_dim)
            k, v = (
                torch.zeros(num_pages, shape.num_kv_heads, PAGE, size, dtype=shape.dtype, device=device)
                for size in sizes
            )
            cache = self._caches[shape] = Cache(k, v)
        return cache


def in_pages(batch: AttentionBatch, positions: Tensor) -> AttentionBatch:
    """A batch of whole prompts with pages for the keys and values of each, one behind the other; on the host.

    positions: int64 [T], from 0 on in each prompt.
    """
    lengths = batch.query_start_loc.diff().long()
    counts = -(-lengths // PAGE)
    firsts, num_pages = counts.cumsum(0) - counts, int(counts.sum())
    table = firsts[:, None] + torch.arange(int(counts.max()))
    return AttentionBatch(
        query_start_loc=batch.query_start_loc,
        seq_lens=lengths.int(),
        block_table=table.clamp(max=num_pages - 1).int(),
        slot_mapping=torch.repeat_interleave(firsts * PAGE, lengths) + positions,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_query_len,
    )


class EncoderStep(StepContext):
    """A step of an encoder.

    batch: of whole prompts `in_pages`. lengths: of the prompts. token_types: int64 [T]; None: all 0.
    """

    __slots__ = ("lengths", "num_pages", "pages", "token_types")

    def __init__(
        self,
        batch: AttentionBatch,
        positions: Tensor,
        pages: Pages,
        lengths: Sequence[int],
        token_types: Tensor | None = None,
    ) -> None:
        super().__init__(batch, positions, [])
        self.pages, self.lengths, self.token_types = pages, list(lengths), token_types
        self.num_pages = sum(-(-length // PAGE) for length in lengths)

    def cache(self, layer: int, shape: KVShape, window: int | None) -> Cache:
        """Pages for the keys and values of a layer, until the next one takes them."""
        return self.pages.of(shape, self.num_pages, self.positions.device)

    def future(self, window: int | None) -> int:
        """All keys, or those of a window to each side that has the query's own in it."""
        return LogitTerms.two_sided(window).future


class EncoderModel(PoolingModel):
    """A pooling model that is an encoder.

    packed: its prompts run as one sequence. offset: the position of a prompt's first token.
    token_types: it tells the two texts of a pair apart.
    """

    def __init__(self, module: Any, batch_invariant: bool, offset: int, packed: bool) -> None:
        super().__init__(module, batch_invariant)
        self.guarded = not isinstance(self.base, EncoderStack)
        self.use(offset, packed)

    def use(self, offset: int, packed: bool) -> None:
        """Take over how prompts are given to `base`."""
        self.offset, self.packed = offset, packed
        self._pages = Pages()
        self._accepts = set(inspect.signature(self.base.forward).parameters)
        self.token_types = takes_token_types(self.base)

    @property
    def embedding_size(self) -> int:
        """See `Model.embedding_size`: none where each prompt looks up its own tokens."""
        return super().embedding_size if self.packed else 0

    def context(
        self,
        batch: AttentionBatch,
        positions: Tensor,
        starts: Sequence[int],
        token_types: Tensor | None = None,
    ) -> EncoderStep:
        """The context of a step.

        batch: `in_pages`. positions: int64 [T], from 0 on in each prompt. starts: of the prompts in the batch.
        token_types: see `EncoderStep`.
        """
        lengths = [end - start for start, end in pairwise([*starts, len(positions)])]
        return EncoderStep(batch, positions, self._pages, lengths, token_types)

    def hidden_states(self, input_ids: Tensor, step: StepContext, received: Tensor | None = None) -> Tensor:
        """See `Model.hidden_states`. It has no stages, so nothing is received."""
        assert isinstance(step, EncoderStep) and received is None
        types = torch.zeros_like(input_ids) if step.token_types is None else step.token_types
        inputs = {
            "input_ids": input_ids,
            "position_ids": step.positions + self.offset,
            "token_type_ids": types,
        }
        inputs = {name: value[None] for name, value in inputs.items() if name in self._accepts}
        if not self.token_types:
            inputs.pop("token_type_ids", None)
        with step, laid_over(self.base, step.overlay), self.arithmetic() if self.guarded else nullcontext():
            if self.packed:
                return self.base(**inputs)[0][0]  # type: ignore[no-any-return]
            parts = [torch.split(x, step.lengths, dim=1) for x in inputs.values()]
            each = [dict(zip(inputs, part, strict=True)) for part in zip(*parts, strict=True)]
            return torch.cat([self.base(**part)[0][0] for part in each])


def takes_token_types(base: Any) -> bool:
    """True if the model has embeddings of more than one token type."""
    table = getattr(getattr(base, "embeddings", None), "token_type_embeddings", None)
    return table is not None and table.weight.shape[0] > 1


def max_positions(config: Any, base: Any) -> int | None:
    """The tokens for which an encoder has positions; None where the configuration does not say."""
    value = getattr(config, "max_position_embeddings", None)
    return value - position_offset(base) if isinstance(value, int) and value > 0 else None
