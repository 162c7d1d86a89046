"""Weights quantised while they are loaded: what `quantization=` means for a checkpoint of plain numbers.

Which scheme keeps how much accuracy was measured on SmolLM2-135M; ARCHITECTURE.md has the figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from pagewire.kernels.integers import Integers, row_blocks
from pagewire.kernels.weight import DENSE, Weight
from pagewire.workers.errors import LoadError
from pagewire.workers.model.formats.bitsandbytes import nf4
from pagewire.workers.model.formats.fp8 import fp8_weight
from pagewire.workers.model.formats.reexpress import as_integers, wider

INT4 = Integers(4, 32, 0)
ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Last parts of the names of matrices that choose experts: small, and every choice depends on them."""
IN_LAYERS = re.compile(r"\.\d+\.")
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


def online(quantization: str) -> Callable[[str, Weight], Weight]:
    """A function from the name of a module and its dense weight to the quantised weight, or the same one.

    Matrices outside of the layers (embedding and output) have 8 bits in 4-bit schemes too, and so do matrices whose
    columns are no multiple of a group. What chooses among experts stays as it is.

    quantization: one of `ONLINE`.

    Raises:
        LoadError: it is none of them.
    """
    if quantization not in ONLINE:
        raise LoadError(
            f"quantization={quantization!r} cannot be done while plain numbers are loaded: {', '.join(ONLINE)} can"
        )
    quantised = ONLINE[quantization]

    def apply(name: str, weight: Weight) -> Weight:
        if name.rpartition(".")[2] in ROUTERS or weight.scheme is not DENSE:
            return weight
        return quantised(name, weight)

    return apply


def _int8(name: str, weight: Weight) -> Weight:
    return _integers("int8", weight, wider(weight.shape[1]))


def _int4(name: str, weight: Weight) -> Weight:
    if not IN_LAYERS.search(name) or weight.shape[1] % 32:
        return _int8(name, weight)
    return _integers("int4", weight, INT4)


def _nf4(name: str, weight: Weight) -> Weight:
    if not IN_LAYERS.search(name) or weight.shape[1] % 32:
        return _int8(name, weight)
    return nf4(weight)


def _experts(name: str, weight: Weight) -> Weight:
    return _int8(name, weight) if EXPERTS.search(name) else weight


def _fp8(name: str, weight: Weight) -> Weight:
    """Rounded to e4m3 with a scale for each row, as the name promises, and held as such a checkpoint is."""
    if not IN_LAYERS.search(name):
        return _int8(name, weight)
    most = torch.finfo(torch.float8_e4m3fn).max
    device = weight.parts[0].device
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(weight.shape[0], 1, device=device)
    for start, stop in row_blocks(*weight.shape):
        rows = replace(weight.slice(start, stop), dtype=torch.float32).dense()
        reach = rows.abs().amax(1, keepdim=True)
        scales[start:stop] = torch.where(reach > 0, reach / most, 1.0)
        values[start:stop] = (rows / scales[start:stop]).to(torch.float8_e4m3fn)
    return fp8_weight(values, scales, weight.dtype)


def _integers(kind: str, weight: Weight, scheme: Integers) -> Weight:
    return as_integers(f"weights quantised by {kind}", weight, scheme)


ONLINE: dict[str, Callable[[str, Weight], Weight]] = {
    "fp8": _fp8,
    "int8": _int8,
    "int4": _int4,
    "bitsandbytes": _nf4,
    "experts_int8": _experts,
}
"""Names of `quantization=` for checkpoints of plain numbers."""
