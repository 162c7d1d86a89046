"""Trials of products with weights that stay packed, and of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cuda import linear, norms, quantised_linear
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.trial import TOLERANCE, Layout, Trial, normal, preferring, short
from pagewire.kernels.data.floats import NO_NUMBER, Floats
from pagewire.kernels.data.integers import INT8, Integers
from pagewire.kernels.data.layer import Activation, Experts
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.reference.kernels import Kernels, reference
from pagewire.kernels.reference.quantised import FLOAT_COLUMNS, float_rows, quantised_rows

TABLE = tuple(range(0, 240, 15))
SCHEMES = {
    f"{title}, {f'groups of {group}' if group else 'no groups'}": Integers(bits, group, zero, table)
    for title, bits, zero, table in (
        ("4 bits", 4, 8, None),
        ("a table", 4, 99, TABLE),
        ("8 bits", 8, 128, None),
    )
    for group in (None, 64, 16)
} | {"4 bits, groups of 64": Integers(4, 64, 0), "8 bits, groups of 16": Integers(8, 16, 0)}
"""A scheme for each kind of kernel for products with integers. With zero 0 there are offsets."""
FLOAT_SCHEMES = {"8-bit floats, no groups": Floats(None), "8-bit floats, groups of 64": Floats(64)}
TITLES = {quantised_linear.INTEGERS: "integers", quantised_linear.FLOATS: "8-bit floats"}
EXACT = 1e-6
"""The largest `difference` of numbers of which all bits are equal, but for a product in float32."""
NUM_EXPERTS, NUM_CHOSEN, HIDDEN, INNER = 3, 2, 192, 64


def packed_weights(num_out: int, num_in: int, dtype: torch.dtype) -> Iterator[tuple[str, Weight]]:
    """A random weight [N, K] for each kind of kernel for packed weights, for rows of a dtype, with its name."""
    shape = (num_out, num_in)
    codes = torch.randint(256, shape, generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    for name, floats in FLOAT_SCHEMES.items():
        scales = (1 + normal(num_out, num_in // (floats.group or num_in), seed=3).abs()) / 1000
        yield name, Weight(floats, (codes.where(codes & NO_NUMBER != NO_NUMBER, 0), scales), shape, dtype)
    for name, scheme in SCHEMES.items():
        scales = (1 + normal(num_out, num_in // (scheme.group or num_in), seed=3).abs()) / 1000
        factors = [scales, -9 * scales] if scheme.zero == 0 else [scales]
        for scale_dtype in [torch.float32] if scheme.group is None else norms.DTYPES:
            parts = [codes[:, : num_in * scheme.bits // 8], *(factor.to(scale_dtype) for factor in factors)]
            yield f"{name}, scales in {short(scale_dtype)}", Weight(scheme, tuple(parts), shape, dtype)


def exact_matrix(weight: Weight) -> Tensor:
    """The numbers of a weight in float32."""
    return replace(weight, dtype=torch.float32).dense()


def linear_trials(dtype: torch.dtype) -> Iterator[Trial]:
    """Products with packed weights of every kind, for few and for many rows, which must have the same bits.

    All rows are nearly equal, and the bias takes most of them away: what rounding to `dtype` would hide shows. Also
    products with weights that are unpacked.
    """
    num_out, num_in, num_rows = 72, 640, linear.MOST_FEW + 6
    row = normal(num_in)
    x = (row + normal(num_rows, num_in, seed=1) / 64).to(dtype)

    for name, weight in packed_weights(num_out, num_in, dtype):
        bias = -exact_matrix(weight) @ row
        inputs = [x, bias.to(dtype), *weight.parts]
        compute = partial(_multiply_few_and_many, "pack", weight)
        yield Trial(f"products with {name}", "pack", compute, inputs, TOLERANCE[dtype])
        compute = partial(_multiply_unpacked, weight)
        yield Trial(f"unpacked {name}", linear.UNPACKED, compute, inputs, TOLERANCE[dtype])
        compute = partial(_multiply_fewest, weight)
        yield Trial(f"products of fewest rows with {name}", linear.FEWEST, compute, inputs, TOLERANCE[dtype])


def _multiply_few_and_many(
    method: str, like: Weight, kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]
) -> Tensor:
    """The product of all rows, and by how much those of a few of them differ."""
    x, bias, *parts = inputs
    weight = replace(like, parts=tuple(parts))
    if kernels is reference:  # whose products with integers round x, too
        exact = functional.linear(x.float(), exact_matrix(weight), bias.float())
        return torch.cat([exact, torch.zeros_like(exact)])
    product = preferring(kernels, method).pack(weight, bias)
    many, few = product(x), torch.cat([product(x[i : i + 20]) for i in range(0, len(x), 20)])
    return torch.cat([many, few - many])


def _multiply_unpacked(like: Weight, kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
    """The product of enough rows for the weight to be unpacked."""
    x, bias, *parts = inputs
    weight = replace(like, parts=tuple(parts))
    if kernels is reference:
        return functional.linear(x.float(), weight.dense().float(), bias.float())
    return preferring(kernels, linear.UNPACKED).pack(weight, bias)(x)


def _multiply_fewest(like: Weight, kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
    """Products of one row, of two and so on."""
    x, bias, *parts = inputs
    weight = replace(like, parts=tuple(parts))
    x = x[: sum(range(linear.MOST_FEWEST + 1))]
    if kernels is reference:
        return functional.linear(x.float(), exact_matrix(weight), bias.float())
    product = preferring(kernels, linear.FEWEST).pack(weight, bias)
    batches = torch.split(x, [*range(1, linear.MOST_FEWEST + 1)])
    return torch.cat([product(rows) for rows in batches])


def quantised_trials(dtype: torch.dtype, capability: tuple[int, int]) -> Iterator[Trial]:
    """Rows in 8 bits and products with them.

    Products have rows that lose nothing when they are rounded: those with rows in 16 bits give the same.
    """
    for kind in quantised_linear.kinds(capability):
        yield _rows_trial(dtype, kind)
        most, groups = (127, (None,)) if kind == quantised_linear.INTEGERS else (14, (None, 128))
        for group in groups:
            yield _quantised_trial(dtype, kind, group, most)


def _rows_trial(dtype: torch.dtype, kind: str) -> Trial:
    def compute(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        (x,) = inputs
        if isinstance(kernels, CudaKernels) and kind in kernels.preferred:
            rounded = quantised_linear.empty_rows(x, kind)
            quantised_linear.quantise_rows(kernels.launcher, x, kind, rounded)
            codes, scales = rounded.codes, rounded.scales.view(-1, len(x)).T
        elif kind == quantised_linear.INTEGERS:
            codes, scales, _ = quantised_rows(x.float(), x.shape[1])
        else:
            codes, scales = float_rows(x.float())
        width = x.shape[1] if scales.shape[1] == 1 else FLOAT_COLUMNS
        return codes.float() * scales.repeat_interleave(width, 1)[:, : x.shape[1]]

    return Trial(f"rows as {TITLES[kind]}", kind, compute, [normal(3, 4416).to(dtype)], EXACT)


def _quantised_trial(dtype: torch.dtype, kind: str, group: int | None, most: int) -> Trial:
    """Of as many rows as `linear_trials` have. most: the largest number of a row, over 128."""
    num_out, num_in, num_rows = 72, 1216 if group is None else 1280, linear.MOST_FEW + 6
    generator = torch.Generator().manual_seed(4)
    row = torch.randint(-most, most + 1, (num_in,), generator=generator)
    x = row + torch.randint(-1, 2, (num_rows, num_in), generator=generator)
    x.clamp_(-most, most)[:, ::8] = most
    sizes = torch.ones(num_in)  # of floats that have one scale: powers of two, as are those of rows
    if kind == quantised_linear.FLOATS:
        sizes = torch.exp2((torch.arange(num_in) // FLOAT_COLUMNS % 3).float())
    row, x = row * sizes / 128, x * sizes * (1 + torch.arange(num_rows)[:, None] % 2) / 128
    scheme = replace(INT8 if kind == quantised_linear.INTEGERS else Floats(group), rounds_rows=True)
    codes = torch.randint(256, (num_out, num_in), generator=generator).to(torch.uint8)
    if isinstance(scheme, Floats):
        codes = codes.where(codes & NO_NUMBER != NO_NUMBER, 0)
    scales = (1 + normal(num_out, num_in // (group or num_in), seed=3).abs()) / 1000
    weight = Weight(scheme, (codes, scales), (num_out, num_in), dtype)
    bias = -exact_matrix(weight) @ row
    inputs = [x.to(dtype), bias.to(dtype), *weight.parts]
    compute = partial(_multiply_few_and_many, kind, weight)
    title = f"products of rows as {TITLES[kind]}{f', groups of {group}' if group else ''}"
    return Trial(title, kind, compute, inputs, TOLERANCE[dtype])


def dense_trial(dtype: torch.dtype) -> Trial:
    """Products with dense weights, for few and for many rows, which must have the same bits."""
    num_rows = linear.MOST_FEW + 6
    inputs = [normal(num_rows, 640), normal(72, 640, seed=1) / 25, normal(72, seed=2)]

    def compute(kernels: Kernels, layout: Layout, inputs: Sequence[Tensor]) -> Tensor:
        x, weight, bias = inputs
        many = kernels.linear(x, weight, bias)
        if kernels is reference:
            return torch.cat([many, torch.zeros_like(many)])
        few = torch.cat([kernels.linear(x[i : i + 20], weight, bias) for i in range(0, num_rows, 20)])
        return torch.cat([many, few - many])

    return Trial("dense products", "linear", compute, [x.to(dtype) for x in inputs], TOLERANCE[dtype])


def expert_trials(dtype: torch.dtype, *, packed: bool) -> Iterator[Trial]:
    """Experts with weights of every kind, for few and for many rows, which must have the same bits.

    packed: also with those that stay packed.
    """
    num_tokens = 30
    x = normal(num_tokens, HIDDEN).to(dtype)
    weights, ids = normal(num_tokens, NUM_EXPERTS, seed=1).softmax(-1).topk(NUM_CHOSEN)
    dense = [dense_weight(normal(*shape).to(dtype) / 16) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    pairs = {"dense weights": tuple(dense)}
    if packed:
        kinds = zip(
            packed_weights(2 * INNER, HIDDEN, dtype), packed_weights(HIDDEN, INNER, dtype), strict=True
        )
        pairs |= {name: (up, down) for (name, up), (_, down) in kinds}
    for name, (up, down) in pairs.items():
        inputs = [x, ids, weights, *up.parts, *down.parts]
        loaded = partial(load_experts, up, down)
        yield Trial(f"experts with {name}", "experts", add_experts, inputs, TOLERANCE[dtype], load=loaded)


def load_experts(
    like_up: Weight, like_down: Weight, kernels: Kernels, inputs: Sequence[Tensor]
) -> Sequence[Any]:
    """What `add_experts` gets: rows, choice, weights, experts, and these in one call where there is one.

    like_up, like_down: weights whose parts are the last inputs. Each expert has their rows, in another order.
    """
    x, ids, weights, *parts = inputs
    num_parts = len(like_up.parts)
    whole = [
        replace(like_up, parts=tuple(parts[:num_parts])),
        replace(like_down, parts=tuple(parts[num_parts:])),
    ]
    if kernels is reference:  # whose products with integers round x, too
        x, whole = x.float(), [dense_weight(exact_matrix(weight)) for weight in whole]
    up, down = (
        [
            kernels.pack(weight.take(torch.arange(weight.shape[0], device=x.device).roll(number)))
            for number in range(NUM_EXPERTS)
        ]
        for weight in whole
    )
    experts = Experts(up, down, Activation.SILU)
    return x, ids, weights, experts, kernels.experts(experts)


def add_experts(kernels: Kernels, layout: Layout, loaded: Sequence[Any]) -> Tensor:
    """The weighted sums of experts, and by how much those of fewer tokens differ."""
    x, ids, weights, experts, compiled = loaded
    if compiled is None:  # each expert computes all rows, whose weights are 0 if they are not its own
        sums = torch.zeros(x.shape, device=x.device)
        for number, (up, down) in enumerate(zip(experts.up, experts.down, strict=True)):
            own = (weights * (ids == number)).sum(1, keepdim=True)
            sums += own * down(kernels.activate_and_mul(up(x), experts.activation))
        return torch.cat([sums, torch.zeros_like(sums)])
    many = compiled(x, ids, weights)
    few = [compiled(*part) for part in zip(*(each.split(20) for each in (x, ids, weights)), strict=True)]
    return torch.cat([many, torch.cat(few) - many])
