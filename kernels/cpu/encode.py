"""Whole prompts of an encoder in one call: see encode.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.cpu.embeddings import RowTable, angle_tables, are_rows
from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.stack import CompiledStack
from pagewire.kernels.cpu.tensors import norm_struct
from pagewire.kernels.data.layer import Angles, LayerNorm, Norm
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.data.weight import DENSE, Weight

EncodeCall = structure("EncodeCall")

LEAST_TOKENS = 64
"""The fewest that memory is taken for."""


@dataclass(frozen=True)
class EncoderParts:
    """What makes states of prompts: tables that are added up, the norm of their sum, and layers.

    words: [V, H], dense or integers. types, positions: [2 or more, H] and [P, H], dense; None: there are none.
    angles: cosines and sines [P, rot_dim] by position, of each kind.
    pages: the layers' caches, for at least so many pages of `page` tokens: memory of one layer that all use.
    first_position: of a prompt's first token.
    """

    words: Weight
    types: Weight | None
    positions: Weight | None
    norm: Norm | LayerNorm | None
    angles: Sequence[Angles]
    stack: CompiledStack
    pages: Callable[[int], Sequence[Cache]]
    page: int
    first_position: int

    @property
    def fit(self) -> bool:
        """True if the layers are one call, and the others are of their dtype and of kinds that encode.cpp knows."""
        added = [table for table in (self.types, self.positions) if table is not None]
        return (
            self.stack.is_single
            and all(table.scheme is DENSE and table.shape[1] == self.words.shape[1] for table in added)
            and are_rows([self.words, *added], self.angles, self.stack.dtype)
        )

    @property
    def num_positions(self) -> int:
        """How many positions all tables have rows for."""
        sizes = [len(cos) for cos, _ in self.angles]
        return min(sizes if self.positions is None else [*sizes, self.positions.shape[0]], default=1 << 62)


class CompiledEncoder:
    """Embeddings and layers of whole prompts in one call.

    tokens: int64 [slots, max_tokens], the prompts by slot; always the same array.
    """

    @classmethod
    def of(cls, parts: EncoderParts, tokens: NDArray[np.int64]) -> CompiledEncoder | None:
        """None if the parts do not `fit`."""
        return cls(parts, tokens) if parts.fit else None

    def __init__(self, parts: EncoderParts, tokens: NDArray[np.int64]) -> None:
        self._parts, self._tokens = parts, tokens
        self._rows = {
            name: RowTable(table)
            for name in ("words", "types", "positions")
            if (table := getattr(parts, name)) is not None
        }
        self._tables = angle_tables(parts.angles)
        self._call = EncodeCall(
            tables=ctypes.addressof(self._tables),
            num_tables=len(parts.angles),
            first_position=parts.first_position,
            num_positions=parts.num_positions,
            tokens=tokens.ctypes.data,
            max_tokens=tokens.shape[1],
            **{name: rows.struct for name, rows in self._rows.items()},
        )
        if parts.norm is not None:
            self._call.norm = norm_struct(parts.norm, parts.words.shape[1], parts.stack.dtype)
        self._capacity = self._num_pages = self._group_tokens = 0
        self._held: object = None
        self._states = torch.empty(0)

    def __call__(
        self, slots: NDArray[np.int64], lengths: NDArray[np.int64], seconds: NDArray[np.int64]
    ) -> Tensor:
        """The states [T, H] of the tokens of prompts, one prompt behind the other; until the next call.

        Args:
            slots: int64 [R]. lengths: int64 [R], the tokens of each prompt, which is in its slot.
            seconds: int64 [R], the first token of each one's second text; the length, or more, if it has none.

        Raises:
            ValueError: a token or a position has no row.
        """
        num_tokens, parts = int(lengths.sum()), self._parts
        most = max(num_tokens, LEAST_TOKENS)
        num_pages, group_tokens = (
            int((-(-lengths // parts.page)).sum()),
            parts.stack.group_tokens(int(lengths.max())),
        )
        if (
            not most <= self._capacity <= 4 * most
            or group_tokens > self._group_tokens
            or num_pages > self._num_pages
        ):
            self._reserve(most, num_pages, group_tokens)
        call = self._call
        call.slots, call.lengths, call.seconds = slots.ctypes.data, lengths.ctypes.data, seconds.ctypes.data
        call.rows = len(slots)
        if parts.stack.library.pagewire_encode(ctypes.byref(call)):
            raise ValueError("token ids, positions or lengths of the prompts do not fit the model")
        return self._states[:num_tokens]

    def _reserve(self, num_tokens: int, num_pages: int, group_tokens: int) -> None:
        """Take memory for prompts whose lengths add up to `num_tokens`."""
        parts = self._parts
        caches = parts.pages(num_pages)
        stack, held, self._states = parts.stack.call_for(num_tokens, parts.angles, caches, group_tokens)
        self._call.stack = ctypes.addressof(stack)
        self._held, self._capacity, self._group_tokens = (stack, held), num_tokens, group_tokens
        self._num_pages = len(caches[0].k)
