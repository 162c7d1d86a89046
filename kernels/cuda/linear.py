"""Products with weights of integers and 8-bit floats that stay packed in the GPU's memory.

See `pagewire.kernels.linear.pack`.

A weight is brought into the order in which the kernels read it once, when it is packed: a warp's codes of a step
are contiguous, 16 bytes by each lane (linear.cuh). Sums are float32, and their order follows from the number of
columns alone: a row's bits do not depend on how many rows there are. Each tile of rows makes numbers of the codes
for itself, which costs prompts time. So the weight is unpacked once for many rows, a part at a time, for cuBLAS to
multiply, unless bits may not depend on the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.floats import Floats
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.weight import Weight, check_rows

SOURCE, FEWEST_SOURCE = "linear.cu", "fewest_linear.cu"
STEP, OUTPUTS, SLICES = 32, 32, 8
"""Columns of a step, outputs of a warp, and slices of the columns. As in linear.cuh."""
MOST_FEW, MOST_FEW_OF_MANY = 192, 48
"""The most rows that the kernel for few rows multiplies. The second number is for large weights: with them, the
other kernel has a block for each multiprocessor. Measured on an H100, with 4,096, 6,144 and 28,672 outputs."""
MOST_FEWEST, FEWEST_BYTES, FEWEST_COLUMNS = 8, 64 << 10, 128
"""Of the kernel for fewest rows: the most, a block's room for them, and of what their columns are a multiple."""
FEWEST_PADDING = 16
"""Bytes between these rows in shared memory. As in fewest_linear.cu."""
FEWEST_WARPS = (4, 16)
"""Of a block of that kernel: the least and the most; with groups of 16 columns half of these."""
RESIDENT_WARPS, RESIDENT_BYTES = 20, 96 << 10
"""Of that kernel, which a multiprocessor runs at once: by its registers, with groups of 16 half as many, and by the
shared memory of an sm_89's."""
FEWEST = "fewest_rows"
"""Products of the fewest rows; the kernel for few stands in for them."""
LEAST_UNPACKED = 192
"""The fewest rows for which a weight is unpacked for cuBLAS."""
UNPACKED = "unpacked_weights"
"""Products of many rows with weights that are unpacked; the kernel for many rows stands in for them."""
UNPACKED_BYTES = 64 << 20
"""About how much of a weight is unpacked at a time."""
UNPACKING_STEPS = 8
"""Of a block that unpacks: a warp has one. As in linear.cu."""
KERNELS = ("few", "many", "fewest", "unpacked")
"""Those for packed weights."""
CODES = ("half_codes", "table_codes", "byte_codes", "float_codes")
SPANS = (0, 32, 16)
"""Columns of a step that have one scale; 0: a row of the weight has one."""
BLOCK = 1 << 22
"""About how many codes are ordered at a time: they take several times the room of the weight."""


@functools.cache
def variant(kernel: str, dtype: torch.dtype, codes: str, scale_dtype: torch.dtype, span: int) -> Variant:
    """One of the kernels for a dtype of rows, one of `CODES` and one of `SPANS`: `KERNELS`."""
    scale = "float" if scale_dtype == torch.float32 else DTYPES[scale_dtype]
    source = FEWEST_SOURCE if kernel == "fewest" else SOURCE
    return Variant(source, f"linear_{kernel}<{DTYPES[dtype]}, {codes}, {scale}, {span}>", "Product")


def variants(*dtypes: torch.dtype, dense: bool = True) -> list[Variant]:
    """The kernels for each dtype (by default for all), codes and scales. dense: also those over dense weights."""
    packed = [
        variant for dtype in dtypes or DTYPES for codes in CODES for variant in kinds(dtype, codes, KERNELS)
    ]
    return packed + [variant for dtype in dtypes or DTYPES if dense for variant in dense_variants(dtype)]


def dense_variants(dtype: torch.dtype) -> list[Variant]:
    """The kernels over dense weights."""
    return kinds(dtype, "dense_codes")


def kinds(dtype: torch.dtype, codes: str, kernels: Sequence[str] = ("few", "many")) -> list[Variant]:
    """Kernels for a dtype and one of `CODES` with all scales, or for "dense_codes", which have none."""
    scales = [(scales, span) for scales in DTYPES for span in SPANS[1:]]
    if codes == "float_codes":
        scales = [(torch.float32, STEP)]
    elif codes == "dense_codes":
        scales = []
    return [
        variant(kernel, dtype, codes, *kind) for kind in ((torch.float32, 0), *scales) for kernel in kernels
    ]


def why_not(weight: Weight) -> str | None:
    """Why a weight has no kernel, so that it is made dense when it is packed; None if it has one.

    Integers have kernels, and tables of 4 bits (MXFP4, GGUF's IQ types), with scales and offsets of 16 bits for
    groups of 16 columns or more, or one scale for a row. So do 8-bit floats (e4m3), with scales in float32 for
    groups of 32 columns or more, or for a row. Integers in groups with such scales are rare. Dense weights stay as
    they are, and cuBLAS multiplies them.
    """
    scheme, num_in = weight.scheme, weight.shape[1]
    if not isinstance(scheme, Integers | Floats):
        return f"{scheme.name} weights are neither integers nor 8-bit floats"
    if weight.dtype not in DTYPES:
        return f"products are bfloat16 or float16, not {weight.dtype}"
    if num_in % STEP:
        return f"{num_in} columns are no multiple of {STEP}"
    if isinstance(scheme, Floats):
        small = scheme.group is not None and scheme.group < STEP
        return f"groups of {scheme.group} 8-bit floats are smaller than {STEP}" if small else None
    if scheme.group is not None and weight.parts[1].dtype not in DTYPES:
        return f"scales of groups are bfloat16 or float16, not {weight.parts[1].dtype}"
    if scheme.group is None and len(weight.parts) > 2:
        return "a row without groups has no offset"
    if _codes(scheme) == "half_codes" and scheme.zero >= 128:
        return f"4 bits less {scheme.zero} are no numbers of bfloat16"
    return None


def _codes(scheme: Integers | Floats) -> str:
    """The name in `CODES`."""
    if isinstance(scheme, Floats):
        return "float_codes"
    return "byte_codes" if scheme.bits > 4 else "half_codes" if scheme.table is None else "table_codes"


def dense_linear(launcher: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` for a dense weight [N, K], in the order of sums of packed ones: x [..., K] to [..., N].

    A row's bits do not depend on the others.

    Raises:
        ValueError: K is no multiple of 32, or the weight is not contiguous and aligned to 16 bytes.
    """
    num_out, num_in = weight.shape
    if num_in % STEP or not weight.is_contiguous() or weight.data_ptr() % 16:
        raise ValueError(
            f"no kernel whose bits do not depend on the batch multiplies with a weight [{num_out}, {num_in}] of "
            f"strides {weight.stride()}: columns must be a multiple of {STEP}, and contiguous"
        )
    check_rows(x, num_in, weight.dtype)
    rows = aligned(x.reshape(-1, num_in))
    out = torch.empty(len(rows), num_out, dtype=x.dtype, device=x.device)
    if len(rows):
        launch = faster(launcher, *dense_launches(x.dtype), len(rows), num_out)
        of_rows = {"x": rows, "x_scales": None, "x_stride": rows.stride(0), "m": len(rows), "out": out}
        parts = {"codes": weight, "scales": None, "offsets": None, "bias": bias}
        grid = (-(-len(rows) // launch.rows), -(-num_out // launch.outputs))
        parameters = pack(launch.kernel, **of_rows, **parts, **dense_sizes(num_out, num_in))
        launcher.launch(launch.kernel, grid, (launch.threads,), parameters, launch.shared_bytes)
    return out.view(*x.shape[:-1], num_out)


def aligned(rows: Tensor) -> Tensor:
    """Rows [M, K] as the kernels read them."""
    if rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


class TiledLinear:
    """A linear layer whose weight lies in the order of linear.cuh, on the weight's device."""

    def __init__(
        self,
        launcher: KernelLauncher,
        weight: Weight,
        launches: tuple[Launch, Launch],
        parts: dict[str, Tensor | None],
        sizes: dict[str, int],
    ) -> None:
        """launches: for few rows, and for many. parts, sizes: fields of `Product`.

        Raises:
            CompileError: see `KernelLauncher.load`.
        """
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.parts[0].device
        self.launcher, (self.few, self.many) = launcher, launches
        launcher.load([self.few.kernel, self.many.kernel])  # nothing may be loaded while a graph is recorded
        self.parts, self.sizes = parts, sizes
        self.num_bytes = sum(part.nbytes for part in self.parts.values() if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], both in `dtype`. A row's bits do not depend on the others.

        Raises:
            ValueError: x has another size or dtype.
        """
        check_rows(x, self.in_features, self.dtype)
        rows = aligned(x.reshape(-1, self.in_features))
        out = torch.empty(len(rows), self.out_features, dtype=x.dtype, device=x.device)
        if len(rows):
            self.multiply(rows, out)
        return out.view(*x.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        """Write the product of rows [M, K], M > 0, aligned to 16 bytes, to out [M, N], contiguous."""
        self.launch(rows, None, out)

    def launch(self, rows: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """`multiply` of rows as the kernels take them. scales: of rows in 8 bits, see `Product::x_scales`."""
        launch = faster(self.launcher, self.few, self.many, len(rows), self.out_features)
        of_rows = {"x": rows, "x_scales": scales, "x_stride": rows.stride(0), "m": len(rows), "out": out}
        parameters = pack(launch.kernel, **of_rows, **self.parts, **self.sizes)
        grid = (-(-len(rows) // launch.rows), -(-self.out_features // launch.outputs))
        self.launcher.launch(launch.kernel, grid, (launch.threads,), parameters, launch.shared_bytes)


class PackedWeightLinear(TiledLinear):
    """A linear layer over a weight [N, K] of integers or 8-bit floats that stays packed: see `kernels.linear.pack`.

    Rows, which keep 16 bits, are multiplied with the codes' numbers, and sums with the scales: nothing but the
    result is rounded to the rows' dtype. Where the weight is unpacked, its numbers are.
    """

    def __init__(
        self,
        launcher: KernelLauncher,
        weight: Weight,
        bias: Tensor | None,
        *,
        fewest: bool = True,
        unpacks: bool = True,
    ) -> None:
        """bias: [N], of the weight's dtype.

        fewest: the kernel for fewest rows is used. unpacks: for many rows. With either of them a row's bits depend
        on how many there are.

        Raises:
            ValueError: the weight has no kernel, see `why_not`.
            CompileError: see `KernelLauncher.load`.
        """
        if reason := why_not(weight):
            raise ValueError(f"no kernel for this weight: {reason}")
        parts = _parts(weight) | {"bias": bias}
        super().__init__(launcher, weight, _launches(weight), parts, _sizes(weight))
        self.fewest, self.unpacks = fewest and self.in_features % FEWEST_COLUMNS == 0, unpacks
        kind = _kind(weight)[0]
        self._spans = STEP // (kind[3] or STEP)  # of a step
        self._fewest, self._unpack = (variant(name, *kind) for name in ("fewest", "unpacked"))
        launcher.load([self._fewest, self._unpack])

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        """See `TiledLinear.multiply`."""
        row_bytes = self.in_features * rows.itemsize + FEWEST_PADDING
        if self.fewest and len(rows) <= min(MOST_FEWEST, FEWEST_BYTES // row_bytes):
            self._multiply_fewest(rows, out, len(rows) * row_bytes)
        elif self.unpacks and len(rows) >= LEAST_UNPACKED:
            self._multiply_unpacked(rows, out)
        else:
            self.launch(rows, None, out)

    def _multiply_fewest(self, rows: Tensor, out: Tensor, row_bytes: int) -> None:
        """row_bytes: of shared memory, for the rows."""
        num_blocks, multiprocessors = -(-self.out_features // OUTPUTS), self.launcher.multiprocessors
        least, most = (warps // self._spans for warps in FEWEST_WARPS)
        warps = max(least, min(most, 1 << (most * multiprocessors // num_blocks).bit_length()))
        shared_bytes = row_bytes + warps * MOST_FEWEST * (OUTPUTS + 1) * 4
        resident = min(RESIDENT_WARPS // self._spans // warps, RESIDENT_BYTES // (shared_bytes + 1024))
        of_rows = {"x": rows, "x_scales": None, "x_stride": rows.stride(0), "m": len(rows), "out": out}
        parameters = pack(self._fewest, **of_rows, **self.parts, **self.sizes)
        grid = (min(num_blocks, max(1, resident) * multiprocessors),)
        self.launcher.launch(self._fewest, grid, (32 * warps,), parameters, shared_bytes)

    def _multiply_unpacked(self, rows: Tensor, out: Tensor) -> None:
        bias, part = self.parts["bias"], part_outputs(self.in_features * rows.itemsize)
        room = torch.empty(
            min(part, self.out_features), self.in_features, dtype=rows.dtype, device=rows.device
        )
        for first in range(0, self.out_features, part):
            weight, results = room[: self.out_features - first], out[:, first : first + part]
            self.unpack(first, weight)
            if bias is None:
                torch.mm(rows, weight.T, out=results)
            else:
                torch.addmm(bias[first : first + part], rows, weight.T, out=results)

    def unpack(self, first: int, out: Tensor) -> None:
        """Write numbers of the weight to out [n, K], contiguous: n outputs from `first`, a multiple of 32, on."""
        blocks = slice(first // OUTPUTS, -(-(first + len(out)) // OUTPUTS))
        codes, scales, offsets = (self.parts[name] for name in ("codes", "scales", "offsets"))
        assert codes is not None and scales is not None
        parts = {
            "codes": codes[blocks],
            "scales": scales[first:] if scales.dim() == 1 else scales[blocks],
            "offsets": None if offsets is None else offsets[blocks],
        }
        no_rows = {"x": None, "x_scales": None, "x_stride": 0, "m": 0, "bias": None}
        parameters = pack(self._unpack, **no_rows, **parts, **self.sizes | {"n": len(out)}, out=out)
        grid = (-(-self.in_features // (STEP * UNPACKING_STEPS)), blocks.stop - blocks.start)
        self.launcher.launch(self._unpack, grid, (32 * UNPACKING_STEPS,), parameters)


def part_outputs(row_bytes: int) -> int:
    """The number of outputs that are unpacked at a time. row_bytes: of one of them, unpacked."""
    return max(OUTPUTS, UNPACKED_BYTES // row_bytes // OUTPUTS * OUTPUTS)


class Launch(NamedTuple):
    """A kernel and its block: the rows and outputs that one computes, its threads, and its shared memory."""

    kernel: Variant
    rows: int
    outputs: int
    threads: int
    shared_bytes: int


def faster(launcher: KernelLauncher, few: Launch, many: Launch, num_rows: int, num_out: int) -> Launch:
    """The faster launch for a number of rows; results are equal.

    That for few reads the weight for every 16 rows, that for many once for 64, but has few blocks if there are few
    outputs.
    """
    fills_device = -(-num_out // many.outputs) >= launcher.multiprocessors
    return few if num_rows <= (MOST_FEW_OF_MANY if fills_device else MOST_FEW) else many


def _launches(weight: Weight) -> tuple[Launch, Launch]:
    """The launches for few and for many rows."""
    kind, code_bytes, scale_bytes = _kind(weight)
    assert isinstance(weight.scheme, Integers | Floats)
    few, many = (variant(kernel, *kind) for kernel in ("few", "many"))
    return tiled(few, many, code_bytes + 2 * scale_bytes, 5 if _bits(weight.scheme) == 4 else 4, 6)


def _kind(weight: Weight) -> tuple[tuple[torch.dtype, str, torch.dtype, int], int, int]:
    """What `variant` takes, and the bytes of codes and of scales of 32 outputs in a step."""
    scheme, scale_dtype = weight.scheme, weight.parts[1].dtype
    assert isinstance(scheme, Integers | Floats)
    span = 0 if scheme.group is None else min(scheme.group, STEP)
    kind = (weight.dtype, _codes(scheme), scale_dtype if span else torch.float32, span)
    scale_bytes = OUTPUTS * STEP // span * scale_dtype.itemsize if span else 0
    return kind, OUTPUTS * STEP * _bits(scheme) // 8, scale_bytes


def dense_launches(dtype: torch.dtype) -> tuple[Launch, Launch]:
    """The launches over dense weights, for few and for many rows."""
    few, many = dense_variants(dtype)
    return tiled(few, many, OUTPUTS * STEP * dtype.itemsize, 4, 4)


def dense_sizes(num_out: int, num_in: int) -> dict[str, int]:
    """The numbers of a dense weight, by their names in linear.cuh."""
    zeros = dict.fromkeys(("low_values", "high_values", "groups", "group_shift", "zero"), 0)
    return {"n": num_out, "steps": num_in // STEP, **zeros}


def tiled(
    few: Variant,
    many: Variant,
    stage_bytes: int,
    few_stages: int,
    many_stages: int,
    row_bytes: int = 2 * STEP,
    exact: bool = False,
) -> tuple[Launch, Launch]:
    """The launches of kernels for few and for many rows. Numbers as in linear.cuh.

    stage_bytes: of a warp's weights in a step. row_bytes: of a row in a step. exact: sums are, and go through all
    slices in registers.
    """
    rows, stride = 16, 40
    stages = few_stages * (stage_bytes + rows * row_bytes)  # weights and rows of a warp
    shared = SLICES * max(stages, rows * stride * 4)  # the sums of slices follow the stages
    of_few = Launch(few, rows, OUTPUTS, 32 * SLICES, shared)
    rows, warps = 64, 4
    stages = many_stages * (rows * row_bytes + warps * stage_bytes)
    shared = stages + (0 if exact else rows * warps * OUTPUTS * 4)  # rows and weights, sums
    return of_few, Launch(many, rows, warps * OUTPUTS, 32 * warps, shared)


def _bits(scheme: Integers | Floats) -> int:
    """That a code takes: one of 6 bits has a byte."""
    return 4 if isinstance(scheme, Integers) and scheme.bits == 4 else 8


def _parts(weight: Weight) -> dict[str, Tensor | None]:
    """The tensors of a weight as the kernels read them, by their names in linear.cuh."""
    scheme, (_, scales, *offsets) = weight.scheme, weight.parts
    assert isinstance(scheme, Integers | Floats)
    if scheme.group is None:
        return {"codes": packed_codes(weight), "scales": scales.float().flatten(), "offsets": None}
    others = {"scales": packed_scales(scales), "offsets": packed_scales(offsets[0]) if offsets else None}
    return {"codes": packed_codes(weight), **others}


def _sizes(weight: Weight) -> dict[str, int]:
    """The numbers of a weight, by their names in linear.cuh."""
    scheme, (num_out, num_in) = weight.scheme, weight.shape
    assert isinstance(scheme, Integers | Floats)
    group, table = scheme.group or num_in, None if isinstance(scheme, Floats) else scheme.table
    values = bytes(table or 16)
    return {
        "low_values": int.from_bytes(values[:8], "little"),
        "high_values": int.from_bytes(values[8:], "little"),
        "n": num_out,
        "steps": num_in // STEP,
        "groups": num_in // group,
        "group_shift": 0 if scheme.group is None else max(group // STEP, 1).bit_length() - 1,
        "zero": 0 if isinstance(scheme, Floats) else scheme.zero,
    }


def packed_codes(weight: Weight) -> Tensor:
    """The codes of a weight [N, K] in the order of linear.cuh: see `in_order`.

    Column `16 h + 8 i + 2 t + e` and output `8 j + g` of a step are in word j of lane `4 g + t`. A word has the
    codes of both halves h in half bytes `4 e + 2 h + i`, or with a table `4 h + 2 i + e`. With 8 bits each half has
    words of its own, whose byte is `2 i + e`, or of floats `i + 2 e`.
    """
    scheme = weight.scheme
    assert isinstance(scheme, Integers | Floats)
    return in_order(weight.parts[0], STEP * _bits(scheme) // 8, functools.partial(_ordered, scheme=scheme))


def in_order(codes: Tensor, step_bytes: int, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Codes uint8 [N, bytes], some blocks of outputs at a time, as [N / 32, steps, bytes of a step of a block].

    N is rounded up; outputs that are added have code 0. step_bytes: of a row in a step. order: of whole blocks, as
    one run of bytes.
    """
    num_blocks = -(-len(codes) // OUTPUTS)
    packed = codes.new_empty(num_blocks, codes.shape[1] // step_bytes, OUTPUTS * step_bytes)
    blocks = max(1, BLOCK // packed[0].numel())
    for start in range(0, num_blocks, blocks):
        part = codes[start * OUTPUTS : (start + blocks) * OUTPUTS]
        part = functional.pad(part, (0, 0, 0, -len(part) % OUTPUTS))
        packed[start : start + blocks] = order(part).view(-1, *packed.shape[1:])
    return packed


def _ordered(codes: Tensor, scheme: Integers | Floats) -> Tensor:
    """`packed_codes` of whole blocks of outputs, as one run of bytes."""
    if _bits(scheme) == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    # block, j, g, step, h, i, t, e
    axes = codes.view(len(codes) // OUTPUTS, 4, 8, -1, 2, 2, 4, 2)
    if isinstance(scheme, Floats):
        return axes.permute(0, 3, 4, 2, 6, 1, 7, 5).reshape(-1)
    if scheme.bits > 4:
        return axes.permute(0, 3, 4, 2, 6, 1, 5, 7).reshape(-1)
    inner = (7, 4, 5) if scheme.table is None else (4, 5, 7)
    halves = axes.permute(0, 3, 2, 6, 1, *inner).reshape(-1, 2)
    return halves[:, 0] | halves[:, 1] << 4


def packed_scales(scales: Tensor) -> Tensor:
    """Scales or offsets [N, groups] in the order of linear.cuh: [N / 32, groups, 32], N rounded up.

    Output `8 j + 2 t + e` of a block is in place `8 t + 2 j + e`.
    """
    padded = functional.pad(scales, (0, 0, 0, -len(scales) % OUTPUTS))
    axes = padded.view(-1, 4, 4, 2, scales.shape[1])  # block, j, t, e, group
    return axes.permute(0, 4, 2, 1, 3).reshape(len(axes), scales.shape[1], OUTPUTS)
