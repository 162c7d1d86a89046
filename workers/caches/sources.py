"""The sources of a step of an encoder-decoder: those that it encodes, and those to which its other tokens attend.

A sequence of such a model begins with its source, filled up to whole KV blocks. These hold what cross-attention
reads: keys and values of the encoder's states, for each layer of the decoder. The target, whose tokens the decoder
runs, follows in blocks of its own, and counts its positions from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from pagewire.kernels.data.paging import AttentionBatch


class EncodedSource(Protocol):
    """What the encoder reads of a sequence: a `SlotSource`."""

    @property
    def length(self) -> int:
        """The positions that the encoder makes of it."""
        ...


Features: TypeAlias = Callable[[EncodedSource], Tensor]
"""What the encoder of a sound takes, float32 [1, bins, frames]."""


class EncodedRow(NamedTuple):
    """A row of a step that is a source: its first token in the batch, and what it is."""

    first: int
    source: EncodedSource


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """The rows of a step that are sources, and the others' attention.

    targets: int64 [n], the places of the targets' tokens in the batch; none in a step that encodes only.
    positions: int64 [n], of these tokens in their targets.
    attention: of the targets to themselves. cross: of each of their tokens, as a request of its own, to its source.
    """

    rows: tuple[EncodedRow, ...]
    targets: Tensor
    positions: Tensor
    attention: AttentionBatch
    cross: AttentionBatch

    @classmethod
    def of(
        cls, batch: AttentionBatch, sources: Sequence[EncodedSource | None], block_size: int
    ) -> SourceBatch:
        """That of the R requests of a batch on the host, each its whole source, tokens of its target, or both.

        sources: of each; None: it has none, as steps that warm a model up.
        """
        lengths = torch.tensor([0 if source is None else source.length for source in sources])
        num_blocks = -(-lengths // block_size)
        firsts, counts = batch.query_start_loc[:-1].long(), batch.query_start_loc.diff().long()
        starts = batch.seq_lens.long() - counts - num_blocks * block_size
        encoded = tuple(
            EncodedRow(first, source)
            for first, start, source in zip(firsts.tolist(), starts.tolist(), sources, strict=True)
            if start < 0 and source is not None
        )
        before = (-starts).clamp_min(0)  # a row may go on behind its source
        own = (counts > before).nonzero()[:, 0]
        counts, starts, firsts = (counts - before)[own], starts[own].clamp_min(0), (firsts + before)[own]
        ends = counts.cumsum(0)
        # A number for each token that counts from 0 in its row.
        places = torch.arange(int(counts.sum())) - (ends - counts).repeat_interleave(counts)
        targets = firsts.repeat_interleave(counts) + places
        of_token = own.repeat_interleave(counts)
        columns = torch.arange(batch.block_table.shape[1])
        table = batch.block_table[own].gather(
            1, (num_blocks[own, None] + columns).clamp_max(batch.block_table.shape[1] - 1)
        )
        longest = int((starts + counts).max()) if len(own) else 0
        widest = int(num_blocks[own].max()) if len(own) else 0
        return cls(
            encoded,
            targets,
            starts.repeat_interleave(counts) + places,
            AttentionBatch(
                query_start_loc=torch.cat([ends.new_zeros(1), ends]).int(),
                seq_lens=(starts + counts).int(),
                block_table=table,
                slot_mapping=batch.slot_mapping[targets],
                max_query_len=int(counts.max()) if len(own) else 0,
                max_seq_len=longest,
            ),
            AttentionBatch(
                query_start_loc=torch.arange(len(targets) + 1, dtype=torch.int32),
                seq_lens=lengths[of_token].clamp_min(1).int(),
                block_table=batch.block_table[of_token, : max(widest, 1)].contiguous(),
                slot_mapping=torch.full_like(targets, -1),
                max_query_len=1,
                max_seq_len=max(1, int(lengths.max())),
            ),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the device reads, in the order that `with_tensors` takes."""
        return [self.targets, self.positions, *self.attention.tensors, *self.cross.tensors]

    def with_tensors(self, tensors: Sequence[Tensor]) -> SourceBatch:
        """A copy with other `tensors`, such as their copies on the device."""
        targets, positions, *others = tensors
        return replace(
            self,
            targets=targets,
            positions=positions,
            attention=self.attention.with_tensors(others[:4]),
            cross=self.cross.with_tensors(others[4:]),
        )
