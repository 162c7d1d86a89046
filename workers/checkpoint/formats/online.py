"""Weights quantised while they are loaded: what `quantization=` means for a checkpoint of plain numbers.

Which scheme keeps how much accuracy was measured on SmolLM2-135M; the figures are in
docs/architecture/loading.md. Imports torch only to quantise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewire.ipc.quantization import ONLINE
from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.workers.checkpoint.formats.format import wider
from pagewire.workers.errors import LoadError

if TYPE_CHECKING:
    from pagewire.kernels.data.weight import Weight

ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Last parts of the names of matrices that choose experts: small, and every choice depends on them."""
IN_LAYERS = re.compile(r"\.\d+\.")
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
BITS = {"int6": (6, 6), "int4": (4, 6), "int4_int8": (4, 8), "bitsandbytes": (4, 8)}
"""Bits of the matrices in layers, and of those outside: embedding and output layer. All others have 8."""


def quantised_as(quantization: str, name: str, num_in: int) -> NumberFormat | None:
    """How a matrix of plain numbers will be held; None: as it is. name: of its module. num_in: its columns.

    Matrices whose columns are no multiple of a group have 8 bits. What chooses among experts stays as it is.
    """
    if name.rpartition(".")[2] in ROUTERS or (quantization == "experts_int8" and not EXPERTS.search(name)):
        return None
    in_layers, outside = BITS.get(quantization, (8, 8))
    bits = in_layers if IN_LAYERS.search(name) else outside
    if bits == 8 or num_in % 32:
        return wider(num_in)
    if quantization == "bitsandbytes":
        return NumberFormat(4, 32 if num_in % 64 else 64)
    return NumberFormat(bits, 32, has_offsets=bits == 4)


def online(quantization: str, keeps_floats: bool = False) -> Callable[[str, Weight], Weight]:
    """A function from the name of a module and its dense weight to the quantised weight, or the same one.

    quantization: one of `ONLINE`. keeps_floats: see `rounded_to_fp8`.

    Raises:
        LoadError: it is none of them.
    """
    from pagewire.kernels.data.integers import Integers
    from pagewire.kernels.data.joining import with_rounded_rows
    from pagewire.kernels.data.weight import DENSE
    from pagewire.workers.checkpoint.formats.reexpress import as_integers, rounded_to_fp8
    from pagewire.workers.checkpoint.formats.tables import nf4

    if quantization not in ONLINE:
        raise LoadError(
            f"quantization={quantization!r} cannot be done while plain numbers are loaded: {', '.join(ONLINE)} can"
        )

    def apply(name: str, weight: Weight) -> Weight:
        held = quantised_as(quantization, name, weight.shape[1])
        if held is None or weight.scheme is not DENSE:
            return weight
        if quantization == "fp8" and IN_LAYERS.search(name):
            return with_rounded_rows(rounded_to_fp8(weight, keeps_floats))
        if quantization == "bitsandbytes" and held.bits == 4:
            return nf4(weight)
        scheme = Integers(held.bits, held.group, 0 if held.has_offsets else 2 ** (held.bits - 1))
        return as_integers(f"weights quantised by int{held.bits}", weight, scheme)

    return apply
