"""MXFP4: 4-bit floats (E2M1) in groups of 32 that share a power of two (E8M0); gpt-oss has its experts in it.

All of it is held exactly: twice an E2M1 number is an integer, and bfloat16 has every power of two that E8M0 has.
OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.integers import Integers, integer_weight
from pagewire.kernels.weight import Weight

GROUP = 32
ZERO = 128
MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the numbers of E2M1 without their sign, which is the highest bit of a code."""
SCHEME = Integers(4, GROUP, ZERO, tuple(ZERO + sign * size for sign in (1, -1) for size in MAGNITUDES))
BIAS = 127
NAN = 255


@dataclass(frozen=True)
class Mxfp4:
    """Experts of a layer in one tensor of blocks and one of scales, as gpt-oss holds them."""

    name: str = "mxfp4"
    suffixes: frozenset[str] = frozenset({"_blocks", "_scales"})
    transposed: bool = True
    """transformers' module holds [E, K, N], the checkpoint [E, N, K]."""

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`: whatever the names, blocks without scales are noticed when they are read."""

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """See `Format.shape`: [E, K, N]."""
        experts, rows, groups, _ = tensors["_blocks"].shape
        return experts, groups * GROUP, rows

    def weight(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        """See `Format.weight`.

        Raises:
            ValueError: always: matrices of this format are stacked.
        """
        raise ValueError(f"{name} is a stack of experts, of which `stacked` gives each")

    def stacked(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[Weight]:
        """See `StackFormat.stacked`."""
        blocks, scales = tensors["_blocks"], tensors["_scales"]
        if blocks.dim() != 4 or blocks.shape[3] != GROUP // 2 or blocks.shape[:3] != scales.shape:
            raise ValueError(f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} do not fit")
        for codes, exponents in zip(blocks, scales, strict=True):
            yield mxfp4_weight(codes.flatten(1), exponents, dtype)


def mxfp4_weight(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Weight:
    """A matrix [N, K] in MXFP4, exactly and without a copy of its codes.

    codes: uint8 [N, K / 2], the even column in the low half. exponents: uint8 [N, K / 32], with a bias of 127.
    dtype: of the product's inputs and outputs.

    Raises:
        ValueError: shapes or dtypes do not fit each other, or a scale is not a number.
    """
    if exponents.dtype != torch.uint8 or (exponents == NAN).any():
        raise ValueError("its scales are no powers of two: bytes below 255")
    scales = torch.ldexp(
        torch.ones(exponents.shape), exponents.int() - BIAS - 1
    ).bfloat16()  # of twice the numbers
    return integer_weight(SCHEME, codes, scales, None, dtype)


def of(config: Mapping[str, Any]) -> Mxfp4:
    """The format of a `quantization_config` of method `mxfp4`."""
    return Mxfp4()
