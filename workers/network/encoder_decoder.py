"""An encoder and a decoder of transformers, as the base of a model that runs both within the same steps."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.data.paging import AttentionBatch
from pagewire.workers.caches.kv import Pages, in_pages
from pagewire.workers.caches.sources import EncodedRow, Features, SourceBatch
from pagewire.workers.network.module_base import Arithmetic
from pagewire.workers.network.road import ENCODER_DECODER, Road
from pagewire.workers.seq2seq.methods import cross_heads, cross_layers
from pagewire.workers.step.context import StepContext


class EncoderDecoder:
    """The base of an encoder-decoder, see `ModelBase`.

    A row that is a source runs the encoder as a whole, and stores keys and values of its states for each layer of
    the decoder. The other rows run the decoder.

    features: of a model that hears; None: sources are tokens.
    """

    def __init__(self, encoder: Any, decoder: Any, arithmetic: Arithmetic, features: Features | None) -> None:
        self.encoder, self.decoder = encoder, decoder
        self.cross = cross_layers(decoder)
        self._arithmetic, self._features = arithmetic, features
        self._pages = Pages()
        self.network, self.road, self.embedding_size = None, Road(None, ENCODER_DECODER), 0
        self._placed = "position_ids" in inspect.signature(decoder.forward).parameters

    @property
    def name(self) -> str:
        """That of the decoder's class."""
        return type(self.decoder).__name__

    @property
    def words(self) -> Any:
        """The module that looks the target's tokens up."""
        return self.decoder.embed_tokens

    @property
    def tables(self) -> list[Any]:
        """See `ModelBase`: both halves."""
        return [self.encoder, self.decoder]

    def __call__(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Hidden states [T, H] of the tokens int64 [T] of a step; those of sources are 0."""
        sources = step.sources
        assert sources is not None, "the step is of an encoder-decoder"
        with self._arithmetic():
            for row in sources.rows:
                self._encode(row, input_ids, step)
            if not len(sources.targets):
                return torch.zeros(
                    len(input_ids), self._width, dtype=self.decoder.dtype, device=input_ids.device
                )
            states = self._decode(input_ids, sources, step)
        if len(states) == len(input_ids):
            return states
        return states.new_zeros(len(input_ids), states.shape[1]).index_copy(0, sources.targets, states)

    @property
    def _width(self) -> int:
        size: int = self.words.weight.shape[1]
        return size

    def _encode(self, row: EncodedRow, input_ids: Tensor, step: StepContext) -> None:
        length, device = row.source.length, input_ids.device
        own = StepContext(alone(length, device), torch.arange(length, device=device), starts=[0])
        own.use(self._pages)
        places = slice(row.first, row.first + length)
        with own:
            states = (
                self.encoder(input_ids=input_ids[None, places])
                if self._features is None
                else self.encoder(self._features(row.source).to(device, self.encoder.dtype))
            )[0][0]
        kv_slots = step.batch.slot_mapping[places]
        for layer, (attention, names) in enumerate(self.cross):
            keys, values = cross_heads(attention, names, states)
            step.store(layer, keys, values, kv_slots)

    def _decode(self, input_ids: Tensor, sources: SourceBatch, step: StepContext) -> Tensor:
        own = step.within(sources.attention, sources.positions)
        placed = {"position_ids": sources.positions[None]} if self._placed else {}
        # What cross-attention would make keys of, which are in the cache.
        unread = torch.empty(1, 1, self._width, dtype=self.decoder.dtype, device=input_ids.device)
        with own:
            output = self.decoder(
                input_ids=input_ids[sources.targets][None],
                encoder_hidden_states=unread,
                use_cache=False,
                **placed,
            )
        return output[0][0]  # type: ignore[no-any-return]


def alone(length: int, device: torch.device) -> AttentionBatch:
    """The batch of one prompt that is encoded, on a device."""
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(length, dtype=torch.int64),
        max_query_len=length,
        max_seq_len=length,
    )
    paged = in_pages(batch, torch.arange(length))
    return paged.with_tensors([tensor.to(device) for tensor in paged.tensors])
