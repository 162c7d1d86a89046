"""Checkpoints of bitsandbytes: NF4 and FP4 in blocks, with nested scales or without, and int8 with a scale per row.

The 16 values of a 4-bit type lie in the checkpoint (`quant_map`), as floats in [-1, 1]; ours are integers.
A block is a run of numbers of the flattened matrix, so it may reach from one row into the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.workers.checkpoint.formats.format import (
    Dtype,
    Held,
    Parts,
    Tensor,
    Tensors,
    Weight,
    described,
    known_group,
    wider,
)
from pagewire.workers.checkpoint.headers import TensorHeader

STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
FOUR_BITS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES)
EIGHT_BITS = ("SCB", "weight_format")


@dataclass(frozen=True)
class BitsAndBytes:
    """Matrices as bitsandbytes' `Linear4bit` and `Linear8bitLt` save them."""

    name: str = "bitsandbytes"
    suffixes: frozenset[str] = frozenset({"weight", *FOUR_BITS, *EIGHT_BITS})

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`: everything that bitsandbytes saves is served."""

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`. The shape of a 4-bit matrix is part of its state, which is read."""
        if "SCB" in tensors:
            return tensors["weight"].shape, NumberFormat(8, scale_bytes=4)
        state = _state(tensors)
        rows, columns = state["shape"]
        group = known_group(int(state["blocksize"]), columns)
        return (rows, columns), wider(columns) if group is None else NumberFormat(4, group)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        import torch

        from pagewire.kernels.data.integers import INT8, integer_weight
        from pagewire.workers.checkpoint.formats.tables import REACH, ZERO, blocks_weight

        if "SCB" not in tensors:
            state = _state(described(tensors))
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


def _state(tensors: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """The state of a 4-bit matrix: JSON in a tensor of bytes."""
    for suffix in STATES:
        if suffix in tensors:
            state = json.loads(tensors[suffix].content())
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


def of(config: Mapping[str, Any]) -> BitsAndBytes:
    """The format of a `quantization_config` of method `bitsandbytes`."""
    return BitsAndBytes()
