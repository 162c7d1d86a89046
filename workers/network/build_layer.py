"""Packs the parts of a layer (`LayerParts`) as a `Layer` of plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewire.kernels.data.layer import (
    Activation,
    DividedNorm,
    HeadNormForm,
    Layer,
    LayerNorm,
    LimitedGate,
    Mixture,
    Norm,
    SumTaker,
    Xielu,
)
from pagewire.kernels.data.mixers import Beside
from pagewire.kernels.data.paging import LogitTerms
from pagewire.kernels.data.reduced import Reduced, Sum
from pagewire.kernels.data.weight import DENSE
from pagewire.kernels.linear import Linear
from pagewire.workers.families.routers import RouterParts, SumRouterParts
from pagewire.workers.families.structures import (
    Factors,
    LayerParts,
    Structure,
    plain_norm_of,
    require,
    rms_norm_of,
)
from pagewire.workers.module.experts import grouped_experts
from pagewire.workers.module.matrices import is_linear
from pagewire.workers.module.transforms import pack_joined
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.hybrids import built_beside, built_halves, order_of
from pagewire.workers.network.latents import latents_of, num_latent_heads
from pagewire.workers.network.parts import input_gate_of


@dataclass(frozen=True)
class LayerBuilder:
    """Makes layers of a base model's parts, with their linear layers joined and packed on a device."""

    base: Any
    structure: Structure
    weights: Weights
    device: torch.device

    def of(
        self,
        part: LayerParts,
        norms: tuple[Norm | LayerNorm | None, Norm | LayerNorm | None],
        activation: Activation,
        kinds: Sequence[str | None],
        terms: LogitTerms,
        rotary: Any,
    ) -> Layer:
        """A layer of the stack, with joined and packed linear layers. norms: of the sums in it."""
        ranks = self._ranks(part)
        num_heads, num_kv_heads, _ = self.heads(part) if part.attends else (0, 0, 0)
        attended_norm, fed_norm = map(self.norm, part.own_norms)
        dtype = next(norm.weight.dtype for norm in (*norms, attended_norm, fed_norm) if norm is not None)
        mixture = None if part.router is None else self._mixture(part, part.router, ranks, dtype)
        angles = kinds.index(part.kind) if kinds and part.attends and part.turned else None
        mixer, feed_forward = built_halves(part, rotary, self.weights, self.device, dtype)
        joined = partial(self.joined, factors=part.factors or {}, biases=self._gate_bias(part))
        latents = None if part.latents is None else latents_of(part, self.weights, self.device)
        return Layer(
            qkv=joined(part.qkv, self.order(part)) if part.qkv else None,
            latents=latents,
            out=None if part.out is None else _of_rank(joined([part.out]), ranks),
            attention_norm=norms[0],
            up=joined(part.up) if part.up else None,
            down=None if part.down is None else _of_rank(joined([part.down]), ranks),
            output_norm=norms[1],
            activation=self._activation(part, activation),
            gated=part.gated,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=part.head_dim,
            scale=(part.head_dim or 1) ** -0.5 if part.scale is None else part.scale,
            angles=angles,
            query_angles=query_table(self.structure, angles, len(kinds)),
            interleaved=part.interleaved,
            terms=terms,
            attended_norm=attended_norm,
            fed_norm=fed_norm,
            residual_scale=part.residual_scale,
            parallel=part.parallel,
            head_norm_form=part.head_norm_form,
            head_norms=None if part.head_norms is None else self._head_norms(part),
            value_norm=self.norm(part.value_norm, part.head_dim),
            value_dim=part.value_dim,
            value_scale=part.value_scale,
            values_are_keys=part.values_are_keys,
            input_gate=input_gate_of(part, self.structure, self.weights, self.device),
            output_scale=number_of(part.output_scale, self.weights),
            qkv_limit=part.qkv_limit,
            out_norm=self._inner_norm(part.out_norm),
            down_norm=self._inner_norm(part.down_norm),
            mixture=mixture,
            ranks=ranks,
            mixer=mixer,
            beside=self._beside(part, ranks, dtype),
            gated_queries=part.gated_queries,
            head_gates=part.head_gates,
            softplus_gates=part.softplus_gates,
            feed_forward=feed_forward,
        )

    def _activation(self, part: LayerParts, usual: Activation) -> Activation | LimitedGate | Xielu:
        """That of a layer's feed-forward half; usual: of halves that have none of their own."""
        return part.limited or usual if part.curve is None else xielu_of(part.curve, self.weights)

    def heads(self, part: LayerParts) -> list[int]:
        """The numbers of this rank's query, key and value heads of a layer."""
        if part.latents is not None:
            return [num_latent_heads(part.latents, self.weights), 1, 1]
        if len(part.qkv) > 1 or part.source is not None:
            sizes = [*[part.head_dim] * (len(part.qkv) - 1), part.value_dim or part.head_dim]
            heads = [
                self.weights.num_rows(linear) // size for linear, size in zip(part.qkv, sizes, strict=True)
            ]
            if part.source is not None:
                return [heads[0], 0, 0]
            if part.gated_queries:
                return [heads[0], *heads[2:]] if len(heads) == 4 else [heads[0] // 2, *heads[1:]]
            return [*heads, heads[-1]][:3]  # values may be keys
        own = self.weights.own_heads(part.qkv[0])
        if own is not None:
            queries, keys = map(len, own)
        else:
            queries, keys = part.heads or (self.weights.num_rows(part.qkv[0]) // (3 * part.head_dim),) * 2
        return [queries, keys, keys]

    def order(self, part: LayerParts) -> Tensor | None:
        """See `Network.qkv_order`."""
        if part.mixer is not None:
            return order_of(part)
        if part.gated_queries and len(part.qkv) == 3:
            return with_gates_apart(self.heads(part), part.head_dim)
        return None if part.blocks is None else row_order(*part.blocks, self.heads(part), part.head_dim)

    def norm(self, module: nn.Module | None, size: int = 0) -> Norm | LayerNorm | None:
        """The norm of a module. size: what it is taken over, if not states."""
        if module is None:
            return None
        if not list(module.parameters()):
            return plain_norm_of(module, size or self.base.config.hidden_size, self.base.dtype, self.device)
        return of_dtype(self.structure.norm_of(module, self.weights, self.device), self.base.dtype)

    def joined(
        self,
        linears: Sequence[Any],
        order: Tensor | None = None,
        factors: Factors | None = None,
        biases: Mapping[Any, Tensor] | None = None,
    ) -> Linear:
        """One packed linear layer in place of several with the same input. The rest: see `pack_joined`."""
        require(all(map(is_linear, linears)))
        numbers = {
            linear: torch.as_tensor(factor).cpu()
            for linear, factor in (factors or {}).items()
            if linear in linears
        }
        own = {linear: factor for linear, factor in numbers.items() if not bool((factor == 1.0).all())}
        for linear in own:  # scales of integers may have no room for them
            is_dense = self.weights.matrix(linear).scheme is DENSE
            require(is_dense, "what its quantised weights give is multiplied by numbers")
        return pack_joined(linears, self.weights, self.device, order, own, biases)

    def _gate_bias(self, part: LayerParts) -> dict[Any, Tensor]:
        """The bias of what makes gates, of this rank's heads, by its module."""
        bias = None if part.gate_bias is None else self.weights.part(*part.gate_bias)
        return {} if bias is None else {part.qkv[1]: bias.repeat_interleave(part.head_dim)}

    def _ranks(self, part: LayerParts) -> Sum | None:
        """What adds up a layer's outputs over the ranks; None where each rank has all of the layer."""
        shards, cut = self.weights.shards, self.weights.cut
        ends = [cut(linear) for linear in (part.out, part.down) if linear is not None]
        if part.router is not None:
            ends.append(cut(part.mixture.experts, "down_proj"))
        return None if shards is None or not any(ends) else shards.collective

    def _beside(self, part: LayerParts, ranks: Sum | None, dtype: torch.dtype) -> Beside | None:
        """The mixer beside a layer's attention, between packed linear layers. dtype: of states."""
        mixer, own = built_beside(part, self.weights, self.device, dtype), part.beside
        if mixer is None or own is None:
            return None
        factors = part.factors or {}
        taken, out = self.joined(own.qkv, order_of(own), factors), self.joined([own.out], None, factors)
        return Beside(taken, mixer, _of_rank(out, ranks))

    def _inner_norm(self, module: nn.Module | None) -> Norm | DividedNorm | None:
        """The norm of what a layer's second product takes, which each rank has a part of."""
        return (
            None if module is None else self._divided(module, rms_norm_of(module, self.weights, self.device))
        )

    def _divided(self, module: nn.Module, norm: Norm) -> Norm | DividedNorm:
        """A norm over what the ranks have together, if its inputs are divided."""
        gather = self.weights.gather(module)
        return norm if gather is None else DividedNorm(norm, gather)

    def _head_norms(
        self, part: LayerParts
    ) -> tuple[Norm, Norm] | tuple[LayerNorm, LayerNorm] | tuple[DividedNorm, DividedNorm]:
        assert part.head_norms is not None
        query, key = (self.norm(norm, part.head_dim) for norm in part.head_norms)
        gathers = [self.weights.gather(norm) for norm in part.head_norms]
        sizes = [part.head_dim] * 2
        if part.head_norm_form is HeadNormForm.TOGETHER:
            sizes = [
                part.head_dim * count if gather is None else gather.size
                for count, gather in zip(self.heads(part), gathers, strict=False)
            ]
        require(
            [None if norm is None else len(norm.weight) for norm in (query, key)] == sizes,
            "norms of heads have another size",
        )
        first, second = gathers
        if first is not None and second is not None:
            assert isinstance(query, Norm) and isinstance(key, Norm), "only RMS norms are over all heads"
            return DividedNorm(query, first), DividedNorm(key, second)
        if isinstance(query, Norm) and isinstance(key, Norm):
            found: tuple[Norm, Norm] | tuple[LayerNorm, LayerNorm] = query, key
        else:
            assert isinstance(query, LayerNorm) and isinstance(key, LayerNorm), "both are of one kind"
            require(part.head_norm_form is HeadNormForm.EACH, "layer norms of heads that are turned")
            found = query, key
        return found

    def _mixture(
        self,
        part: LayerParts,
        router: RouterParts | SumRouterParts,
        ranks: Sum | None,
        dtype: torch.dtype,
    ) -> Mixture:
        """The feed-forward half of experts that a layer has, packed. dtype: of states."""
        module = part.mixture
        require((self.weights.cut(module.experts, "down_proj") is None) == (ranks is None))
        own = router.packed(self.weights, self.device, dtype)
        grouped = grouped_experts(module.experts, self.weights, self.device)
        require(grouped.experts.activation is not None and grouped.after is None)
        experts = replace(grouped.experts, weighs_inputs=router.weighs_inputs)
        gate = part.shared_gate
        return Mixture(own, experts, None if gate is None else self.joined([gate]), self._of_sum(part))

    def _of_sum(self, part: LayerParts) -> SumTaker | None:
        """What experts have for themselves that take the sum before the half; None: they do not."""
        if part.of_sum is None:
            return None
        router, *modules = part.of_sum
        norm, given_norm, dense_norm = (
            self.structure.norm_of(module, self.weights, self.device) for module in modules
        )
        scale, expert_scales = (self.weights.read(router, name) for name in ("scale", "per_expert_scale"))
        assert scale is not None and expert_scales is not None
        return SumTaker(
            plain_norm_of(router.norm, self.base.config.hidden_size, self.base.dtype, self.device),
            scale.to(self.device),
            float(router.scalar_root_size),
            expert_scales.to(self.device, torch.float32),
            norm,
            given_norm,
            dense_norm,
        )


def of_dtype(norm: Norm | LayerNorm, dtype: torch.dtype) -> Norm | LayerNorm:
    """A norm in the dtype of states: transformers keeps the weights of some in float32 beside float16."""
    weight = norm.weight.to(dtype)
    if isinstance(norm, Norm):
        return replace(norm, weight=weight)
    return replace(norm, weight=weight, bias=None if norm.bias is None else norm.bias.to(dtype))


def number_of(place: tuple[Any, str] | None, weights: Weights) -> float:
    """The one number in a buffer of a module, given by its name; 1 without any."""
    number = None if place is None else weights.read(*place)
    return 1.0 if number is None else float(number)


def row_order(count: int, order: str, heads: Sequence[int], head_dim: int) -> Tensor | None:
    """Where rows of queries, keys and values, one below the other, are in blocks of them: int64 [rows].

    None if they are where they should be. count, order: see `LayerParts.blocks`. heads: the numbers of all three.
    """
    sizes = dict(zip("qkv", heads, strict=True))
    count = count or sizes["k"]
    require(all(size % count == 0 for size in heads), "blocks of rows cut heads")
    rows = torch.arange(sum(heads) * head_dim).view(count, -1, head_dim)
    parts = torch.split(rows, [sizes[name] // count for name in order], 1)
    found = dict(zip(order, parts, strict=True))
    laid = torch.cat([found[name].flatten() for name in "qkv"])
    return None if torch.equal(laid, rows.flatten()) else laid


def with_gates_apart(heads: Sequence[int], head_dim: int) -> Tensor:
    """Where rows of queries, their gates, keys and values are, if a gate lies behind each query head: int64 [rows].

    heads: the numbers of query, key and value heads.
    """
    rows = torch.arange((heads[0] + sum(heads)) * head_dim)
    pairs, rest = rows.tensor_split([2 * heads[0] * head_dim])
    return torch.cat([pairs.view(-1, 2, head_dim).transpose(0, 1).flatten(), rest])


def xielu_of(module: Any, weights: Weights) -> Xielu:
    """The activation that a module of transformers computes with parameters of its own."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    positive, negative, slope, least = (weights.read(module, name) for name in names)
    assert positive is not None and negative is not None and slope is not None and least is not None
    negative = slope + functional.softplus(negative)
    return Xielu(*map(float, (functional.softplus(positive), negative, slope, least)))


def query_table(structure: Structure, angles: int | None, num_kinds: int) -> int | None:
    """The number of a layer's table for queries alone, see `scaling_tables`; angles: of the one for its keys."""
    if angles is None:
        return None if structure.unturned_scales is None else num_kinds
    return None if structure.query_scales is None else num_kinds + angles


def _of_rank(linear: Linear, ranks: Sum | None) -> Linear:
    """This rank's part of a layer whose outputs the stack itself adds up over the ranks."""
    require(
        isinstance(linear, Reduced) == (ranks is not None),
        "the plan for several ranks divides one half of a layer, and not the other",
    )
    return linear.linear if isinstance(linear, Reduced) else linear
