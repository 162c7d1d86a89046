"""Steps of decoding in one call: see decode.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.cpu.embeddings import Beginning, RowTable, angle_tables, are_rows
from pagewire.kernels.cpu.experts import is_packed, matrix
from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.stack import CompiledStack
from pagewire.kernels.cpu.tensors import norm_struct
from pagewire.kernels.data.deltas import AdaptedLinear
from pagewire.kernels.data.layer import Angles, Norm
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.data.weight import Linear, Weight

DecodeSlot, DecodeCall, InputsParameters = map(structure, ("DecodeSlot", "DecodeCall", "LayerInputs"))


@dataclass(frozen=True)
class SequenceArrays:
    """What the sequences of a worker's slots are; the arrays stay the same ones.

    tokens: int64 [slots, max_tokens]. num_tokens, long_from: int64 [slots]. block_table: int32 [slots, max_blocks].
    """

    tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    long_from: NDArray[np.int64]
    block_table: NDArray[np.int32]


@dataclass(frozen=True)
class TokenInputs:
    """What layers get of tokens beside states, [L, P] of each: (norm(projected) + looked up) * scale.

    words: [V or more, L P], whose numbers are multiplied by factor. projection: [H] to [L P], multiplied by
    projection_scale. norm: of the P numbers of a layer.
    """

    words: Weight
    factor: float
    projection: Linear
    projection_scale: float
    norm: Norm
    scale: float

    @property
    def size(self) -> int:
        """Numbers that a layer gets, P."""
        return len(self.norm.weight)

    def fit(self, stack: CompiledStack, num_tokens: int) -> bool:
        """True if decode.cpp makes what the layers get, for tokens below a number."""
        projection = self.projection
        if not is_packed(projection) or isinstance(projection, AdaptedLinear):
            return False
        if {projection.dtype, self.norm.weight.dtype} != {stack.dtype}:
            return False
        rows, width = self.words.shape
        return (
            are_rows([self.words], [], stack.dtype)
            and rows >= num_tokens
            and width == projection.out_features
        )


@dataclass(frozen=True)
class DecoderParts:
    """What a step runs: what tokens begin with; layers with their caches; the output layer.

    angles: cosines and sines [P, rot_dim] by position, of each kind. logit_scale, softcap: see `Kernels.cap`.
    states: of each layer, see `MixerStates`; None: none keeps some. inputs: None: layers get states alone.
    """

    beginning: Beginning
    angles: Sequence[Angles]
    stack: CompiledStack
    caches: Sequence[Cache | None]
    head: Linear
    logit_scale: float = 1.0
    softcap: float | None = None
    states: Sequence[Sequence[Tensor]] | None = None
    inputs: TokenInputs | None = None

    @property
    def fit(self) -> bool:
        """True if the layers are one call, and the others are of their dtype and of kinds that decode.cpp knows."""
        begins, head = self.beginning, self.head
        rows = begins.words
        if not self.stack.is_single or not is_packed(head) or isinstance(head, AdaptedLinear):
            return False
        if rows.shape[0] < head.out_features or rows.shape[1] != head.in_features:
            return False
        if self.inputs is not None and not self.inputs.fit(self.stack, head.out_features):
            return False
        return head.dtype == self.stack.dtype and begins.fit(self.angles, self.stack.dtype)


class CompiledDecoder:
    """Embedding, layers, output layer and sampling of rows that each run one token, several steps in one call."""

    @classmethod
    def of(cls, parts: DecoderParts, sequences: SequenceArrays) -> CompiledDecoder | None:
        """None if the parts do not `fit`."""
        return cls(parts, sequences) if parts.fit else None

    def __init__(self, parts: DecoderParts, sequences: SequenceArrays) -> None:
        self._parts = parts
        if parts.states is not None:
            parts.stack.states.point_to(parts.states)
        begins, angles, head = parts.beginning, parts.angles, parts.head
        self._rows, self._tables = RowTable(begins.words, begins.factor), angle_tables(angles)
        self._positions = None if begins.positions is None else RowTable(begins.positions)
        self._sequences = sequences
        self.slots = (DecodeSlot * len(sequences.tokens))()
        """How the sequence of each slot goes on; see `DecodeSlot` in kernels.h."""
        self._call = DecodeCall(
            head=matrix(head),
            logit_scale=parts.logit_scale,
            softcap=parts.softcap or 0.0,
            embeddings=self._rows.struct,
            tables=ctypes.addressof(self._tables),
            num_tables=len(angles),
            sequences=ctypes.addressof(self.slots),
            tokens=sequences.tokens.ctypes.data,
            num_tokens=sequences.num_tokens.ctypes.data,
            long_from=sequences.long_from.ctypes.data,
            block_table=sequences.block_table.ctypes.data,
            max_tokens=sequences.tokens.shape[1],
            max_blocks=sequences.block_table.shape[1],
        )
        if self._positions is not None:
            self._call.positions = self._positions.struct
        if begins.norm is not None:
            self._call.norm = norm_struct(begins.norm, begins.words.shape[1], head.dtype)
        if (inputs := parts.inputs) is not None:
            self._input_rows = RowTable(inputs.words, inputs.factor)
            self._call.inputs = InputsParameters(
                words=self._input_rows.struct,
                projection=matrix(inputs.projection),
                norm=norm_struct(inputs.norm, inputs.size, head.dtype),
                size=inputs.size,
                projection_scale=inputs.projection_scale,
                scale=inputs.scale,
            )
        self._capacity = 0
        self._held: object = None
        self._hidden = torch.empty(0)

    def __call__(
        self,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_steps: int,
        descriptors: NDArray[np.int32],
        states: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int64]:
        """The tokens that rows sample, int64 [steps, R]; they are in the slots' sequences already.

        There are fewer than num_steps where a row has sampled one of its ends, or a descriptor became readable, and
        where a row's logits cannot be sampled: the step in which that is so, which may be the first, has not been.

        Args:
            slots: [R]. starts: [R], the place of the token that each runs first; it is known.
            num_steps: from 1 on; there are blocks for them. descriptors: [at most 2].
            states: [R, 2], the state slot that each reads first, and the one that all of its steps write; None: the
                layers keep no states.

        Raises:
            ValueError: lengths or block numbers do not fit the caches, or sequences become too long.
        """
        num_rows, call = len(slots), self._call
        if starts.max() + num_steps >= call.max_tokens:
            raise ValueError(f"{num_steps} steps from {starts.max()} on for at most {call.max_tokens} tokens")
        if num_rows > self._capacity or num_rows * 4 < self._capacity:
            self._reserve(num_rows)
        if (states is not None) != self.keeps_states:
            raise ValueError("rows of layers that keep states have state slots, and no others")
        chosen = np.empty((num_steps, num_rows), np.int64)
        call.slots, call.starts, call.rows, call.steps = (
            slots.ctypes.data,
            starts.ctypes.data,
            num_rows,
            num_steps,
        )
        call.chosen = chosen.ctypes.data
        call.states = None if states is None else states.ctypes.data
        call.descriptors, call.num_descriptors = descriptors.ctypes.data, len(descriptors)
        done = self._parts.stack.library.pagewire_decode(ctypes.byref(call))
        if done < 0:
            raise ValueError("lengths, slots or block numbers of the batch do not fit its tensors")
        return chosen[:done]

    @property
    def keeps_states(self) -> bool:
        """True if its layers keep states, so that rows have state slots."""
        return self._parts.states is not None

    @property
    def hidden(self) -> Tensor:
        """Hidden states [R, H] of the last step's rows, or more: also of one that could not be sampled."""
        return self._hidden

    def _reserve(self, num_rows: int) -> None:
        """Take memory for steps of this many rows."""
        parts, head = self._parts, self._parts.head
        inputs, looked_up = (
            (None, None) if parts.inputs is None else self._input_memory(parts.inputs, num_rows)
        )
        stack, held, self._hidden = parts.stack.call_for(num_rows, parts.angles, parts.caches, inputs=inputs)
        logits = torch.empty(num_rows, head.out_features, dtype=head.dtype)
        self._call.stack, self._call.logits = ctypes.addressof(stack), logits.data_ptr()
        self._held, self._capacity = (stack, held, logits, inputs, looked_up), num_rows

    def _input_memory(self, inputs: TokenInputs, num_rows: int) -> tuple[Tensor, Tensor]:
        """Memory for what layers get of rows, [R, L, P], and for rows of the table of it."""
        shape = num_rows, inputs.projection.out_features // inputs.size, inputs.size
        made, looked_up = torch.empty(2, *shape, dtype=inputs.projection.dtype)
        self._call.inputs.looked_up = looked_up.data_ptr()
        return made, looked_up
