"""Matrices of 4-bit floats as integers with a table of their 16 values: NF4, FP4, MXFP4 and NVFP4."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels.data.integers import Integers, integer_weight
from pagewire.kernels.data.weight import Weight
from pagewire.workers.checkpoint.formats.format import known_group
from pagewire.workers.checkpoint.formats.reexpress import (
    FLOAT8,
    as_numbers,
    fp8_weight,
    log_once,
    reexpressed,
)

ZERO = 128
REACH = 127
"""The integer for the largest value of int8, and the largest that a table may hold beyond `ZERO`."""
MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the numbers of E2M1 without their sign, which is the highest bit of a code."""
E2M1 = tuple(ZERO + sign * size for sign in (1, -1) for size in MAGNITUDES)
MXFP4, NVFP4 = Integers(4, 32, ZERO, E2M1), Integers(4, 16, ZERO, E2M1)
NAN = 255


def blocks_weight(
    packed: Tensor, scales: Tensor, values: Tensor, shape: tuple[int, int], block: int, dtype: torch.dtype
) -> Weight:
    """A matrix of 4-bit codes in blocks.

    packed: uint8 [N * K / 2], the first code in the high half of a byte. scales: float32, of each block of the
    flattened matrix. values: float32 [16], of the codes. shape: N, K. block: numbers in a block. dtype: of the
    product's inputs and outputs.

    Raises:
        ValueError: the sizes do not fit each other.
    """
    rows, columns = shape
    if packed.numel() * 2 != rows * columns or scales.numel() * block < rows * columns:
        raise ValueError(f"{packed.numel()} bytes and {scales.numel()} scales do not make a matrix {shape}")
    group = known_group(block, columns)
    if group is None:
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten().long()
        dense = values[codes] * scales.repeat_interleave(block)[: rows * columns]
        return reexpressed(f"4-bit matrices of {columns} columns", [dense.view(shape)], dtype)
    table, unit = integer_table(values)
    by_group = scales.repeat_interleave(block // group)[: rows * columns // group].view(rows, -1) * unit
    codes = (packed >> 4 | packed << 4).view(rows, -1)
    return integer_weight(Integers(4, group, ZERO, table), codes, by_group.half(), None, dtype)


def integer_table(values: Tensor) -> tuple[tuple[int, ...], float]:
    """The 16 integers around `ZERO` nearest to a multiple of float values [16] in [-1, 1], and 1 / that multiple.

    Of all multiples up to `REACH` the one with the least sum of squares of errors is taken; the log says the error.
    """
    values = values.double()
    multiples = torch.arange(REACH / 2, REACH + 0.125, 0.125, dtype=torch.float64)[:, None]
    integers = (values * multiples).round()
    errors = (integers / multiples - values).square().sum(1)
    best = int(errors.argmin())
    share = float((errors[best] / values.square().sum()).sqrt())
    log_once(
        f"table {values.tolist()}", f"the 16 values of 4-bit floats are held in 8 bits, off by {share:.2%}"
    )
    return tuple(int(value) + ZERO for value in integers[best]), float(1 / multiples[best, 0])


def nf4_values() -> Tensor:
    """The values of NF4, float32 [16], ascending: quantiles of a normal distribution (QLoRA, appendix E).

    Eight positive and seven negative ones, evenly spread in probability up to 0.9677083, and 0; over the largest.
    """
    most = 0.9677083
    above = torch.special.ndtri(torch.linspace(most, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(most, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat((above, below, torch.zeros(1, dtype=torch.float64))).sort().values
    return (values / values.max()).float()


def nf4(weight: Weight) -> Weight:
    """A dense matrix in NF4, as bitsandbytes quantises it: blocks of 64, the largest value of each at 1 or -1.

    Raises:
        ValueError: its columns are no multiple of 32.
    """
    block = 64 if weight.shape[1] % 64 == 0 else 32
    blocks = replace(weight, dtype=torch.float32).dense().reshape(-1, block)
    scales = blocks.abs().amax(1)
    values = nf4_values().to(blocks.device)
    shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2).to(torch.uint8).flatten()
    packed = codes[0::2] << 4 | codes[1::2]
    return blocks_weight(packed, scales, values, weight.shape, block, weight.dtype)


def float_weight(
    values: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int] | None = None,
    factor: Tensor | None = None,
) -> Weight:
    """A matrix [N, K] of 8-bit or 4-bit floats, as `float_format` tells them apart.

    values: float8 [N, K], or uint8 [N, K / 2]. scales: float8, exponents or floats. dtype: of the product's inputs
    and outputs. block: rows and columns of 8-bit floats with a scale, as for `fp8_weight`. factor: of all scales of
    NVFP4, a single number.

    Raises:
        ValueError: shapes or dtypes do not fit each other, or a scale is not a number.
    """
    exponents = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    if values.dtype in FLOAT8:
        return fp8_weight(values, as_numbers(scales), dtype, block)
    codes = values.view(torch.uint8)
    if exponents.dtype == torch.uint8:
        return mxfp4_weight(codes, exponents, dtype)
    if factor is None:
        raise ValueError("the factor of its scales is missing")
    return nvfp4_weight(codes, scales, factor, dtype)


def nvfp4_weight(codes: Tensor, scales: Tensor, factor: Tensor, dtype: torch.dtype) -> Weight:
    """A matrix [N, K] in NVFP4: 4-bit floats (E2M1) in groups of 16, without a copy of its codes.

    Its scales are products of two numbers, and are held in float32, as which such products are computed.

    codes: uint8 [N, K / 2], the even column in the low half. scales: float8 (e4m3) [N, K / 16]. factor: of all
    scales, a single number. dtype: of the product's inputs and outputs.

    Raises:
        ValueError: shapes or dtypes do not fit each other, or a scale is not a number.
    """
    if factor.numel() != 1:
        raise ValueError(f"its scales have {factor.numel()} factors in place of one")
    products = scales.float() * (factor.float().reshape(()) / 2)  # of twice the numbers
    if not products.isfinite().all():
        raise ValueError("its scales are no numbers")
    return integer_weight(NVFP4, codes, products, None, dtype)


def mxfp4_weight(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Weight:
    """A matrix [N, K] in MXFP4, exactly and without a copy of its codes.

    codes: uint8 [N, K / 2], the even column in the low half. exponents: uint8 [N, K / 32], with a bias of 127.
    dtype: of the product's inputs and outputs.

    Raises:
        ValueError: shapes or dtypes do not fit each other, or a scale is not a number.
    """
    if exponents.dtype != torch.uint8 or (exponents == NAN).any():
        raise ValueError("its scales are no powers of two: bytes below 255")
    scales = torch.ldexp(as_numbers(exponents), torch.tensor(-1)).bfloat16()  # of twice the numbers
    return integer_weight(MXFP4, codes, scales, None, dtype)
