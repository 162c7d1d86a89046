"""Builds the network of a transformers module: its layers as one stack, with joined and packed weights.

It is built if the module has one of the known structures (`workers/families`), and used only if it then computes
what the module computes (`proof.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.data.layer import (
    Activation,
    Angles,
    Layer,
    LayerNorm,
    Norm,
)
from pagewire.kernels.data.paging import LogitTerms
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.stack import Stack
from pagewire.workers.caches.kv import KVShape
from pagewire.workers.errors import first_line
from pagewire.workers.families.encoder_structures import TABLES, encoder_structure
from pagewire.workers.families.gpt_structures import GPT_STRUCTURES
from pagewire.workers.families.structures import (
    Factors,
    LayerParts,
    OtherStructureError,
    Structure,
    children,
    layer_norm_of,
    require,
    structure_of,
)
from pagewire.workers.module.replaced_methods import alibi_slopes
from pagewire.workers.module.transforms import RotaryTable, embedding
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.build_layer import LayerBuilder
from pagewire.workers.network.hybrids import HYBRIDS, mixer_linears, mixer_orders
from pagewire.workers.network.network import Embeddings, KVPlace, ModuleRows, Network
from pagewire.workers.network.parts import layer_inputs_of, own_factor, scaled_by
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
        parts = builder.layers(None)
        builder.activation(parts)
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
    layer = LayerBuilder(base, structure, weights, device)
    return _NetworkBuilder(base, structure, weights, device, layer)


def _decoder_structure(base: Any) -> Structure:
    own: Structure | None = getattr(base, "pagewire_structure", None)
    if own is not None:  # a class of one's own (docs/own_models.md)
        return own
    model_type = base.config.model_type
    if model_type in HYBRIDS:
        return HYBRIDS[model_type].structure(base)
    return GPT_STRUCTURES[model_type] if model_type in GPT_STRUCTURES else structure_of(base)


@dataclass(frozen=True)
class _NetworkBuilder:
    """Makes a network of a base model's parts. layer: makes its layers."""

    base: Any
    structure: Structure
    weights: Weights
    device: torch.device
    layer: LayerBuilder

    def network(self, stage: Stage | None) -> Network:
        """The network, or what a stage has of it."""
        base, structure, rotary = self.base, self.structure, self._rotary
        is_first, is_last = (True, True) if stage is None else (stage.is_first, stage.is_last)
        has_angles = rotary is not None or structure.angles is not None
        parts = self.layers(stage)
        attending = [part for part in parts if part.attends]
        activation = self.activation(parts)
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
        number = 2 * (parts[0].index if structure.depth_scaled else 0) + 1
        made = [self._norm_of_sum(norm, number + i) for i, norm in enumerate((first, *norms))]
        packed = norm_pairs(parts, made[1:])
        layers = [
            self.layer.of(part, packed[i], activation, kinds, terms[i], rotary)
            for i, part in enumerate(parts)
        ]
        stack = Stack(made[0], layers, norm_first=structure.final_norm is not None)
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
            words_name=structure.words if structure.causal else f"embeddings.{structure.words}",
            by_place=structure.unturned_scales is not None and structure.unturned_scales.by_place,
            layer_inputs=layer_inputs_of(base, structure, self.weights, self.device),
            why=next((part.why for part in parts if part.halves), ""),
        )

    def layers(self, stage: Stage | None) -> list[LayerParts]:
        """The parts of the layers, or of those of a stage."""
        base, structure, rotary = self.base, self.structure, self._rotary
        has_rotary = structure.causal and structure.rotary is not None
        tables = rotary if isinstance(rotary, nn.ModuleList) else [rotary]
        is_whole = all(isinstance(table, RotaryTable) for table in tables)
        require(is_whole or (rotary is None and not has_rotary))
        require(getattr(base, "embeddings_project", None) is None)  # Electra's, if its embeddings are small
        parts = list(structure.layers(base, None if stage is None else stage.layers))
        attending = [part for part in parts if part.attends]
        require(len({(part.blocks, part.heads) for part in attending if part.blocks}) < 2)
        heads = [self.layer.heads(part) for part in attending]
        require(len(parts) > 0 and all(keys == values for _, keys, values in heads))
        has_sizes = self.device.type == "cpu" or all((p.value_dim or 0) <= p.head_dim for p in parts)
        require(has_sizes, "its heads of values are larger than those of keys, for which a GPU has no kernel")
        return parts

    def _norm_of_sum(self, module: Any, number: int) -> Norm | LayerNorm | None:
        """A norm of the sum of this number, from 1 on; see `DecoderNames.depth_scaled`."""
        # ModernBERT's first layer has no norm of its own: its input is normed already.
        norm = None if isinstance(module, nn.Identity) else self.layer.norm(module)
        is_scaled = self.structure.depth_scaled and norm is not None
        return replace(norm, eps=norm.eps * number) if is_scaled and norm is not None else norm

    @property
    def _rotary(self) -> Any:
        """The module that makes angles; None: there is none."""
        name = self.structure.rotary
        return None if name is None else getattr(self.base, name, None)

    def activation(self, parts: Sequence[LayerParts]) -> Activation:
        """That of the feed-forward halves. A curve is of its layer, whatever the configuration calls it."""
        has_curves = all(part.curve is not None for part in parts)
        return Activation.SILU if has_curves else self.structure.activation(self.base.config)

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
        norm = None if structure.norm is None else self.layer.norm(self.base.get_submodule(structure.norm))
        if own is None:
            scale = structure.embedding_scale(self.base, dtype)
            return Embeddings(words, positions, norm=norm, scale=scale)
        return Embeddings(scaled_by(own, words, dtype), positions, norm=norm)

    def _table(self, module: nn.Module) -> nn.Module:
        return embedding(module, self.weights, self.device).to(self.device)

    def _logit_terms(self, parts: Sequence[LayerParts]) -> list[LogitTerms]:
        """The terms of each layer's attention."""
        if self.structure.causal:
            return [
                LogitTerms(
                    part.window,
                    softcap=part.softcap,
                    sinks=sinks_of(part, self.layer.heads, self.weights, self.device),
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
        tables = (table_of(rotary, kind, like) for kind in kinds)
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

    def _modules(
        self, parts: Sequence[LayerParts], layers: Sequence[Layer]
    ) -> list[dict[str, dict[str, ModuleRows]]]:
        """See `Network.modules`."""
        names = {id(module): name for name, module in self.base.named_modules()}
        found = []
        for part, layer in zip(parts, layers, strict=True):
            linears, orders = layer.linears(), {"qkv": self.layer.order(part)} | mixer_orders(part)
            own = {}
            for field, modules in (part.linears() | mixer_linears(part)).items():
                if field in linears and modules:
                    rows = self._rows(
                        modules, linears[field].out_features, orders.get(field), part.factors or {}
                    )
                    own[field] = {names[id(m)]: of_module for m, of_module in zip(modules, rows, strict=True)}
            if layer.mixture is not None:
                experts = names[id(part.mixture.experts)]
                own["experts"] = {experts: ModuleRows(len(layer.mixture.experts.up))}
            found.append(own)
        return found

    def _rows(
        self, modules: Sequence[Any], total: int, order: Tensor | None, factors: Factors
    ) -> Iterator[ModuleRows]:
        """The rows of modules in a linear layer of so many outputs. order: of all, which leaves each its place."""
        first = 0
        for module in modules:
            count = total if len(modules) == 1 else self.weights.num_rows(module)
            own = None if order is None else order[first : first + count] - first
            if own is not None and torch.equal(own, torch.arange(count)):
                own = None
            by = None
            if module in factors:
                by = torch.as_tensor(factors[module], dtype=torch.float32).cpu().expand(count)
                by = by if own is None else by[own]
            is_scaled = by is not None and bool((by != 1.0).any())
            yield ModuleRows(count, own, by.contiguous() if by is not None and is_scaled else None)
            first += count


def norm_pairs(
    parts: Sequence[LayerParts], norms: Sequence[Norm | LayerNorm | None]
) -> list[tuple[Norm | LayerNorm | None, Norm | LayerNorm | None]]:
    """Of each layer, the norms of its sums: a layer of one half has the last one alone."""
    left = iter(norms)
    return [(next(left) if len(part.norms) > 1 else None, next(left)) for part in parts]


def slopes_of(part: LayerParts, weights: Weights, device: torch.device) -> Tensor | None:
    """The slopes float32 of this rank's heads by which logits are biased by distance; None: they are not."""
    if part.alibi is None:
        return None
    assert part.heads is not None, "a bias by distance knows all heads"
    own = weights.own_heads(part.qkv[0])
    slopes = alibi_slopes(part.heads[0], device) * part.alibi
    return slopes if own is None else slopes[own[0].start : own[0].stop].contiguous()


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
    value_size = layer.value_dim or size
    if value_size != size and implementation_for(layer.norms[0].weight).latents is not None:
        value_size = size  # kernels of GPUs attend to values of the size of keys
    return KVShape(layer.num_kv_heads, size, value_size, layer.dtype)


def table_of(rotary: Any, kind: str | None, like: Tensor) -> Any:
    """What a rotary module gives of one kind, or the one of a list with this base of its frequencies."""
    if not isinstance(rotary, nn.ModuleList):
        return rotary.table(like, *([] if kind is None else [kind]))
    tables: list[Any] = list(rotary)
    (own,) = (each for each in tables if str(float(each.config.rope_parameters["rope_theta"])) == kind)
    return own.table(like)


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


def scaling_tables(
    structure: Structure, base: Any, rotary: Any, tables: Sequence[Angles], like: Tensor
) -> list[Angles]:
    """Tables for queries that are scaled by their positions; like: a head [1, 1, D].

    They are those of `tables` times the factors, or one of the factors, for queries that are not turned.
    """
    unturned = structure.unturned_scales
    scales_of = structure.query_scales or (None if unturned is None else unturned.factors)
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
