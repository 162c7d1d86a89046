"""Products of rows in 8 bits with weights in 8 bits, on tensor cores that multiply bytes.

Where a checkpoint says that its activations are quantised (`rounds_rows` of a scheme), a launch rounds each row,
and another one multiplies. Integers have a scale for the row, and their sums are exact. 8-bit floats have one for
each 128 columns of a row, whatever the checkpoint's scales of activations are for: that is nearer to the row, and
costs no more. A row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.cuda import linear
from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.linear import OUTPUTS, Launch, TiledLinear, packed_scales, tiled
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.floats import Floats
from pagewire.kernels.data.integers import INT8, Integers
from pagewire.kernels.data.weight import Weight

SOURCE, ROWS_SOURCE = "quantised_linear.cu", "quantised_rows.cu"
INTEGERS, FLOATS = "integer_rows", "float_rows"
"""Names, as of methods, of products with rows in 8 bits; those with rows in 16 bits stand in for them."""
PAIRS = {INTEGERS: "s8x2", FLOATS: "e4m3x2"}
STEP = 64
"""Columns of a step."""
ROW_GROUP = 128
"""Columns of a row of floats that have one scale, the last ones perhaps fewer."""
FEW_STAGES, MANY_STAGES = 3, 4
ROW_THREADS = 256
"""As in quantised_rows.cu."""


@functools.cache
def rows_variant(dtype: torch.dtype, kind: str) -> Variant:
    """The kernel that rounds rows of a dtype to integers or floats, one of `PAIRS`."""
    return Variant(ROWS_SOURCE, f"quantise_rows<{DTYPES[dtype]}, {PAIRS[kind]}>", "QuantisedRows")


@functools.cache
def variant(kernel: str, dtype: torch.dtype, kind: str, grouped: bool) -> Variant:
    """One of the kernels "few" and "many", for a dtype of results. grouped: columns of weights have scales."""
    name = f"quantised_{kernel}<{DTYPES[dtype]}, {PAIRS[kind]}, {32 if grouped else 0}>"
    return Variant(SOURCE, name, "Product", "sm_89" if kind == FLOATS else "")


def variants(*dtypes: torch.dtype, capability: tuple[int, int] | None = None) -> list[Variant]:
    """The kernels for each dtype (by default for all) that a device uses; None: all."""
    return [
        variant
        for dtype in dtypes or DTYPES
        for kind in kinds(capability)
        for variant in (rows_variant(dtype, kind), *_products(dtype, kind))
    ]


def _products(dtype: torch.dtype, kind: str) -> list[Variant]:
    scales = (False, True) if kind == FLOATS else (False,)
    return [variant(kernel, dtype, kind, grouped) for grouped in scales for kernel in ("few", "many")]


def kinds(capability: tuple[int, int] | None) -> list[str]:
    """Of `PAIRS`, those with which a device has products of bytes; None: any device.

    Tensor cores multiply 8-bit floats by the instructions of a warp from 8.9 on, but not in 9.0 to 11.0: there the
    compiler makes products of 16 bits of them, for which weights alone in 8 bits are as fast.
    """
    floats = capability is None or capability == (8, 9) or capability >= (12, 0)
    return [INTEGERS, FLOATS] if floats else [INTEGERS]


def kind_of(weight: Weight) -> str:
    """The one of `PAIRS` to which the rows of a weight's product are rounded."""
    return FLOATS if isinstance(weight.scheme, Floats) else INTEGERS


def why_not(weight: Weight, capability: tuple[int, int]) -> str | None:
    """Why the rows of a weight's product keep 16 bits on a device (`linear.why_not` counts); None: they do not."""
    scheme, num_in = weight.scheme, weight.shape[1]
    if reason := linear.why_not(weight):
        return reason
    if not isinstance(scheme, Integers | Floats) or not scheme.rounds_rows:
        return "the checkpoint says nothing of activations in 8 bits"
    if num_in % STEP:
        return f"{num_in} columns are no multiple of {STEP}"
    if isinstance(scheme, Integers):
        rounded = scheme.bits == INT8.bits and scheme.group is None and scheme.zero == INT8.zero
        return None if rounded else f"{scheme.name} weights are not 8 bits around {INT8.zero} in whole rows"
    if FLOATS not in kinds(capability):
        return f"compute capability {'.'.join(map(str, capability))} has no fast products of 8-bit floats"
    small = scheme.group is not None and scheme.group < STEP
    return f"groups of {scheme.group} 8-bit floats are smaller than {STEP}" if small else None


class QuantisedRows(NamedTuple):
    """Rows in 8 bits, as the kernels take them."""

    codes: Tensor
    """[M, K], int8 or float8_e4m3fn."""
    scales: Tensor
    """float32: of integers [M], of floats [K / 128, M], rounded up. NaN where a number is not finite."""


def empty_rows(rows: Tensor, kind: str) -> QuantisedRows:
    """Where rows [M, K] are written as a kind, one of `PAIRS`."""
    num_rows, num_in = rows.shape
    dtype = torch.int8 if kind == INTEGERS else torch.float8_e4m3fn
    shape = (num_rows,) if kind == INTEGERS else (-(-num_in // ROW_GROUP), num_rows)
    codes = torch.empty(num_rows, num_in, dtype=dtype, device=rows.device)
    return QuantisedRows(codes, torch.empty(shape, device=rows.device))


def quantise_rows(launcher: KernelLauncher, rows: Tensor, kind: str, out: QuantisedRows) -> None:
    """Round each row to 8 bits, and keep the scales. See `reference.quantised`.

    The largest magnitude of a row becomes 127 (integers), or that of each 128 columns becomes 448 (floats).

    Args:
        rows: [M, K] with M > 0, bfloat16 or float16, aligned to 16 bytes.
        kind: one of `PAIRS`.
        out: gets the codes and scales, see `empty_rows`.
    """
    kernel = rows_variant(rows.dtype, kind)
    sizes = {"x_stride": rows.stride(0), "m": len(rows), "chunks": rows.shape[1] // 8}
    parameters = pack(kernel, x=rows, codes=out.codes, scales=out.scales, **sizes)
    launcher.launch(kernel, (len(rows),), (ROW_THREADS,), parameters)


class QuantisedRowsLinear(TiledLinear):
    """A linear layer that rounds its rows to 8 bits, over a weight [N, K] in 8 bits: see `kernels.linear.pack`.

    Integers: with codes, scales and the exact sums S of their products, results are
    `float(S) * (scale of the row * scale of the output) + bias`, rounded to the dtype after that. Floats: sums are
    added as linear.cuh says.
    """

    def __init__(self, launcher: KernelLauncher, weight: Weight, bias: Tensor | None) -> None:
        """bias: [N], of the weight's dtype.

        Raises:
            ValueError: the rows keep 16 bits, see `why_not`.
            CompileError: see `KernelLauncher.load`.
        """
        if reason := why_not(weight, launcher.capability):
            raise ValueError(f"rows are not rounded for this weight: {reason}")
        self.kind = kind_of(weight)
        super().__init__(launcher, weight, _launches(weight), _parts(weight, bias), _sizes(weight))
        launcher.load([rows_variant(weight.dtype, self.kind)])

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        """See `TiledLinear.multiply`."""
        rounded = empty_rows(rows, self.kind)
        quantise_rows(self.launcher, rows, self.kind, rounded)
        self.launch(rounded.codes.view(torch.int16), rounded.scales, out)


def _launches(weight: Weight) -> tuple[Launch, Launch]:
    """The launches for few and for many rows. Numbers as in linear.cuh."""
    kind, grouped = kind_of(weight), _group(weight) is not None
    few, many = (variant(kernel, weight.dtype, kind, grouped) for kernel in ("few", "many"))
    stage_bytes = OUTPUTS * STEP + (2 * 4 * OUTPUTS if grouped else 0)
    row_bytes = STEP + (4 if kind == FLOATS else 0)
    exact = kind == INTEGERS
    return tiled(few, many, stage_bytes, FEW_STAGES, MANY_STAGES, row_bytes, exact)


def _group(weight: Weight) -> int | None:
    assert isinstance(weight.scheme, Integers | Floats)
    return weight.scheme.group


def _parts(weight: Weight, bias: Tensor | None) -> dict[str, Tensor | None]:
    """The tensors of a weight as the kernels read them, by their names in linear.cuh."""
    codes, scales = weight.parts
    if isinstance(weight.scheme, Integers):
        codes = codes ^ INT8.zero  # signed bytes
    scales = scales.float().flatten() if _group(weight) is None else packed_scales(scales)
    return {"codes": linear.in_order(codes, STEP, _ordered), "scales": scales, "offsets": None, "bias": bias}


def _ordered(codes: Tensor) -> Tensor:
    """Codes of whole blocks of outputs in the order of linear.cuh, as one run of bytes.

    Column `32 h + 16 i + 4 t + e` and output `8 j + g` of a step are in word j of lane `4 g + t`, byte e, of the
    lanes' words `2 h + i`.
    """
    axes = codes.view(len(codes) // OUTPUTS, 4, 8, -1, 2, 2, 4, 4)  # block, j, g, step, h, i, t, e
    return axes.permute(0, 3, 4, 5, 2, 6, 1, 7).reshape(-1)


def _sizes(weight: Weight) -> dict[str, int]:
    """The numbers of a weight, by their names in linear.cuh."""
    num_out, num_in = weight.shape
    group = _group(weight) or num_in
    of_codes = dict.fromkeys(("low_values", "high_values", "zero"), 0)
    shift = 0 if group == num_in else (group // STEP).bit_length() - 1
    return of_codes | {"n": num_out, "steps": num_in // STEP, "groups": num_in // group, "group_shift": shift}
