"""How a token is drawn."""

from __future__ import annotations

from dataclasses import dataclass

FRACTION_BITS = 44
"""Bits of the fraction of masses; see `Kernels.fixed_point_probabilities`."""
ONE = 2**FRACTION_BITS


@dataclass(frozen=True, slots=True)
class Draw:
    """How a row's token is drawn.

    seed: any integer, taken modulo 2**64. position: the number of tokens before it, 0 to 2**64 - 1.
    temperature: positive. top_k: 0: all tokens. top_p: 1: all. min_p: 0: all.
    """

    seed: int
    position: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
