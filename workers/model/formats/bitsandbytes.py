"""Checkpoints of bitsandbytes: NF4 and FP4 in blocks, with nested scales or without, and int8 with a scale per row.

The 16 values of a 4-bit type lie in the checkpoint (`quant_map`), as floats in [-1, 1]; ours are integers.
A block is a run of numbers of the flattened matrix, so it may reach from one row into the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.integers import INT8, Integers, integer_weight
from pagewire.kernels.weight import Weight
from pagewire.workers.model.formats.reexpress import log_once, reexpressed

STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
FOUR_BITS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES)
EIGHT_BITS = ("SCB", "weight_format")
GROUPS = (128, 64, 32, 16)
ZERO = 128
REACH = 127
"""The integer for the largest value of int8, and the largest that a table may hold beyond `ZERO`."""


@dataclass(frozen=True)
class BitsAndBytes:
    """Matrices as bitsandbytes' `Linear4bit` and `Linear8bitLt` save them."""

    name: str = "bitsandbytes"
    suffixes: frozenset[str] = frozenset({"weight", *FOUR_BITS, *EIGHT_BITS})

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`: everything that bitsandbytes saves is served."""

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """See `Format.shape`. The shape of a 4-bit matrix is part of its state."""
        if "SCB" in tensors:
            return tuple(tensors["weight"].shape)
        return tuple(_state(tensors)["shape"])

    def weight(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        """See `Format.weight`."""
        if "SCB" not in tensors:
            state = _state(tensors)
            return blocks_weight(
                tensors["weight"].reshape(-1).view(torch.uint8),
                _scales(tensors, state),
                tensors["weight.quant_map"].float(),
                tuple(state["shape"]),
                int(state["blocksize"]),
                dtype,
            )
        if int(tensors.get("weight_format", torch.zeros(()))):
            raise ValueError("its int8 weight lies in the order of a GPU's tiles; save it in rows ('row')")
        codes = tensors["weight"].view(torch.uint8) ^ ZERO
        return integer_weight(INT8, codes, tensors["SCB"].float().reshape(-1, 1) / REACH, None, dtype)


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
    group = next((size for size in GROUPS if columns % size == 0 and block % size == 0), None)
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


def _state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a 4-bit matrix: JSON in a tensor of bytes."""
    for suffix in STATES:
        if suffix in tensors:
            state = json.loads(bytes(tensors[suffix].tolist()))
            if len(state["shape"]) != 2:
                raise ValueError(f"it is of shape {state['shape']}: only matrices are served in 4 bits")
            return dict(state)
    raise ValueError(f"it has none of {', '.join(STATES)}")


def _scales(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """The scale of each block, float32; nested ones are codes of 8 bits, with a scale for each nested block."""
    absmax = tensors["weight.absmax"]
    if "nested_blocksize" not in state:
        return absmax.float()
    outer = tensors["weight.nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))
    inner = tensors["weight.nested_quant_map"].float()[absmax.long()]
    return inner * outer[: len(inner)] + float(state["nested_offset"])


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


def of(config: Mapping[str, Any]) -> BitsAndBytes:
    """The format of a `quantization_config` of method `bitsandbytes`."""
    return BitsAndBytes()
