"""Products with weights that stay packed, and with rows in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cuda import quantised_linear
from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.cuda.linear import LEAST_UNPACKED, MOST_FEWEST, PackedWeightLinear, dense_linear
from pagewire.kernels.cuda.quantised_linear import QuantisedRowsLinear
from pagewire.kernels.data.floats import Floats, float8_weight
from pagewire.kernels.data.integers import INT8, Integers, integer_weight
from pagewire.kernels.data.weight import Weight
from pagewire.kernels.reference.quantised import FLOAT_COLUMNS, float_rows, quantised_rows

from .case import Case, Extent, Run, distance, num_copies

SCHEMES: dict[str, Integers | Floats] = {
    "int4, groups of 128": Integers(4, 128, 8),
    "int4, groups of 32 with offsets": Integers(4, 32, 0),
    "table of 4 bits, groups of 32": Integers(4, 32, 12, tuple(range(16))),
    "int8, a scale for a row": INT8,
    "int8, rows in int8": replace(INT8, rounds_rows=True),
    "e4m3, rows in e4m3": Floats(None, rounds_rows=True),
    "e4m3 in groups of 128, rows in e4m3": Floats(128, rounds_rows=True),
}
ROWS = {
    Extent.FULL: (1, 4, 8, 16, 64, 128, 192, 256, 512, 8192),
    Extent.QUICK: (1, 8, 16, 64, 256, 2048),
    Extent.SMALL: (1, 70),
}
SHAPES = {
    Extent.FULL: ((4096, 4096), (28672, 4096), (4096, 14336)),
    Extent.QUICK: ((28672, 4096), (4096, 14336)),
    Extent.SMALL: ((72, 256),),
}
"""Outputs and inputs: of attention, and of the two products of a feed-forward layer of 8 billion weights."""


def linear_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """Each scheme, for one row up to a prompt, beside PyTorch's product with the dense weight in bfloat16.

    The floor of few rows is the reading of the packed weight: a token of one request reads all of it.
    """
    floats = quantised_linear.FLOATS in quantised_linear.kinds(launcher.capability)
    schemes = [item for item in SCHEMES.items() if floats or isinstance(item[1], Integers)]
    for name, scheme in schemes if extent is Extent.FULL else [*schemes[:4:3], *schemes[4:]]:
        for shape in SHAPES[extent]:
            for num_rows in ROWS[extent]:
                yield _linear_case(launcher, on, name, scheme, shape, num_rows)


def random_weight(scheme: Integers | Floats, shape: tuple[int, int], on: str, seed: int) -> Weight:
    """A random weight [N, K] of a scheme, for rows of bfloat16."""
    if isinstance(scheme, Integers):
        return random_integers(scheme, shape, on, seed)
    generator = torch.Generator(on).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=on) * 100
    scales = (shape[0], shape[1] // (scheme.group or shape[1]))
    by_row = (torch.rand(scales, generator=generator, device=on) + 0.5) / 100 / shape[1] ** 0.5
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    return float8_weight(codes, by_row, scheme.group, torch.bfloat16, scheme.rounds_rows)


def random_integers(scheme: Integers, shape: tuple[int, int], on: str, seed: int) -> Weight:
    """A random weight [N, K] of integers, for rows of bfloat16."""
    generator = torch.Generator(on).manual_seed(seed)
    num_out, num_in = shape
    codes = torch.randint(
        256, (num_out, num_in * scheme.bits // 8), generator=generator, device=on, dtype=torch.uint8
    )
    groups = (num_out, num_in // (scheme.group or num_in))
    scales = (torch.rand(groups, generator=generator, device=on) + 0.5) / num_in**0.5
    scales = scales if scheme.group is None else scales.half()
    return integer_weight(scheme, codes, scales, None if scheme.zero else -8 * scales, torch.bfloat16)


def _exact_rows(x: Tensor, scheme: Integers | Floats) -> Tensor:
    """Rows [M, K] in float64, rounded as products with a scheme round them."""
    if not scheme.rounds_rows:
        return x.double()
    if isinstance(scheme, Integers):
        codes, scales, _ = quantised_rows(x.float(), x.shape[1])
        return codes * scales.double()
    values, scales = float_rows(x.float())
    return values.double() * scales.double().repeat_interleave(FLOAT_COLUMNS, 1)[:, : x.shape[1]]


def _linear_case(
    launcher: KernelLauncher,
    on: str,
    name: str,
    scheme: Integers | Floats,
    shape: tuple[int, int],
    num_rows: int,
) -> Case:
    num_out, num_in = shape
    bias = torch.randn(num_out, device=on).bfloat16()
    weight = random_weight(scheme, shape, on, 0)
    kind = QuantisedRowsLinear if scheme.rounds_rows else PackedWeightLinear
    first = kind(launcher, weight, bias)
    num_bytes = first.num_bytes + 2 * num_rows * (num_in + num_out)
    copies = num_copies(num_bytes)
    weights = [weight, *(random_weight(scheme, shape, on, i) for i in range(1, copies))]
    layers = [first, *(kind(launcher, other, bias) for other in weights[1:])]
    x = torch.randn(copies, num_rows, num_in, device=on).bfloat16()
    dense = torch.stack(
        [weight.dense()] * num_copies(2 * num_out * num_in)
    )  # beyond the L2 cache, as the packed ones

    def error() -> float:
        exact = scheme.dense(weight.parts, torch.float64)
        return distance(first(x[0]), _exact_rows(x[0], scheme) @ exact.T + bias.double())

    def in_torch(i: int) -> object:
        return functional.linear(x[i], dense[i % len(dense)], bias)

    def in_any_batch(i: int) -> object:
        return dense_linear(launcher, x[i], dense[i % len(dense)], bias)

    peers: dict[str, Run] = {"torch": in_torch, "dense, in any batch": in_any_batch}
    if scheme.rounds_rows:
        in_16_bits = [PackedWeightLinear(launcher, other, bias) for other in weights]
        peers["rows in 16 bits"] = lambda i: in_16_bits[i](x[i])
    elif num_rows <= MOST_FEWEST or num_rows >= LEAST_UNPACKED:
        others = [PackedWeightLinear(launcher, other, bias, fewest=False, unpacks=False) for other in weights]
        peers["packed, in any batch"] = lambda i: others[i](x[i])

    title = f"linear {num_rows} x {num_in} x {num_out}, {name}"
    flops = 2 * num_rows * num_in * num_out
    return Case(title, num_bytes, flops, copies, lambda i: layers[i](x[i]), error, 1e-2, peers)
