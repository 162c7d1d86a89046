"""The experts of a layer, of which each token goes to a few."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.layer import Activation, Experts
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.experts import one_by_one

from .case import Case, Extent, Run, distance, num_copies
from .linear import random_integers


class Sizes(NamedTuple):
    """Of a layer: its experts, how many a token goes to, numbers of a token's state, and those between products."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int


KINDS = {"bfloat16": None, "int4, groups of 128": Integers(4, 128, 8)}
TOKENS = {Extent.FULL: (1, 8, 32, 128, 512, 8192), Extent.QUICK: (1, 32, 2048), Extent.SMALL: (1, 20)}
SIZES = {
    Extent.FULL: (Sizes(128, 8, 2048, 768), Sizes(8, 2, 4096, 14336)),
    Extent.QUICK: (Sizes(128, 8, 2048, 768),),
    Extent.SMALL: (Sizes(4, 2, 128, 128),),
}
"""Of Qwen3-30B-A3B, and of Mixtral 8x7B."""


def expert_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """One token up to a prompt, with random choices.

    The peer is a product for each expert, PyTorch's for dense weights, with numbers of rows that the host knows: a
    worker would wait for them in each layer. The floor of few tokens is the reading of the experts that they go to.
    """
    for name, scheme in KINDS.items():
        for sizes in SIZES[extent]:
            weights = [_weights(scheme, sizes, on, seed) for seed in range(sizes.num_experts)]
            kernels = CudaKernels(launcher, on)
            up, down = ([kernels.pack(pair[half]) for pair in weights] for half in (0, 1))
            experts = Experts(up, down, Activation.SILU)
            for num_tokens in TOKENS[extent]:
                yield _expert_case(kernels, on, name, sizes, experts, weights, num_tokens)


def _weights(scheme: Integers | None, sizes: Sizes, on: str, seed: int) -> tuple[Weight, Weight]:
    """The matrices of an expert."""
    shapes = (2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)
    if scheme is not None:
        up, down = (random_integers(scheme, shape, on, seed) for shape in shapes)
        return up, down
    generator = torch.Generator(on).manual_seed(seed)
    up, down = (
        dense_weight((torch.randn(shape, generator=generator, device=on) / shape[1] ** 0.5).bfloat16())
        for shape in shapes
    )
    return up, down


def _expert_case(
    kernels: CudaKernels,
    on: str,
    name: str,
    sizes: Sizes,
    experts: Experts,
    weights: list[tuple[Weight, Weight]],
    num_tokens: int,
) -> Case:
    compiled, num_chosen = kernels.experts(experts), sizes.num_chosen
    assert compiled is not None
    row_bytes = 2 * 2 * num_tokens * sizes.hidden
    num_used = min(sizes.num_experts, num_tokens * num_chosen)
    copies = num_copies(experts.num_bytes * num_used // sizes.num_experts + row_bytes)
    x = torch.randn(copies, num_tokens, sizes.hidden, device=on).bfloat16()
    shares = torch.randn(copies, num_tokens, sizes.num_experts, device=on).softmax(-1)
    shares, ids = shares.topk(num_chosen)
    counts = [each.flatten().bincount(minlength=sizes.num_experts).tolist() for each in ids]
    orders = [each.flatten().argsort(stable=True) for each in ids]
    up, down = one_by_one(experts.up), one_by_one(experts.down)
    activate = partial(kernels.activate_and_mul, activation=Activation.SILU)

    def each_expert(i: int) -> Tensor:
        rows = down(activate(up(x[i][orders[i] // num_chosen], counts[i])), counts[i])
        weighted = rows * shares[i].flatten()[orders[i], None]
        return torch.zeros_like(x[i], dtype=torch.float32).index_add_(0, orders[i] // num_chosen, weighted)

    def error() -> float:
        result = compiled(x[0], ids[0], shares[0])
        last = compiled(x[0, -1:], ids[0, -1:], shares[0, -1:])
        if not torch.equal(last, result[-1:]):
            return float("inf")  # a token's bits must not depend on the others
        return distance(result, _exact(weights, x[0].double(), ids[0], shares[0].double()))

    used = sum(count > 0 for count in counts[0])
    num_bytes = experts.num_bytes * used // sizes.num_experts + row_bytes
    flops = 2 * num_tokens * num_chosen * 3 * sizes.hidden * sizes.inner
    title = (
        f"{num_chosen} of {sizes.num_experts} experts, {num_tokens} x {sizes.hidden} x {sizes.inner}, {name}"
    )
    peers: dict[str, Run] = {"one by one": each_expert}
    return Case(
        title, num_bytes, flops, copies, lambda i: compiled(x[i], ids[i], shares[i]), error, 2e-2, peers
    )


def _exact(weights: list[tuple[Weight, Weight]], x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The sums in float64."""
    out = torch.zeros_like(x)
    for expert in sorted(set(ids.flatten().tolist())):
        up, down = (
            weight.scheme.dense(weight.parts, torch.float64).to(x.device) for weight in weights[expert]
        )
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        gate, plain = (x[tokens] @ up.T).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * plain) @ down.T
        out.index_add_(0, tokens, rows * shares[tokens, choices, None])
    return out
