"""Experts of transformers' modules, as products of all experts of a layer in one call.

The activation between an expert's two products is found by trying: one that the kernels have is taken where its
results are those of the module, on random input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.data.joining import with_rounded_rows
from pagewire.kernels.data.layer import OF_EACH, Activation, Experts, LimitedGate
from pagewire.kernels.data.weight import UnpackedLinear, Weight, dense_weight
from pagewire.kernels.experts import GroupedExperts
from pagewire.kernels.linear import Linear
from pagewire.kernels.ops import activate_and_mul, activate_each
from pagewire.workers.errors import LoadError
from pagewire.workers.module.attention import NAME
from pagewire.workers.module.matrices import is_experts
from pagewire.workers.module.products import packed
from pagewire.workers.module.transforms import tolerance
from pagewire.workers.module.weights import Weights
from pagewire.workers.versions import has_post_expert_norm

MAGNITUDES = (0.1, 1.0, 10.0, 100.0)  # of inputs that are tried: limits leave small ones alone


def pack_experts(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Pack the matrices of every expert, and make transformers call `run_experts`."""
    experts: list[Any] = [child for child in module.modules() if is_experts(child)]
    for child in experts:
        child.ranks = None if weights.shards is None else weights.shards.collective
        child.grouped = grouped_experts(child, weights, device)
        for owned in (up_name(child), "down_proj"):
            delattr(child, owned)
            if child.has_bias:  # it is in the packed layers
                setattr(child, f"{owned}_bias", None)
        child.config._experts_implementation = NAME
    if experts:
        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register(NAME, run_experts)


def run_experts(module: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum [T, H] of each token's experts; hidden [T, H], expert_ids and weights [T, k]."""
    grouped: GroupedExperts = module.grouped
    out = grouped(hidden, expert_ids, weights)
    if module.ranks is None or has_post_expert_norm(module):
        return out
    return module.ranks.all_reduce(out)  # type: ignore[no-any-return]


def up_name(module: Any) -> str:
    """The attribute that holds the experts' first matrices."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def grouped_experts(module: Any, weights: Weights, device: torch.device) -> GroupedExperts:
    """The experts of a module, packed and proven.

    Raises:
        LoadError: a product is wrong.
    """
    if not is_experts(module):
        return blocks_of_experts(module, weights, device)
    up, down = (expert_linears(module, name, weights, device) for name in (up_name(module), "down_proj"))
    between = module._apply_gate if module.has_gate else module.act_fn
    activation = activation_of(
        between, up[0].out_features, gated=module.has_gate, limited=limited_gate(module)
    )
    grouped = proven(Experts(up, down, activation, gated=module.has_gate), device, between)
    if not has_post_expert_norm(module):
        return grouped
    return GroupedExperts(grouped.experts, device, between, normed(module, weights))


def proven(experts: Experts, device: torch.device, between: Callable[[Tensor], Tensor]) -> GroupedExperts:
    """Experts on a device. between: the activation.

    Raises:
        LoadError: a product is wrong.
    """
    grouped = GroupedExperts(experts, device, between)
    if device.type == "cpu" or grouped.compiled is not None:  # on a GPU they run one by one otherwise
        check_experts(grouped, device)
    return grouped


def blocks_of_experts(module: Any, weights: Weights, device: torch.device) -> GroupedExperts:
    """The experts of DBRX: those of all lie one below the other in each of three matrices [E I, H].

    They are the gates' and the other rows of an expert's first product, and the transposed ones of its second.

    Raises:
        LoadError: a product is wrong.
    """
    own, up, down = module.mlp, [], []
    tensors = [weights.read(own, name) for name in ("w1", "v1", "w2")]
    blocks = [tensor.chunk(module.num_experts) for tensor in tensors if tensor is not None]
    for gate, rest, last in zip(*blocks, strict=True):
        first = Weight.joined([dense_weight(gate), dense_weight(rest)])
        up.append(packed(first, None, device))
        down.append(packed(dense_weight(last.T), None, device))
    weights.let_go()

    def between(rows: Tensor) -> Tensor:
        gates, rest = rows.chunk(2, -1)
        return own.activation_fn(gates) * rest  # type: ignore[no-any-return]

    activation = activation_of(between, up[0].out_features, gated=True)
    return proven(Experts(up, down, activation), device, between)


def normed(module: Any, weights: Weights) -> Callable[[Tensor], Tensor]:
    """The experts' norm of whole rows [R, H]: each rank's are added up before."""
    norm: Callable[[Tensor], Tensor] = module.post_expert_norm
    if weights.shards is None:
        return norm
    ranks = weights.shards.collective
    return lambda rows: norm(ranks.all_reduce(rows))


def expert_linears(module: Any, name: str, weights: Weights, device: torch.device) -> list[Linear]:
    """A packed linear for each expert, from the matrices [E, N, K] (or transposed) in attribute `name`."""
    biases = weights.part(module, f"{name}_bias") if module.has_bias else None
    linears = []
    for expert, matrix in enumerate(weights.stacked(module, name)):
        bias = None if biases is None else biases[expert]
        # Products of all experts in one launch have rows in 16 bits.
        linears.append(packed(with_rounded_rows(matrix, False), bias, device))
        weights.let_go()
    return linears


def limited_gate(module: Any) -> LimitedGate | None:
    """The gate with limits of a module with an attribute for them, 0 or infinity of which is none; else None."""
    limit = getattr(module, "swiglu_limit", getattr(module, "limit", None))
    if not isinstance(limit, int | float) or not 0 < limit < math.inf:
        return None
    return LimitedGate(float(limit), getattr(module, "swiglu_alpha", None))


def has_limits(experts: Any) -> bool:
    """True if what is between the products of experts is their gate with limits; no weights are read."""
    limited, size = limited_gate(experts), 32
    if limited is None or not experts.has_gate:
        return False
    return activation_of(experts._apply_gate, size, gated=True, limited=limited) == limited


def activation_of(
    between: Callable[[Tensor], Tensor], size: int, *, gated: bool, limited: LimitedGate | None = None
) -> Activation | LimitedGate | None:
    """The activation that a function of rows [R, size] computes; None if the kernels have none like it.

    gated: a row has gates, and what they open. limited: another one that is tried.
    """
    x = torch.randn(16, size, generator=torch.Generator().manual_seed(0))
    own: Callable[..., Tensor] = activate_and_mul if gated else activate_each
    tried: list[Activation | LimitedGate] = [*(Activation if gated else OF_EACH)]
    for activation in tried if limited is None else [*tried, limited]:
        # Of a nearly closed gate all digits may be lost; what remains is of the size of input squared.
        if all(
            torch.allclose(
                own(m * x, activation),
                between(m * x),
                rtol=tolerance(x.dtype),
                atol=1e-6 * m * m,
            )
            for m in MAGNITUDES
        ):
            return activation
    return None


def check_experts(grouped: GroupedExperts, device: torch.device) -> None:
    """Compare the products of all experts at once with a product for each expert; every expert has rows.

    Raises:
        LoadError: a bit differs, or of dense weights on a GPU, which PyTorch adds up in another order, more than
            rounding.
    """
    experts = grouped.experts
    num_experts, first = len(experts.up), experts.up[0]
    x = torch.randn(num_experts, first.in_features, generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(num_experts)[:, None] + torch.arange(min(2, num_experts))) % num_experts
    weights = torch.linspace(0.25, 1.0, ids.numel()).view(ids.shape)
    inputs = x.to(device, first.dtype), ids.to(device), weights.to(device)
    found, expected = grouped(*inputs), grouped.one_by_one(*inputs)
    is_right = torch.equal(found, expected)
    if not is_right and any(isinstance(linears[0], UnpackedLinear) for linears in (experts.up, experts.down)):
        difference = (found.float() - expected.float()).norm()
        is_right = bool(difference <= tolerance(first.dtype) * expected.float().norm())
    if not is_right:
        raise LoadError(f"the grouped product of {num_experts} experts differs from that of each")
