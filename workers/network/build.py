"""Builds the network of a transformers module: its layers as one stack, with joined and packed weights.

It is built if the module has one of the known structures (`structures.py`), and used only if it then computes what
the module computes (`proof.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewire.kernels.data.layer import (
    Activation,
    Angles,
    HeadNormForm,
    Layer,
    LayerNorm,
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
from pagewire.kernels.stack import Stack
from pagewire.workers.caches.kv import KVShape
from pagewire.workers.errors import first_line
from pagewire.workers.module.experts import grouped_experts
from pagewire.workers.module.matrices import is_linear
from pagewire.workers.module.replaced_methods import alibi_slopes
from pagewire.workers.module.transforms import RotaryTable, embedding, pack_joined
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.encoder_structures import TABLES, encoder_structure
from pagewire.workers.network.gpt_structures import GPT_STRUCTURES
from pagewire.workers.network.hybrids import HYBRIDS, built_beside, built_halves, order_of
from pagewire.workers.network.latents import latents_of, num_latent_heads
from pagewire.workers.network.network import Embeddings, KVPlace, Network
from pagewire.workers.network.parts import input_gate_of, layer_inputs_of, own_factor, scaled_by
from pagewire.workers.network.routers import RouterParts, SumRouterParts
from pagewire.workers.network.structures import (
    Factors,
    LayerParts,
    OtherStructureError,
    Structure,
    children,
    layer_norm_of,
    plain_norm_of,
    require,
    rms_norm_of,
    structure_of,
)
from pagewire.workers.ranks.stages import Stage


def build_network(
    base: Any, weights: Weights, device: torch.device, stage: Stage | None = None, *, encodes: bool = False
) -> Network:
    """The network of a base model, with its weights packed on `device`.

    stage: of a pipeline, whose layers alone are packed. encodes: tokens attend to later ones, too.

    Raises:
        OtherStructureError: it has another structure; the text says which.
        LoadError: a packed product is wrong.
    """
    with _naming_missing_parts():
        return _builder(base, weights, device, encodes=encodes).network(stage)


def layers_of(base: Any, weights: Weights, *, encodes: bool = False) -> list[LayerParts]:
    """The parts of the layers of a network on the CPU, for which no weights are read. encodes: see `build_network`.

    Raises:
        OtherStructureError: as `build_network` raises it, but for what the values of weights decide.
    """
    with _naming_missing_parts():
        builder = _builder(base, weights, torch.device("cpu"), encodes=encodes)
        parts = _layers(builder, None)
        _activation(builder, parts)
    return parts


@contextmanager
def _naming_missing_parts() -> Iterator[None]:
    """A context in which a part that a module does not have is another structure."""
    try:
        yield
    except AttributeError as error:
        raise OtherStructureError(f"a part is missing: {first_line(error)}") from error


def _builder(base: Any, weights: Weights, device: torch.device, *, encodes: bool) -> _NetworkBuilder:
    structure = encoder_structure(base) if encodes else _decoder_structure(base)
    return _NetworkBuilder(base, structure, weights, device)


def _decoder_structure(base: Any) -> Structure:
    model_type = base.config.model_type
    if model_type in HYBRIDS:
        return HYBRIDS[model_type].structure(base)
    return GPT_STRUCTURES[model_type] if model_type in GPT_STRUCTURES else structure_of(base)


def _layers(builder: _NetworkBuilder, stage: Stage | None) -> list[LayerParts]:
    """The parts of the layers, or of those of a stage."""
    base, structure, rotary = builder.base, builder.structure, _rotary(builder)
    has_rotary = structure.causal and structure.rotary is not None
    require(isinstance(rotary, RotaryTable) or (rotary is None and not has_rotary))
    require(getattr(base, "embeddings_project", None) is None)  # Electra's, if its embeddings are small
    parts = list(structure.layers(base, None if stage is None else stage.layers))
    attending = [part for part in parts if part.attends]
    require(len({(part.blocks, part.heads) for part in attending if part.blocks}) < 2)
    heads = [builder._heads(part) for part in attending]
    require(len(parts) > 0 and all(keys == values for _, keys, values in heads))
    # Kernels of GPUs attend to values of the size of keys, and modules fill theirs with zeros.
    has_sizes = builder.device.type == "cpu" or all(part.value_dim is None for part in parts)
    require(
        has_sizes, "its heads of values have another size than those of keys, for which a GPU has no kernel"
    )
    halves = [half for part in parts for half in part.halves]
    # Nobody has seen whether they can be recorded on a GPU.
    require(not halves or builder.device.type == "cpu")
    return parts


def _rotary(builder: _NetworkBuilder) -> Any:
    """The module that makes angles; None: there is none."""
    name = builder.structure.rotary
    return None if name is None else getattr(builder.base, name, None)


def _activation(builder: _NetworkBuilder, parts: Sequence[LayerParts]) -> Activation:
    """That of the feed-forward halves. A curve is of its layer, whatever the configuration calls it."""
    has_curves = all(part.curve is not None for part in parts)
    return Activation.SILU if has_curves else builder.structure.activation(builder.base.config)


@dataclass
class _NetworkBuilder:
    """Makes a network of a base model's parts."""

    base: Any
    structure: Structure
    weights: Weights
    device: torch.device

    def network(self, stage: Stage | None) -> Network:
        """The network, or what a stage has of it."""
        base, structure, rotary = self.base, self.structure, _rotary(self)
        is_first, is_last = (True, True) if stage is None else (stage.is_first, stage.is_last)
        has_angles = rotary is not None or structure.angles is not None
        parts = _layers(self, stage)
        attending = [part for part in parts if part.attends]
        activation = _activation(self, parts)
        embedding = self._embedding() if is_first else None
        norms = [norm for part in parts for norm in part.norms]
        first = None
        if structure.final_norm is not None:
            # A stage before the last has no final norm; what the one in its place makes is dropped.
            last = structure.final_norm(base) if is_last else parts[-1].norms[0] or parts[-1].own_norms[0]
            first, *norms = *norms, last
        turned = [part.kind for part in attending if part.turned]
        kinds = list(dict.fromkeys(turned)) if has_angles else []
        terms = self._logit_terms(parts)
        packed = norm_pairs(parts, [self._norm(norm) for norm in norms])
        layers = [
            self._layer(part, packed[i], activation, kinds, terms[i], rotary) for i, part in enumerate(parts)
        ]
        # ModernBERT's first layer has no norm of its own: its input is normed already.
        input_norm = None if isinstance(first, nn.Identity) else self._norm(first)
        stack = Stack(input_norm, layers, norm_first=structure.final_norm is not None)
        places = [
            KVPlace(part.index, _shape_of(part, layer, layers), part.window or part.chunk)
            if part.attends
            else None
            for part, layer in zip(parts, layers, strict=True)
        ]
        angles = self._tables(rotary, kinds, layers[0].dtype, parts[0])
        return Network(
            embedding,
            angles,
            stack,
            places,
            self._modules(parts, layers),
            is_last,
            words_name=structure.words if structure.causal else "",
            qkv_order=self._order(parts[0]),
            by_place=structure.unturned_scales is not None,
            layer_inputs=layer_inputs_of(base, structure, self.weights, self.device),
            why=next((part.why for part in parts if part.halves), ""),
        )

    def _heads(self, part: LayerParts) -> list[int]:
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

    def _order(self, part: LayerParts) -> Tensor | None:
        """See `Network.qkv_order`."""
        if part.mixer is not None:
            return order_of(part)
        if part.gated_queries and len(part.qkv) == 3:
            return with_gates_apart(self._heads(part), part.head_dim)
        return None if part.blocks is None else row_order(*part.blocks, self._heads(part), part.head_dim)

    def _embedding(self) -> Embeddings | None:
        structure = self.structure
        if structure.causal:
            return self._decoder_embedding(self.base.get_submodule(structure.words))
        module = self.base.embeddings
        require(children(module) <= {*TABLES, structure.words, structure.norm, "dropout", "drop"})
        norm = (
            None
            if structure.norm is None
            else layer_norm_of(getattr(module, structure.norm), self.weights, self.device)
        )
        tables = [getattr(module, name, None) for name in (structure.words, *TABLES)]
        words, positions, token_types = (None if table is None else self._table(table) for table in tables)
        return Embeddings(words, positions, token_types, norm)

    def _decoder_embedding(self, module: Any) -> Embeddings | None:
        if type(module) is nn.Identity:
            return None
        own = own_factor(module)
        words, dtype = self._table(module), module.weight.dtype
        structure, rows = self.structure, None
        if structure.positions is not None:
            rows = structure.positions(self.base, self.weights).to(self.device, dtype)
        positions = (
            None if rows is None else nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows, _freeze=True)
        )
        norm = None if structure.norm is None else self._norm(self.base.get_submodule(structure.norm))
        if own is None:
            scale = structure.embedding_scale(self.base, dtype)
            return Embeddings(words, positions, norm=norm, scale=scale)
        return Embeddings(scaled_by(own, words, dtype), positions, norm=norm)

    def _table(self, module: nn.Module) -> nn.Module:
        return embedding(module, self.weights, self.device).to(self.device)

    def _norm(self, module: nn.Module | None, size: int = 0) -> Norm | LayerNorm | None:
        """The norm of a module. size: what it is taken over, if not states."""
        if module is None:
            return None
        if not list(module.parameters()):
            return plain_norm_of(module, size or self.base.config.hidden_size, self.base.dtype, self.device)
        return of_dtype(self.structure.norm_of(module, self.weights, self.device), self.base.dtype)

    def _logit_terms(self, parts: Sequence[LayerParts]) -> list[LogitTerms]:
        """The terms of each layer's attention."""
        if self.structure.causal:
            return [
                LogitTerms(
                    part.window,
                    softcap=part.softcap,
                    sinks=sinks_of(part, self._heads, self.weights, self.device),
                    alibi=slopes_of(part, self.weights, self.device),
                    chunk=part.chunk,
                )
                for part in parts
            ]
        relative_bias = self.structure.relative_bias
        bias = None if relative_bias is None else relative_bias(self.base, self.weights).to(self.device)
        return [LogitTerms.two_sided(part.window, bias) for part in parts]

    def _tables(
        self, rotary: Any, kinds: Sequence[str | None], dtype: torch.dtype, form: LayerParts
    ) -> list[Angles]:
        """Cosines and sines [P, rot_dim] of all positions, of each kind of angles. form: a layer that uses them."""
        if (made := self.structure.angles) is not None:
            cos, sin = (half.to(self.device, dtype) for half in made(self.base, self.weights))
            return [(torch.cat([cos, cos], 1), torch.cat([sin, sin], 1))]
        if rotary is None:
            return []
        rotary.to(self.device)
        like = torch.empty(1, 1, 1, dtype=dtype, device=self.device)
        tables = (rotary.table(like, *([] if kind is None else [kind])) for kind in kinds)
        found = [cosines_and_sines(table, dtype) for table in tables]
        if form.turned_back:
            found = [(cos, -sin) for cos, sin in found]
        if form.single_angles:
            found = [(torch.cat([cos, cos], 1), torch.cat([sin, sin], 1)) for cos, sin in found]
        elif form.interleaved:
            found = [(halved(cos), halved(sin)) for cos, sin in found]
        return found + scaling_tables(
            self.structure, self.base, rotary, found, like.expand(1, 1, form.head_dim)
        )

    def _layer(
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
        num_heads, num_kv_heads, _ = self._heads(part) if part.attends else (0, 0, 0)
        attended_norm, fed_norm = map(self._norm, part.own_norms)
        dtype = next(norm.weight.dtype for norm in (*norms, attended_norm, fed_norm) if norm is not None)
        mixture = None if part.router is None else self._mixture(part, part.router, ranks, dtype)
        angles = kinds.index(part.kind) if kinds and part.attends and part.turned else None
        mixer, feed_forward = built_halves(part, rotary, self.weights, self.device, dtype)
        joined = partial(self._joined, factors=part.factors or {})
        latents = None if part.latents is None else latents_of(part, self.weights, self.device)
        return Layer(
            qkv=joined(part.qkv, self._order(part)) if part.qkv else None,
            latents=latents,
            out=None if part.out is None else _of_rank(joined([part.out]), ranks),
            attention_norm=norms[0],
            up=joined(part.up) if part.up else None,
            down=None if part.down is None else _of_rank(joined([part.down]), ranks),
            output_norm=norms[1],
            activation=activation if part.curve is None else xielu_of(part.curve, self.weights),
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
            value_norm=self._norm(part.value_norm, part.head_dim),
            value_dim=part.value_dim,
            value_scale=part.value_scale,
            values_are_keys=mixer is None and latents is None and len(part.qkv) == 2,
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
            feed_forward=feed_forward,
        )

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
        taken, out = self._joined(own.qkv, order_of(own), factors), self._joined([own.out], None, factors)
        return Beside(taken, mixer, _of_rank(out, ranks))

    def _inner_norm(self, module: nn.Module | None) -> Norm | None:
        """The norm of what a layer's second product takes, which each rank has a part of."""
        if module is None:
            return None
        require(self.weights.shards is None, "norms of what is divided over ranks are not")
        return rms_norm_of(module, self.weights, self.device)

    def _head_norms(self, part: LayerParts) -> tuple[Norm, Norm] | tuple[LayerNorm, LayerNorm]:
        assert part.head_norms is not None
        query, key = (self._norm(norm, part.head_dim) for norm in part.head_norms)
        sizes = [part.head_dim] * 2
        if part.head_norm_form is HeadNormForm.TOGETHER:
            sizes = [part.head_dim * count for count in self._heads(part)[:2]]
            # Each rank has some of the heads that are normed together.
            require(self.weights.shards is None, "norms over all heads of a token are not divided over ranks")
        if isinstance(query, Norm) and isinstance(key, Norm):
            found: tuple[Norm, Norm] | tuple[LayerNorm, LayerNorm] = query, key
        else:
            assert isinstance(query, LayerNorm) and isinstance(key, LayerNorm), "both are of one kind"
            require(part.head_norm_form is HeadNormForm.EACH, "layer norms of heads that are turned")
            found = query, key
        require([len(norm.weight) for norm in found] == sizes, "norms of heads have another size")
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
        # On a GPU the host would wait within the stack for experts that have no kernel.
        has_kernel = grouped.compiled is not None and not router.weighs_inputs
        require(self.device.type == "cpu" or has_kernel)
        experts = replace(grouped.experts, weighs_inputs=router.weighs_inputs)
        gate = part.shared_gate
        return Mixture(own, experts, None if gate is None else self._joined([gate]), self._of_sum(part))

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

    def _modules(
        self, parts: Sequence[LayerParts], layers: Sequence[Layer]
    ) -> list[dict[str, dict[str, int]]]:
        """See `Network.modules`."""
        names = {id(module): name for name, module in self.base.named_modules()}

        def sizes(modules: Sequence[Any], total: int) -> dict[str, int]:
            own = [names[id(module)] for module in modules]
            rows = [total] if len(modules) == 1 else [self.weights.num_rows(module) for module in modules]
            return dict(zip(own, rows, strict=True))

        found = []
        for part, layer in zip(parts, layers, strict=True):
            linears = layer.linears()
            own = {
                field: sizes(modules, linears[field].out_features)
                for field, modules in part.linears().items()
                if field in linears and modules
            }
            if layer.mixture is not None:
                own["experts"] = sizes([part.mixture.experts], len(layer.mixture.experts.up))
            found.append(own)
        return found

    def _joined(
        self, linears: Sequence[Any], order: Tensor | None = None, factors: Factors | None = None
    ) -> Linear:
        """One packed linear layer in place of several with the same input. order, factors: see `pack_joined`."""
        require(all(map(is_linear, linears)))
        own = {
            linear: factor
            for linear, factor in (factors or {}).items()
            if linear in linears and not bool((torch.as_tensor(factor) == 1.0).all())
        }
        for linear in own:  # scales of integers may have no room for them
            is_dense = self.weights.matrix(linear).scheme is DENSE
            require(is_dense, "what its quantised weights give is multiplied by numbers")
        return pack_joined(linears, self.weights, self.device, order, own)


def norm_pairs(
    parts: Sequence[LayerParts], norms: Sequence[Norm | LayerNorm | None]
) -> list[tuple[Norm | LayerNorm | None, Norm | LayerNorm | None]]:
    """Of each layer, the norms of its sums: a layer of one half has the last one alone."""
    left = iter(norms)
    return [(next(left) if len(part.norms) > 1 else None, next(left)) for part in parts]


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


def slopes_of(part: LayerParts, weights: Weights, device: torch.device) -> Tensor | None:
    """The slopes float32 of this rank's heads by which logits are biased by distance; None: they are not."""
    if part.alibi is None:
        return None
    assert part.heads is not None, "a bias by distance knows all heads"
    own = weights.own_heads(part.qkv[0])
    slopes = alibi_slopes(part.heads[0], device) * part.alibi
    return slopes if own is None else slopes[own[0].start : own[0].stop].contiguous()


def xielu_of(module: Any, weights: Weights) -> Xielu:
    """The activation that a module of transformers computes with parameters of its own."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    positive, negative, slope, least = (weights.read(module, name) for name in names)
    assert positive is not None and negative is not None and slope is not None and least is not None
    negative = slope + functional.softplus(negative)
    return Xielu(*map(float, (functional.softplus(positive), negative, slope, least)))


def _shape_of(part: LayerParts, layer: Layer, layers: Sequence[Layer]) -> KVShape:
    """The shape of a layer's keys and values, or that of those which it reads. layers: from the first one on."""
    if part.source is None:
        return kv_shape(layer)
    require(part.source < len(layers), "layers of two stages share keys")  # a stage is refused before
    return replace(kv_shape(layers[part.source]), source=part.source)


def kv_shape(layer: Layer) -> KVShape:
    """The shape of a layer's keys and values."""
    latents, size = layer.latents, layer.head_dim
    if latents is not None:
        shape = KVShape(layer.num_kv_heads, size, latents.rank, layer.dtype, values_in_keys=True)
        indexer = latents.indexer
        return shape if indexer is None else replace(shape, index_dim=indexer.size, index_dtype=layer.dtype)
    return KVShape(layer.num_kv_heads, size, layer.value_dim or size, layer.dtype)


def cosines_and_sines(table: Any, dtype: torch.dtype) -> Angles:
    """A rotary module's table [1, P, n] of cosines and one of sines, or one of complex numbers [1, P, n / 2].

    Some have tables of float32 beside states of another dtype, in which kernels take them.
    """
    if isinstance(table, Tensor):
        table = (torch.cat([part, part], -1) for part in (table.real, table.imag))
    cos, sin = (part[0].to(dtype) for part in table)
    return cos, sin


def sinks_of(
    part: LayerParts, heads: Callable[[LayerParts], list[int]], weights: Weights, device: torch.device
) -> Tensor | None:
    """The sinks [Hq] of this rank's query heads, of which `heads` gives the number first; None: there are none."""
    if part.sinks is None:
        return None
    sinks = weights.read(part.sinks, "sinks")
    if sinks is not None and len(sinks) > heads(part)[0]:  # in memory they are this rank's already
        sinks = weights.part(part.sinks, "sinks")
    return None if sinks is None else sinks.to(device)


def query_table(structure: Structure, angles: int | None, num_kinds: int) -> int | None:
    """The number of a layer's table for queries alone, see `scaling_tables`; angles: of the one for its keys."""
    if angles is None:
        return None if structure.unturned_scales is None else num_kinds
    return None if structure.query_scales is None else num_kinds + angles


def scaling_tables(
    structure: Structure, base: Any, rotary: Any, tables: Sequence[Angles], like: Tensor
) -> list[Angles]:
    """Tables for queries that are scaled by their positions; like: a head [1, 1, D].

    They are those of `tables` times the factors, or one of the factors, for queries that are not turned.
    """
    scales_of = structure.query_scales or structure.unturned_scales
    if scales_of is None:
        return []
    require(not rotary.short_length, "queries are scaled by positions that have two rows of angles")
    scales = scales_of(base, rotary.positions.shape[1]).to(like.device)[:, None]
    if structure.query_scales is not None:
        return [((cos * scales).to(like.dtype), (sin * scales).to(like.dtype)) for cos, sin in tables]
    cos = scales.to(like.dtype).expand(-1, like.shape[-1]).contiguous()
    return [(cos, torch.zeros_like(cos))]


def halved(table: Tensor) -> Tensor:
    """A table [P, n] of cosines or sines whose neighbours are equal, with equal halves instead; others stay."""
    even, odd = table[:, ::2], table[:, 1::2]
    return torch.cat([even, even], 1) if torch.equal(even, odd) else table


def _of_rank(linear: Linear, ranks: Sum | None) -> Linear:
    """This rank's part of a layer whose outputs the stack itself adds up over the ranks."""
    require(isinstance(linear, Reduced) == (ranks is not None))
    return linear.linear if isinstance(linear, Reduced) else linear
