"""The experts of a layer on a GPU: a fixed number of launches, for which the host knows nothing of the choice.

Rows are placed by expert (`place_rows` in experts.cu), each product is one launch for all experts, and a last one
adds up the rows of each token. A block multiplies a tile of rows of one expert; there are as many blocks as any
choice of that many tokens may need. Weights stay where they are. The order of sums is that of linear.py, for dense
weights, too: a row's bits depend on no other row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.linear import (
    CODES,
    STEP,
    Launch,
    PackedWeightLinear,
    aligned,
    dense_launches,
    dense_sizes,
    kinds,
)
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.layer import Activation, Experts, LimitedGate
from pagewire.kernels.data.weight import Linear, UnpackedLinear, check_rows

SOURCE = "experts.cu"
THREADS = 256
"""Of a block that places rows, or adds them up."""
MOST_FEW = 16
"""Rows of an expert, on average, up to which tiles have 16 rows. By reckoning: more would read weights twice."""
PLACE = Variant(SOURCE, f"place_rows<{THREADS}>", "Routing")


@functools.cache
def add_variant(dtype: torch.dtype) -> Variant:
    """The kernel that adds up rows of a dtype."""
    return Variant(SOURCE, f"add_experts<{DTYPES[dtype]}, {THREADS}>", "Sum")


def grouped(linear: Variant) -> Variant:
    """The kernel for experts that multiplies as one for a single weight does."""
    return Variant(SOURCE, linear.name.replace("linear_", "experts_"), "Grouped")


def variants(*dtypes: torch.dtype, packed: bool = True) -> list[Variant]:
    """The kernels for each dtype (by default for all). packed: also those for weights that stay packed."""
    products = [
        grouped(variant)
        for dtype in dtypes or DTYPES
        for codes in (*(CODES if packed else ()), "dense_codes")
        for variant in kinds(dtype, codes)
    ]
    return [PLACE, *map(add_variant, dtypes or DTYPES), *products]


def why_not(experts: Experts) -> str | None:
    """Why experts have no kernel and have to run one by one; None if they have one."""
    if experts.activation is None:
        return "the kernels have no such activation"
    if not experts.gated:
        return "the kernels take gates between an expert's products"
    if experts.weighs_inputs:
        return "the kernels weigh what experts give, not what they take"
    for linears in (experts.up, experts.down):
        if any(not isinstance(linear, PackedWeightLinear | UnpackedLinear) for linear in linears):
            return "experts have adapters, or weights of another kind"
        first = linears[0]
        if any(_form(linear) != _form(first) for linear in linears):
            return "experts differ in the form of their weights"
        if first.dtype not in DTYPES:
            return f"products are bfloat16 or float16, not {first.dtype}"
        if first.in_features % STEP or first.out_features % 8:
            return f"weights of {first.out_features} x {first.in_features} are no multiples of 8 x {STEP}"
        if any(
            isinstance(linear, UnpackedLinear)
            and (not linear.weight.is_contiguous() or linear.weight.data_ptr() % 16)
            for linear in linears
        ):
            return "dense weights are not contiguous, or not aligned to 16 bytes"
    return None


def _form(linear: Linear) -> object:
    """What the weights of one launch have in common."""
    own = (linear.sizes, linear.few) if isinstance(linear, PackedWeightLinear) else None
    return type(linear), linear.dtype, linear.in_features, linear.out_features, own


class Placed(NamedTuple):
    """Rows in order of the experts. All are int32 on the device."""

    sources: Tensor
    """[R]: the token of each row."""
    places: Tensor
    """[R]: the row of each choice."""
    tiles: Tensor
    """[tiles, 3], see experts.cu."""
    tile_rows: int


def place(launcher: KernelLauncher, ids: Tensor, num_experts: int, tile_rows: int) -> Placed:
    """Place the choices int64 [T, C], not empty, contiguous, by expert; those of one expert in their own order.

    A choice of no expert has no row; its place is -1.
    """
    count = ids.numel()
    num_tiles = min(count, num_experts + count // tile_rows)
    sources, places = torch.empty(2, count, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=ids.device)
    parameters = pack(
        PLACE,
        ids=ids,
        sources=sources,
        places=places,
        tiles=tiles,
        count=count,
        num_chosen=ids.shape[1],
        num_experts=num_experts,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
    )
    launcher.launch(PLACE, (num_experts,), (THREADS,), parameters, 4 * num_experts)
    return Placed(sources, places, tiles, tile_rows)


class _Products:
    """The product of each expert's rows with its weight, in one launch."""

    def __init__(self, launcher: KernelLauncher, linears: Sequence[Linear]) -> None:
        first, self._launcher = linears[0], launcher
        self.linears, self.dtype = linears, first.dtype
        self.out_features, self.in_features = first.out_features, first.in_features
        if isinstance(first, PackedWeightLinear):
            self._launches, self._sizes = (first.few, first.many), first.sizes
        else:
            self._launches = dense_launches(first.dtype)
            self._sizes = dense_sizes(self.out_features, self.in_features)
        few, many = self._launches
        self._launches = few._replace(kernel=grouped(few.kernel)), many._replace(kernel=grouped(many.kernel))
        launcher.load([launch.kernel for launch in self._launches])  # not while a graph is recorded
        addresses = [_addresses(linear) for linear in linears]
        self._parts = torch.tensor(addresses, dtype=torch.int64).to(_device(first))

    def launch_for(self, num_rows: int) -> Launch:
        """The launch for a number of rows of all experts; the results of both are equal."""
        few, many = self._launches
        return few if num_rows <= MOST_FEW * len(self.linears) else many

    def __call__(self, x: Tensor, placed: Placed, sources: Tensor | None) -> Tensor:
        """The rows [R, N], in order of the experts. sources: of the rows in x; None: x has them in that order."""
        few, many = self._launches
        launch = few if placed.tile_rows == few.rows else many
        out = torch.empty(len(placed.sources), self.out_features, dtype=x.dtype, device=x.device)
        of_rows = {"x": x, "x_stride": x.stride(0), "tiles": placed.tiles, "sources": sources, "out": out}
        parameters = pack(launch.kernel, **of_rows, **self._sizes, parts=self._parts)
        grid = (len(placed.tiles), -(-self.out_features // launch.outputs))
        self._launcher.launch(launch.kernel, grid, (launch.threads,), parameters, launch.shared_bytes)
        return out


def _device(linear: Linear) -> torch.device:
    """Where a layer's weight lies."""
    if isinstance(linear, PackedWeightLinear):
        return linear.device
    assert isinstance(linear, UnpackedLinear)
    return linear.weight.device


def _addresses(linear: Linear) -> list[int]:
    """Of codes, scales, offsets and bias; 0: there are none."""
    if isinstance(linear, PackedWeightLinear):
        parts = [linear.parts[name] for name in ("codes", "scales", "offsets", "bias")]
    else:
        assert isinstance(linear, UnpackedLinear)
        parts = [linear.weight, None, None, linear.bias]
    return [0 if part is None else part.data_ptr() for part in parts]


class CudaExperts:
    """The experts of a layer; see `Kernels.experts`. An id of no expert adds nothing: the host does not see it."""

    def __init__(
        self,
        launcher: KernelLauncher,
        experts: Experts,
        activate: Callable[[Tensor, Activation | LimitedGate], Tensor],
    ) -> None:
        """activate: `Kernels.activate_and_mul`.

        Raises:
            ValueError: there is no kernel for these experts, see `why_not`.
            CompileError: see `KernelLauncher.load`.
        """
        if reason := why_not(experts):
            raise ValueError(f"no kernel for these experts: {reason}")
        self._launcher, self._experts, self._activate = launcher, experts, activate
        self._up, self._down = (_Products(launcher, linears) for linears in (experts.up, experts.down))
        launcher.load([PLACE, add_variant(self._up.dtype)])

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids int64 [T, C] and weights [T, C] to [T, H], in five launches.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        check_rows(x, self._up.in_features, self._up.dtype)
        fits = ids.dim() == 2 and ids.dtype == torch.int64 and x.shape[:-1] == ids.shape[:1]
        if not fits or weights.shape != ids.shape:
            raise ValueError(
                f"{ids.dtype} {tuple(ids.shape)} and {tuple(weights.shape)} for x {tuple(x.shape)}"
            )
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not ids.numel():
            return out.zero_()
        assert self._experts.activation is not None
        tile_rows = self._up.launch_for(ids.numel()).rows
        placed = place(self._launcher, ids.contiguous(), len(self._up.linears), tile_rows)
        rows = self._up(aligned(x), placed, placed.sources)
        rows = self._down(self._activate(rows, self._experts.activation), placed, None)
        kernel = add_variant(x.dtype)
        weights = weights.to(torch.float32).contiguous()
        fields = {"rows": rows, "weights": weights, "places": placed.places, "out": out}
        sizes = {"num_chosen": ids.shape[1], "chunks": x.shape[1] // 8}
        shared_bytes = 4 * ids.shape[1]
        self._launcher.launch(kernel, (len(x),), (THREADS,), pack(kernel, **fields, **sizes), shared_bytes)
        return out
