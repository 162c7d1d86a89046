"""A stack of layers: attention, then a feed-forward half, each added to its input and normed.

x -> QKV in one product -> (norm of each head) -> (rotary) -> attention -> output product -> add and norm
  -> up product (and gate) -> activation -> down product -> add and norm -> next layer

With norms first, as in Llama, a norm is what the next product takes, and the sum itself goes on. With norms last,
as in BERT, the normed sum goes on. What a half gives may be normed and scaled before it is added (Gemma 2,
Granite), and both halves may take the same input (Cohere). In place of the feed-forward half, or beside it as a
shared expert, a layer may have experts and a router; these may take the sum before the half, with norms of their
own (Gemma 4). Attention may be to latents, of which keys and values are products, and in its place or beside it may
be a mixer of states (`mixers.py`). Either half may be one that computes itself (`Half`). A layer may attend to the
keys and values of an earlier one, and end with what each token gives it beside states (`InputGate`, Gemma 4).

The loop over the layers is here, for every device, and for decoders and encoders. `cpu/stack.cpp` is the same loop
compiled; it is used if all linear layers are packed weights, dense or quantised, and runs from each half that
computes itself to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.layer import (
    Angles,
    DividedNorm,
    HeadNormForm,
    HeadNorms,
    Indexer,
    Layer,
    LayerNorm,
    LimitedGate,
    Norm,
    Router,
    SumTaker,
    Xielu,
)
from pagewire.kernels.data.mixers import OutputGate, StateMixer
from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.data.states import MixerStates
from pagewire.kernels.data.weight import Linear
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.experts import GroupedExperts
from pagewire.kernels.indexed import IndexedTokens
from pagewire.kernels.latents import GroupedHeads
from pagewire.kernels.mixers import mixed
from pagewire.kernels.ops import (
    activate_and_mul,
    activate_each,
    add_gated,
    add_rms_norm,
    layer_norm,
    open_by,
    paged_attention,
    rms_norm,
    rotary,
    rotate_and_store,
    route,
    step_sizes,
    store_kv,
)


class Additions(NamedTuple):
    """What is added to the results of the first layers, at some tokens (the deep stack of Qwen3-VL).

    places: int64 [n] of the tokens. layers: [n, H] of the states' dtype, for each of the first layers.
    """

    places: Tensor
    layers: Sequence[Tensor]


class Stack:
    """A stack of layers; a single call where the device's kernels allow it.

    input_norm: before the first layer, with norms first; None: there is none.
    norm_first: what a layer's `attention_norm` gives is for its feed-forward half alone, and what its `output_norm`
        gives for the next layer's attention, or the stack's output; the sums themselves go on. Otherwise the normed
        sums go on.
    """

    def __init__(
        self, input_norm: Norm | LayerNorm | None, layers: Sequence[Layer], *, norm_first: bool = True
    ) -> None:
        if input_norm is not None and not norm_first:
            raise ValueError("a norm before the first layer is one of layers that begin with a norm")
        if not norm_first and any(half is not None for layer in layers for half in layer.halves):
            raise ValueError("a half that computes itself is one of layers that begin with a norm")
        both = (layer.attends and layer.feeds and layer.halves == (None, None) for layer in layers)
        if any(
            layer.parallel and not (norm_first and has_both)
            for layer, has_both in zip(layers, both, strict=True)
        ):
            raise ValueError("halves are parallel in layers that begin with a norm and compute both of them")
        if any(layer.beside is not None and (layer.parallel or layer.mixer is not None) for layer in layers):
            raise ValueError("a mixer is beside attention in layers whose halves follow each other")
        if not norm_first and any(layer.ends for layer in layers):
            raise ValueError("sums are changed at the end of layers that begin with a norm")
        self.input_norm, self.layers, self.norm_first = input_norm, layers, norm_first
        mixers = [layer.state_mixer for layer in layers]
        self.states = [[] if mixer is None else mixer.states for mixer in mixers]
        """The shapes of each layer's states."""
        self._pieces: list[Stack] | None = None
        weight = layers[0].norms[0].weight
        self.compiled = implementation_for(weight).stack(input_norm, layers, norm_first=norm_first)
        self._experts = [
            None if layer.mixture is None else GroupedExperts(layer.mixture.experts, weight.device)
            for layer in layers
        ]
        self._heads = [
            None if layer.latents is None else GroupedHeads(layer.latents.heads, weight.device)
            for layer in layers
        ]
        self._adapted_heads = [heads for heads in self._heads if heads is not None and heads.is_adapted]

    def __call__(
        self,
        states: Tensor,
        batch: AttentionBatch,
        caches: Sequence[Cache | None],
        angles: Sequence[Angles] = (),
        x: Tensor | None = None,
        taps: Mapping[int, Tensor] = {},
        memory: MixerStates | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run the batch's tokens through all layers.

        Args:
            states: [T, H], contiguous; overwritten, with norms first by the last sum.
            batch: see `AttentionBatch`; for layers that attend to later keys, of whole prompts without padding.
            caches: of each layer, None of those without attention; one for all may do where all prompts are whole.
            angles: tables of cosines and sines [T, rot_dim], see `Kernels.rotary`; a layer says which is its own.
            x: what the first product takes, in place of the normed states: [T, K], which may be wider.
            taps: tensors [T, H] by numbers of layers, from 1 on: each gets the states behind that layer.
            memory: the states that mixers hand from token to token; None: no layer keeps some.
            inputs: [T, L, P], what each layer with an `InputGate` gets of a token; None: there are no such layers.

        Returns:
            [T, H], normed by the last layer's `output_norm`.
        """
        if self.compiled is not None and not any(heads.is_changed for heads in self._adapted_heads):
            return self.compiled(states, batch, caches, angles, x, taps, memory, inputs)
        if x is None:
            x = normed_by(self.input_norm, states)
        chosen: Tensor | None = None
        parts = zip(self.layers, self._experts, self._heads, caches, strict=True)
        for number, (layer, experts, heads, cache) in enumerate(parts, 1):
            aside, output_norm = None, None if layer.ends else layer.output_norm
            if layer.attends:
                if isinstance(layer.mixer, StateMixer):
                    assert memory is not None and layer.qkv is not None and layer.out is not None
                    given = layer.out(_mixed(layer.mixer, x, layer.qkv, memory, number - 1))
                elif layer.mixer is not None:
                    given = layer.mixer(x)
                elif heads is None:
                    given = _attend(layer, x, angles, batch, cache)
                else:
                    given, chosen = _attend_to_latents(layer, heads, x, angles, batch, cache, chosen)
                if (beside := layer.beside) is not None:
                    assert memory is not None, "its layers keep states"
                    given += beside.out(_mixed(beside.mixer, x, beside.taken, memory, number - 1))
                if not layer.parallel:
                    norm = layer.attention_norm if layer.feeds else output_norm
                    is_whole = layer.halves[0] is not None
                    x, states = self._add(given, states, layer, layer.attended_norm, norm, is_whole=is_whole)
                else:
                    aside = given
                    x = x if layer.attention_norm is None else normed_by(layer.attention_norm, states)
                del given  # its memory serves the products that follow
            if layer.feeds:
                if layer.feed_forward is not None:
                    x = layer.feed_forward(x)
                elif experts is None:
                    x = _feed_forward(layer, x)
                else:
                    x = _mixture(layer, x, states, experts)
                x = x if aside is None else x + aside
                is_whole = layer.feeds_whole
                x, states = self._add(x, states, layer, layer.fed_norm, output_norm, is_whole=is_whole)
            if layer.ends:
                x = _end(layer, states, inputs)
            if number in taps:
                taps[number].copy_(states)
        return x

    def with_additions(
        self,
        states: Tensor,
        batch: AttentionBatch,
        caches: Sequence[Cache | None],
        angles: Sequence[Angles],
        taps: Mapping[int, Tensor],
        additions: Additions,
        memory: MixerStates | None = None,
    ) -> Tensor:
        """As `__call__`, and add to the results of the first layers, for which these run one by one.

        Raises:
            ValueError: norms come last, so that there is no sum to add to.
        """
        if not self.norm_first:
            raise ValueError("layers whose norms come last take no additions")
        if self._pieces is None or len(self._pieces) != len(additions.layers) + 1:
            count = len(additions.layers)
            parts = [*([layer] for layer in self.layers[:count]), self.layers[count:]]
            self._pieces = [Stack(None, part) for part in parts if part]
        x = normed_by(self.input_norm, states)
        first = 0
        for number, piece in enumerate(self._pieces):
            end = first + len(piece.layers)
            own = {tap - first: tensor for tap, tensor in taps.items() if first < tap <= end}
            part = None if memory is None else MixerStates(memory.batch, memory.of_layers[first:end])
            x = piece(states, batch, caches[first:end], angles, x, own, part)
            if number < len(additions.layers):
                places = additions.places
                states.index_add_(0, places, additions.layers[number])
                norm = piece.layers[-1].output_norm
                x.index_copy_(0, places, normed_by(norm, states.index_select(0, places)))
                if end in taps:
                    taps[end].copy_(states)
            first = end
        return x

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's state."""
        return self.layers[0].hidden_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, and of the norms of states."""
        first = 0 if self.input_norm is None else self.input_norm.num_bytes
        return first + sum(layer.num_bytes for layer in self.layers)

    def _add(
        self,
        x: Tensor,
        states: Tensor,
        layer: Layer,
        own: Norm | LayerNorm | None,
        norm: Norm | LayerNorm | None,
        *,
        is_whole: bool,
    ) -> tuple[Tensor, Tensor]:
        """What the next product takes, and what the next sum begins with.

        x: what a half gives. states: overwritten. own: the norm of x. norm: of the sum. is_whole: x is that of all
        ranks; else it is this rank's.
        """
        if layer.ranks is not None and not is_whole:
            x = layer.ranks.all_reduce(x)
        x = normed_by(own, x)
        if layer.residual_scale != 1.0:
            x = x * layer.residual_scale
        if isinstance(norm, Norm):
            x = add_rms_norm(x, states, norm.weight, norm.eps, offset=norm.offset)
        else:
            states += x
            x = normed_by(norm, states)
        return x, states if self.norm_first else x


def _end(layer: Layer, states: Tensor, inputs: Tensor | None) -> Tensor:
    """What the next product takes of a layer's sum [T, H], which is overwritten. inputs: see `Stack`."""
    if (gate := layer.input_gate) is not None:
        assert not isinstance(layer.activation, LimitedGate), "it gates two halves"
        assert inputs is not None, "layers with an input gate get inputs"
        x = activate_each(gate.gate(states), layer.activation) * inputs[:, gate.number]
        states += normed_by(gate.norm, gate.out(x))
    if layer.output_scale != 1.0:
        states *= layer.output_scale
    return normed_by(layer.output_norm, states)


def _feed_forward(layer: Layer, x: Tensor) -> Tensor:
    """The feed-forward half [T, H] of x [T, H]."""
    assert layer.up is not None and layer.down is not None
    if not layer.gated:
        assert not isinstance(layer.activation, LimitedGate), "it gates two halves"
        x = activate_each(layer.up(x), layer.activation)
    else:
        assert not isinstance(layer.activation, Xielu), "a curve is no gate"
        x = activate_and_mul(layer.up(x), layer.activation)
    return layer.down(normed_by(layer.down_norm, x))


def _mixture(layer: Layer, x: Tensor, states: Tensor, experts: GroupedExperts) -> Tensor:
    """The feed-forward half [T, H] of the experts that the layer's router chooses for x [T, H].

    states: [T, H], the sum that x is the norm of.
    """
    mixture = layer.mixture
    assert mixture is not None
    router = mixture.router
    if mixture.of_sum is not None:
        return _beside(layer, x, states, experts, router, mixture.of_sum)
    out = experts(x, *route(router.linear(x.to(router.linear.dtype)), router))
    if mixture.shared_gate is not None:
        add_gated(out, _feed_forward(layer, x), mixture.shared_gate(x))
    elif layer.up is not None:
        out += _feed_forward(layer, x)
    return out


def _beside(
    layer: Layer, x: Tensor, states: Tensor, experts: GroupedExperts, router: Router, own: SumTaker
) -> Tensor:
    """What a dense half makes of x [T, H] and experts of states [T, H], on all ranks, each normed: their sum."""
    taken = normed_by(own.router_norm, states) * own.router_scale * own.router_factor
    ids, weights = route(router.linear(taken), router)
    given = experts(normed_by(own.norm, states), ids, weights * own.expert_scales[ids])
    dense = _feed_forward(layer, x)
    if layer.ranks is not None:
        given, dense = (layer.ranks.all_reduce(part) for part in (given, dense))
    return normed_by(own.dense_norm, dense) + normed_by(own.given_norm, given)


def normed_by(norm: Norm | LayerNorm | DividedNorm | None, x: Tensor) -> Tensor:
    """What a norm makes of x [T, H]; without one: x itself."""
    if norm is None:
        return x
    if isinstance(norm, DividedNorm):
        own = norm.gather.own
        return normed_by(norm.norm, norm.gather(x))[:, own.start : own.stop]
    if isinstance(norm, Norm):
        return rms_norm(x, norm.weight, norm.eps, offset=norm.offset)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


def _attend(
    layer: Layer, x: Tensor, angles: Sequence[Angles], batch: AttentionBatch, cache: Cache | None
) -> Tensor:
    """The attention half [T, H] of x [T, H]."""
    assert layer.qkv is not None and layer.out is not None and cache is not None
    num_tokens, queries = len(x), layer.num_heads * layer.head_dim
    made, gate = layer.qkv(x), OutputGate(layer.head_dim, sigmoid=True, single=layer.head_gates)
    if layer.qkv_limit is not None:
        made = made.clamp_(-layer.qkv_limit, layer.qkv_limit)
    if layer.head_gates:
        made, gates = torch.tensor_split(made, [-layer.num_heads], 1)
    if layer.gated_queries:
        q, gates, made = torch.tensor_split(made, [queries, 2 * queries], 1)
        gates = torch.unflatten(gates, 1, (-1, layer.head_dim))
    else:
        q, made = torch.tensor_split(made, [queries], 1)
    q = torch.unflatten(q, 1, (-1, layer.head_dim))
    q = _store(layer, q, made, angles, batch, cache) if layer.num_kv_heads else _queries(layer, q, angles)
    out = paged_attention(q, cache, batch, layer.scale, layer.terms)
    if layer.value_dim is not None:
        out = out[..., : layer.value_dim]
    out = out.reshape(num_tokens, -1)
    if layer.softplus_gates:
        out = _multiplied(out, step_sizes(gates.flatten(1), None, None), layer.head_gates)
    elif layer.gated_queries or layer.head_gates:
        out = open_by(out, gates, gate)
    return layer.out(normed_by(layer.out_norm, out))


def _multiplied(x: Tensor, gates: Tensor, single: bool) -> Tensor:
    """X [T, N] times float32 gates, rounded before: [T, N], or `single`, [T, G] of groups of equal size."""
    groups = x.view(*gates.shape, -1) if single else x
    gates = gates.to(x.dtype)
    return (groups * (gates[..., None] if single else gates)).view_as(x)


def _mixed(mixer: StateMixer, x: Tensor, taken: Linear, memory: MixerStates, number: int) -> Tensor:
    """What a mixer of states gives [T, M] of x [T, H]. taken: makes what it takes. number: of its states' layer."""
    return mixed(mixer, x, taken(x), memory.of_layers[number], memory.batch)


def _store(
    layer: Layer, q: Tensor, made: Tensor, angles: Sequence[Angles], batch: AttentionBatch, cache: Cache
) -> Tensor:
    """Queries q [T, Hq, D], normed and turned; keys and values, [T, Hkv (D + Dv)] in `made`, are stored."""
    keys = layer.num_kv_heads * layer.head_dim
    k, v = (made, made.clone()) if layer.values_are_keys else torch.tensor_split(made, [keys], 1)
    k, v = (torch.unflatten(part, 1, (layer.num_kv_heads, -1)) for part in (k, v))
    v = normed_by(layer.value_norm, v)
    if layer.value_scale != 1.0:
        v = v * layer.value_scale
    if layer.value_dim is not None and (missing := cache.value_size - layer.value_dim):
        # The cache has zeros behind values, and so have the weighted sums. Its kernels take aligned heads.
        q, k, v = q.contiguous(), k.contiguous(), functional.pad(v, (0, missing))
    q, k, own, norms = _until_stored(layer, q, k, angles)
    return rotate_and_store(q, k, v, own, norms, cache, batch.slot_mapping)


def _queries(layer: Layer, q: Tensor, angles: Sequence[Angles]) -> Tensor:
    """Queries [T, Hq, D], normed and turned, of a layer that makes no keys."""
    q, _, own, norms = _until_stored(layer, q, q[:, :0], angles)
    if norms is not None:
        q = normed_by(norms[0], q)
    if own is not None:
        rotary(q, q[:, :0], *own)
    return q


def _until_stored(
    layer: Layer, q: Tensor, k: Tensor, angles: Sequence[Angles]
) -> tuple[Tensor, Tensor, Angles | None, HeadNorms | None]:
    """Queries and keys as far as they are normed and turned before, and what `rotate_and_store` does to them."""
    own = None if layer.angles is None else angles[layer.angles]
    of_queries = own if layer.query_angles is None else angles[layer.query_angles]
    form = layer.head_norm_form
    norms: Sequence[Norm | LayerNorm | DividedNorm] | None = layer.head_norms
    if norms is not None and form is HeadNormForm.TOGETHER:
        q, k = (normed_by(norm, x.flatten(1)).reshape(x.shape) for norm, x in zip(norms, (q, k), strict=True))
        norms = None
    fused = _fused(norms) if own is of_queries and not layer.interleaved else None
    if norms is not None and fused is None and form is HeadNormForm.EACH:
        q, k = (normed_by(norm, x) for norm, x in zip(norms, (q, k), strict=True))
    if own is not None and layer.interleaved:
        q, k = (by_halves(x, own[0].shape[-1]) for x in (q, k))
    if own is of_queries and (norms is None or form is not HeadNormForm.ROTATED):
        return q, k, own, fused
    for heads, table in ((q, of_queries), (k, own)):
        if table is not None:
            rotary(heads, heads[:, :0], *table)
    if norms is not None and fused is None and form is HeadNormForm.ROTATED:
        q, k = (normed_by(norm, x) for norm, x in zip(norms, (q, k), strict=True))
    return q, k, None, fused


def _fused(norms: Sequence[Norm | LayerNorm | DividedNorm] | None) -> HeadNorms | None:
    """The norms of heads, if they are such that `rotate_and_store` computes."""
    if norms is None:
        return None
    query, key = norms
    return (query, key) if isinstance(query, Norm) and isinstance(key, Norm) else None


def _attend_to_latents(
    layer: Layer,
    heads: GroupedHeads,
    x: Tensor,
    angles: Sequence[Angles],
    batch: AttentionBatch,
    cache: Cache | None,
    chosen: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The attention half [T, H] of x [T, H], see `Latents`; and what its indexer, or the last one, has chosen.

    chosen: by the indexer of a layer before, see `LogitTerms`; None: all keys, or there was none.
    """
    latents = layer.latents
    assert layer.qkv is not None and layer.out is not None and latents is not None and cache is not None
    num_tokens, rank = len(x), latents.rank
    first, key = layer.qkv(x).tensor_split([-layer.head_dim], 1)
    first = normed_by(latents.query_norm, first)
    queries = first if latents.queries is None else latents.queries(first)
    queries = queries.view(num_tokens, layer.num_heads, -1)
    plain, turned = queries.tensor_split([heads.sizes.nope], 2)
    latent, rotated = normed_by(latents.norm, key[:, :rank]), key[:, None, rank:]
    own = None if layer.angles is None else angles[layer.angles]
    turned, rotated = _turned(turned, rotated, own, interleaved=layer.interleaved)
    keys = torch.cat([latent[:, None], rotated], 2)
    store_kv(keys, keys[..., :rank], cache, batch.slot_mapping)
    q, terms = torch.cat([heads.queries(plain), turned], 2), layer.terms
    if latents.indexer is not None:
        chosen = _index(latents.indexer, x, first, own).choose(0, cache, batch)
    if latents.indexer is not None or latents.follows:
        terms = replace(terms, chosen=chosen)
    attended = paged_attention(q, cache, batch, layer.scale, terms)
    return layer.out(heads.outputs(attended).flatten(1)), chosen


def _index(indexer: Indexer, x: Tensor, queries: Tensor, angles: Angles | None) -> IndexedTokens:
    """What an indexer makes of x [T, H]. queries: [T, Q], what the layer's queries are made of."""
    norm, given = indexer.norm, indexer.keys(x)
    keys = layer_norm(given.to(norm.weight.dtype), norm.weight, norm.bias, norm.eps).to(x.dtype)
    heads = indexer.queries(queries).view(len(x), -1, indexer.size)
    heads, turned = _turned(heads, keys[:, None], angles, interleaved=indexer.interleaved)
    num_heads = heads.shape[1]
    weights = indexer.weights(x.to(indexer.weights.dtype)).float() * num_heads**-0.5
    return IndexedTokens(0, heads, turned[:, 0], weights, indexer.size**-0.5, indexer.num_chosen)


def _turned(q: Tensor, k: Tensor, angles: Angles | None, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Heads q, k [T, heads, D], whose first elements are rotated, as a rule in place."""
    if angles is None:
        return q, k
    if interleaved:
        q, k = (by_halves(x, angles[0].shape[-1]) for x in (q, k))
    rotary(q, k, *angles)
    return q, k


def by_halves(heads: Tensor, size: int) -> Tensor:
    """Heads [T, heads, D] whose first `size` elements stand so that those that were neighbours are as far apart as
    rotation expects: first all even ones, then all odd ones.

    Products of queries and keys, both laid out so, are the same but for the order of their sums.
    """
    turned, rest = heads[..., :size], heads[..., size:]
    return torch.cat([turned[..., ::2], turned[..., 1::2], rest], -1)
