"""Products with integer weights that stay packed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch.nn import functional

from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.cuda.linear import LEAST_GROUP, PackedWeightLinear, dense_linear
from pagewire.kernels.data.integers import Integers, integer_weight
from pagewire.kernels.data.weight import Weight

from .case import Case, Extent, Run, distance, num_copies

SCHEMES = {
    "int4, groups of 128": Integers(4, 128, 8),
    "int4, groups of 32 with offsets": Integers(4, 32, 0),
    "table of 4 bits, groups of 32": Integers(4, 32, 12, tuple(range(16))),
    "int8, a scale for a row": Integers(8, None, 128),
}
ROWS = {Extent.FULL: (1, 8, 16, 64, 128, 512, 8192), Extent.QUICK: (1, 16, 64, 2048), Extent.SMALL: (1, 70)}
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
    for name, scheme in list(SCHEMES.items())[:: 1 if extent is Extent.FULL else 3]:
        for shape in SHAPES[extent]:
            for num_rows in ROWS[extent]:
                yield _linear_case(launcher, on, name, scheme, shape, num_rows)


def random_integers(scheme: Integers, shape: tuple[int, int], on: str, seed: int) -> Weight:
    """A random weight [N, K] of a scheme, for rows of bfloat16."""
    generator = torch.Generator(on).manual_seed(seed)
    num_out, num_in = shape
    codes = torch.randint(
        256, (num_out, num_in * scheme.bits // 8), generator=generator, device=on, dtype=torch.uint8
    )
    groups = (num_out, num_in // (scheme.group or num_in))
    scales = (torch.rand(groups, generator=generator, device=on) + 0.5) / num_in**0.5
    scales = scales if scheme.group is None else scales.half()
    return integer_weight(scheme, codes, scales, None if scheme.zero else -8 * scales, torch.bfloat16)


def _linear_case(
    launcher: KernelLauncher, on: str, name: str, scheme: Integers, shape: tuple[int, int], num_rows: int
) -> Case:
    num_out, num_in = shape
    bias = torch.randn(num_out, device=on).bfloat16()
    weight = random_integers(scheme, shape, on, 0)
    first = PackedWeightLinear(launcher, weight, bias)
    num_bytes = first.num_bytes + 2 * num_rows * (num_in + num_out)
    copies = num_copies(num_bytes)
    layers = [
        first,
        *(
            PackedWeightLinear(launcher, random_integers(scheme, shape, on, i), bias)
            for i in range(1, copies)
        ),
    ]
    x = torch.randn(copies, num_rows, num_in, device=on).bfloat16()
    dense = torch.stack(
        [weight.dense()] * num_copies(2 * num_out * num_in)
    )  # beyond the L2 cache, as the packed ones

    def error() -> float:
        exact = scheme.dense(weight.parts, torch.float64)
        result = first(x[0])
        if not all(
            torch.equal(first(x[0, row : row + 1]), result[row : row + 1]) for row in (0, num_rows - 1)
        ):
            return float("inf")  # a row's bits must not depend on the others
        return distance(result, x[0].double() @ exact.T + bias.double())

    def in_torch(i: int) -> object:
        return functional.linear(x[i], dense[i % len(dense)], bias)

    def in_any_batch(i: int) -> object:
        return dense_linear(launcher, x[i], dense[i % len(dense)], bias)

    peers: dict[str, Run] = {"torch": in_torch, "dense, in any batch": in_any_batch}
    if first.group is not None and num_rows >= LEAST_GROUP:
        others = [copy.copy(layer) for layer in layers]
        for layer in others:
            layer.group = None
        peers["no warpgroups"] = lambda i: others[i](x[i])

    title = f"linear {num_rows} x {num_in} x {num_out}, {name}"
    flops = 2 * num_rows * num_in * num_out
    return Case(title, num_bytes, flops, copies, lambda i: layers[i](x[i]), error, 1e-2, peers)
