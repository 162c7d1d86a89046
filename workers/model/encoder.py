"""Encoders: models whose tokens attend to later ones, too, and which keep no keys and values.

All prompts of a step run as one packed sequence, without padding: one call of attention over all of them. The
keys and values of a layer lie in pages that the next layer overwrites. A model with attention of its own
(DeBERTa's, and MPNet's where its layers are no stack) runs prompt by prompt instead; its products use our kernels
all the same.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.attention import WHOLE, AttentionBatch
from pagewire.workers.model.attention import KVShape, StepContext
from pagewire.workers.model.encoder_stack import EncoderStack
from pagewire.workers.model.overlay import laid_over
from pagewire.workers.model.pooling_model import PoolingModel, position_offset

PAGE = 16  # tokens


class Pages:
    """Memory for the keys and values of one layer at a time: [num_pages, num_kv_heads, PAGE, size] each."""

    def __init__(self) -> None:
        self._caches: dict[KVShape, tuple[Tensor, Tensor]] = {}

    def of(self, shape: KVShape, num_pages: int) -> tuple[Tensor, Tensor]:
        """K and V of at least `num_pages` pages, on the CPU."""
        caches = self._caches.get(shape)
        if caches is None or len(caches[0]) < num_pages:
            sizes = (shape.head_dim, shape.v_head_dim)
            k, v = (torch.zeros(num_pages, shape.num_kv_heads, PAGE, n, dtype=shape.dtype) for n in sizes)
            caches = self._caches[shape] = k, v
        return caches


class EncoderStep(StepContext):
    """A step of an encoder. batch: of whole prompts. token_types: int64 [T]; None: all 0."""

    __slots__ = ("lengths", "num_pages", "pages", "token_types")

    def __init__(
        self, batch: AttentionBatch, positions: Tensor, pages: Pages, token_types: Tensor | None = None
    ) -> None:
        self.lengths: list[int] = batch.query_start_loc.diff().tolist()
        self.pages, self.token_types = pages, token_types
        counts = torch.tensor([-(-length // PAGE) for length in self.lengths], dtype=torch.int64)
        self.num_pages = int(counts.sum())
        firsts = counts.cumsum(0) - counts
        table = firsts[:, None] + torch.arange(int(counts.max()))
        slots = torch.repeat_interleave(firsts * PAGE, torch.tensor(self.lengths)) + positions
        own = AttentionBatch(
            query_start_loc=batch.query_start_loc,
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            block_table=table.clamp(max=self.num_pages - 1).int(),
            slot_mapping=slots,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_query_len,
        )
        super().__init__(own, positions, [])

    def cache(self, layer: int, shape: KVShape, window: int | None) -> tuple[Tensor, Tensor]:
        """Pages for the keys and values of a layer, until the next one takes them."""
        return self.pages.of(shape, self.num_pages)

    def future(self, window: int | None) -> int:
        """All keys, or those of a window to each side that has the query's own in it."""
        return WHOLE if window is None else window - 1


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
        self, batch: AttentionBatch, positions: Tensor, token_types: Tensor | None = None
    ) -> EncoderStep:
        """The context of a step. positions: int64 [T], from 0 on in each prompt."""
        return EncoderStep(batch, positions, self._pages, token_types)

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
