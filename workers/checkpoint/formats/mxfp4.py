"""MXFP4: 4-bit floats (E2M1) in groups of 32 that share a power of two (E8M0); gpt-oss has its experts in it.

All of it is held exactly: twice an E2M1 number is an integer, and bfloat16 has every power of two that E8M0 has.
OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.workers.checkpoint.formats.format import Dtype, Held, Parts, Tensors, Weight

GROUP = 32


@dataclass(frozen=True)
class Mxfp4:
    """Experts of a layer in one tensor of blocks and one of scales, as gpt-oss holds them."""

    name: str = "mxfp4"
    suffixes: frozenset[str] = frozenset({"_blocks", "_scales"})
    transposed: bool = True
    """transformers' module holds [E, K, N], the checkpoint [E, N, K]."""

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`: whatever the names, blocks without scales are noticed when they are read."""

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`: [E, K, N]."""
        experts, rows, groups, _ = tensors["_blocks"].shape
        return (experts, groups * GROUP, rows), NumberFormat(4, GROUP)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`.

        Raises:
            ValueError: always: matrices of this format are stacked.
        """
        raise ValueError(f"{name} is a stack of experts: `stacked` gives them one by one")

    def stacked(self, name: str, tensors: Tensors, dtype: Dtype) -> Iterator[Weight]:
        """See `StackFormat.stacked`."""
        from pagewire.workers.checkpoint.formats.tables import mxfp4_weight

        blocks, scales = tensors["_blocks"], tensors["_scales"]
        if blocks.dim() != 4 or blocks.shape[3] != GROUP // 2 or blocks.shape[:3] != scales.shape:
            raise ValueError(f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} do not fit")
        for codes, exponents in zip(blocks, scales, strict=True):
            yield mxfp4_weight(codes.flatten(1), exponents, dtype)


def of(config: Mapping[str, Any]) -> Mxfp4:
    """The format of a `quantization_config` of method `mxfp4`."""
    return Mxfp4()
