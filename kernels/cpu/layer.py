"""A layer as stack.cpp takes it: its matrices, its norms and numbers, and the sizes of its attention."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cpu.experts import (
    ACTIVATION_CODES,
    CompiledExperts,
    Matrices,
    is_packed,
    matrix,
    routing_struct,
)
from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.mixers import mixer_struct
from pagewire.kernels.cpu.tensors import logit_terms, norm_struct
from pagewire.kernels.data.deltas import AdaptedLinear, plain
from pagewire.kernels.data.latents import LatentHeads
from pagewire.kernels.data.layer import (
    MIXER,
    Activation,
    DividedNorm,
    HeadNormForm,
    Indexer,
    InputGate,
    Latents,
    Layer,
    LayerNorm,
    LimitedGate,
    Mixture,
    Norm,
    SumTaker,
    Xielu,
)
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.data.weight import Linear

LayerParameters, SizesParameters, MixtureParameters, SumTakerParameters, GateParameters, XieluParameters = (
    map(structure, ("Layer", "AttentionSizes", "Mixture", "SumTaker", "InputGate", "Xielu"))
)
LatentParameters, IndexerParameters = map(structure, ("Latents", "Indexer"))
OF_LAYERS = tuple(field[0] for field in SizesParameters._fields_)
"""The fields of `AttentionCall` that differ between layers."""
HEAD_NORM_CODES = {HeadNormForm.EACH: 0, HeadNormForm.TOGETHER: 1, HeadNormForm.ROTATED: 2}
"""The forms of head norms in kernels.h."""
XIELU_CODE = 7
"""Of a layer whose activation is `Layer.xielu` in kernels.h."""


@dataclass(frozen=True)
class IndexSizes:
    """The sizes of an indexer. size: elements of a key. num_chosen: keys that a token sees."""

    num_heads: int
    size: int
    num_chosen: int

    @classmethod
    def of(cls, indexer: Indexer) -> IndexSizes:
        """Those of an indexer."""
        return cls(indexer.weights.out_features, indexer.size, indexer.num_chosen)

    @property
    def scratch(self) -> int:
        """Elements per token of `index` of `StackCall`."""
        return self.size + self.num_heads * (self.size + 1)


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of a layer's attention.

    num_kv_heads: of keys that it makes; 0: it reads those of another layer. values_are_keys: it makes no values.
    head_dim: elements of a cached key. query_dim, value_dim: of a head's query, and of its values, as products of
    the layer make and take them. rank: elements of a latent; 0: keys and values are no latents. query_rank: of what
    a product of its own makes queries of; 0: the layer's first product makes queries. index: of its indexer.
    gated: behind all queries stands a gate for each. head_gates: behind the values stands one of each head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_dim: int
    value_dim: int
    rank: int = 0
    query_rank: int = 0
    index: IndexSizes | None = None
    gated: bool = False
    head_gates: bool = False
    values_are_keys: bool = False

    @classmethod
    def of(cls, layer: Layer) -> AttentionSizes:
        """Those of a layer; without attention none but 0."""
        size, latents = layer.head_dim, layer.latents
        if latents is None:
            own = layer.num_heads, layer.num_kv_heads
            forms = {name: getattr(layer, name) for name in ("head_gates", "values_are_keys")}
            return cls(*own, size, size, size, gated=layer.gated_queries, **forms)
        heads, query_rank = heads_of(latents), 0 if latents.queries is None else latents.queries.in_features
        query_dim = heads.nope + size - latents.rank
        return cls(
            layer.num_heads,
            layer.num_kv_heads,
            size,
            query_dim,
            heads.v_head_dim,
            latents.rank,
            query_rank,
            None if latents.indexer is None else IndexSizes.of(latents.indexer),
        )

    def shapes(self, hidden: int, input_size: int) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of a layer's products, whose first one takes input_size; hidden: of a state."""
        found = {"qkv": (self.qkv, input_size), "out": (hidden, self.num_heads * self.value_dim)}
        first = self.query_rank or self.num_heads * self.query_dim
        if self.query_rank:
            found["queries"] = self.num_heads * self.query_dim, self.query_rank
        if (index := self.index) is not None:
            found["index_keys"] = index.size, input_size
            found["index_queries"] = index.num_heads * index.size, first
            found["index_weights"] = index.num_heads, input_size
        return found

    @property
    def num_chosen(self) -> int:
        """Keys that an indexer chooses for a token."""
        return 0 if self.index is None else self.index.num_chosen

    @property
    def cached_values(self) -> int:
        """Elements of a cached value."""
        return self.rank or self.head_dim

    @property
    def rotated(self) -> int:
        """Elements of a head that angles may turn."""
        return self.head_dim - self.rank

    @property
    def qkv(self) -> int:
        """What the first product of a layer makes of a token."""
        if not self.rank:
            kept = (2 - self.values_are_keys) * self.num_kv_heads
            rows = ((1 + self.gated) * self.num_heads + kept) * self.head_dim
            return rows + self.num_heads * self.head_gates
        return (self.query_rank or self.num_heads * self.query_dim) + self.head_dim

    @property
    def scratch(self) -> tuple[int, int, int, int]:
        """Elements per token of `attended`, `queries`, `absorbed` and `index` of `StackCall`."""
        heads, rank = self.num_heads, self.rank
        if not rank:
            return heads * self.head_dim, 0, 0, 0
        nope = self.query_dim - self.rotated
        return (
            heads * max(nope + rank, self.value_dim),
            heads * max(self.query_dim, rank),
            heads * max(self.head_dim, rank + self.value_dim),
            0 if self.index is None else self.index.scratch,
        )


def index_address(cache: Cache, latents: Latents | None, dtype: torch.dtype) -> int | None:
    """Where the keys of a layer's indexer lie; None if it has none.

    Raises:
        ValueError: the cache has none of their size.
    """
    if latents is None or latents.indexer is None:
        return None
    index, shape = cache.index, (cache.k.shape[0], cache.k.shape[2], latents.indexer.size)
    if index is None or index.shape != shape or index.dtype != dtype or not index.is_contiguous():
        raise ValueError(f"caches {shape} of {dtype} expected for keys of an indexer")
    return index.data_ptr()


def heads_of(latents: Latents) -> LatentHeads:
    """The matrices of heads, without what adapters change in them."""
    heads = plain(latents.heads)
    assert isinstance(heads, LatentHeads)
    return heads


class CompiledLatents:
    """What a layer has for attention to latents, as stack.cpp takes it.

    struct: valid as long as this object. dtypes: of all weights.
    """

    @classmethod
    def of(cls, library: ctypes.CDLL, latents: Latents) -> CompiledLatents | None:
        """None if not all weights are packed.

        Raises:
            ValueError: the heads differ in shape, or shapes and dtypes do not fit together.
        """
        heads = heads_of(latents)
        if isinstance(heads.keys, Tensor) or isinstance(heads.values, Tensor):
            return None
        keys, values = Matrices.of(library, heads.keys), Matrices.of(library, heads.values)
        others = (linear for name, linear in latents.linears().items() if name != "heads")
        if keys is None or values is None or not all(map(is_packed, others)):
            return None
        return cls(latents, keys, values)

    def __init__(self, latents: Latents, keys: Matrices, values: Matrices) -> None:
        if (len(values.structs), values.in_features, values.dtype) != (
            len(keys.structs),
            keys.out_features,
            keys.dtype,
        ):
            raise ValueError("matrices of as many heads for keys and for values of a latent expected")
        self._latents, self._keys, self._values = latents, keys, values
        self.struct = LatentParameters(
            norm=norm_struct(latents.norm, keys.out_features, keys.dtype),
            keys=ctypes.addressof(keys.structs),
            values=ctypes.addressof(values.structs),
        )
        self.struct.follows = latents.follows
        if (index := latents.indexer) is not None:
            self.struct.indexer = IndexerParameters(
                keys=matrix(index.keys),
                queries=matrix(index.queries),
                weights=matrix(index.weights),
                norm=norm_struct(index.norm, index.size, keys.dtype),
                num_chosen=index.num_chosen,
                interleaved=index.interleaved,
            )
        if (queries := latents.queries) is not None:
            self.struct.queries = matrix(queries)
            if latents.query_norm is not None:
                self.struct.query_norm = norm_struct(latents.query_norm, queries.in_features, keys.dtype)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of all weights."""
        latents = self._latents
        norms = [latents.norm, latents.query_norm, None if latents.indexer is None else latents.indexer.norm]
        found = {linear.dtype for linear in latents.linears().values()}
        return found | {norm.weight.dtype for norm in norms if norm is not None}


def xielu_struct(activation: Xielu) -> ctypes.Structure:
    """The parameters of a curve."""
    return XieluParameters(*dataclasses.astuple(activation))


def _numbers(layer: Layer) -> dict[str, Any]:
    """The fields of the struct of a layer that are numbers and names."""
    own = layer.activation
    assert not isinstance(own, LimitedGate), "it is not compiled, see `compiled_dtypes`"
    code, xielu = (
        (XIELU_CODE, xielu_struct(own))
        if isinstance(own, Xielu)
        else (ACTIVATION_CODES[own], XieluParameters())
    )
    return {
        "activation": code,
        "xielu": xielu,
        "scale": layer.scale,
        "residual_scale": layer.residual_scale,
        "gated": layer.gated,
        "parallel": layer.parallel,
        "interleaved": layer.interleaved,
        "head_norms": HEAD_NORM_CODES[layer.head_norm_form],
        "qkv_limit": layer.qkv_limit or 0.0,
        "gated_queries": layer.gated_queries,
        "head_gates": layer.head_gates,
        "halves": layer.attends + 2 * layer.feeds,
        "output_scale": layer.output_scale,
        "values_are_keys": layer.values_are_keys,
        "reads_others": not layer.num_kv_heads,
    }


def tables_of(layer: Layer) -> tuple[int, int]:
    """The numbers of the tables of angles that turn keys and queries; -1: none does."""
    keys = -1 if layer.angles is None else layer.angles
    return keys, keys if layer.query_angles is None else layer.query_angles


def _mixture(
    mixture: Mixture, experts: CompiledExperts, hidden_size: int, matrices: dict[str, ctypes.Structure]
) -> ctypes.Structure:
    """The experts of a layer; matrices: of the layer, of which those that are the mixture's are taken out.

    Raises:
        ValueError: they do not fit the states, or cannot be chosen from as the router says.
    """
    if experts.hidden_size != hidden_size:
        raise ValueError(f"experts of states of {experts.hidden_size} for states of {hidden_size}")
    gates = {name: matrices.pop(name) for name in ("router", "shared_gate") if name in matrices}
    count, dtype = len(mixture.experts.up), mixture.experts.up[0].dtype
    struct = MixtureParameters(**gates, experts=experts.struct, routing=routing_struct(mixture.router, count))
    if mixture.of_sum is not None:
        struct.of_sum = _sum_taker(mixture.of_sum, count, hidden_size, dtype)
    return struct


def _sum_taker(own: SumTaker, num_experts: int, hidden_size: int, dtype: torch.dtype) -> ctypes.Structure:
    """What experts have for themselves that take the sum.

    Raises:
        ValueError: its scales do not fit the experts, or the states.
    """
    for vector, size, of in (
        (own.router_scale, hidden_size, dtype),
        (own.expert_scales, num_experts, torch.float32),
    ):
        if vector.shape != (size,) or vector.dtype != of or not vector.is_contiguous():
            raise ValueError(f"scales [{size}] of {of} expected")
    names = ("router_norm", "norm", "given_norm", "dense_norm")
    return SumTakerParameters(
        **{name: norm_struct(getattr(own, name), hidden_size, dtype) for name in names},
        router_scale=own.router_scale.data_ptr(),
        expert_scales=own.expert_scales.data_ptr(),
        router_factor=own.router_factor,
    )


def _input_gate(
    gate: InputGate, hidden_size: int, dtype: torch.dtype, matrices: dict[str, ctypes.Structure]
) -> ctypes.Structure:
    """What a layer adds at its end; matrices: of the layer, of which those that are the gate's are taken out.

    Raises:
        ValueError: its products do not fit the states.
    """
    size = gate.gate.out_features
    shapes = [(linear.out_features, linear.in_features) for linear in (gate.gate, gate.out)]
    if shapes != [(size, hidden_size), (hidden_size, size)]:
        raise ValueError(f"weights {shapes} for states of {hidden_size}")
    names = {"gate": "input_gate", "out": "input_out"}
    own = {name: matrices.pop(field) for name, field in names.items()}
    return GateParameters(**own, norm=norm_struct(gate.norm, hidden_size, dtype), number=gate.number)


def _check_shapes(
    layer: Layer, linears: Mapping[str, Linear], sizes: AttentionSizes, hidden: int, input_size: int
) -> None:
    """Check the weights of a layer, given by name.

    sizes: of its attention. hidden: of a state. input_size: of what the first product takes.

    Raises:
        ValueError: one has another shape.
    """
    shapes = sizes.shapes(hidden, input_size) if "qkv" in linears else {}
    if (mixer := layer.state_mixer) is not None:
        taken, given = mixer.sizes
        names = ("qkv", "out") if layer.beside is None else ("beside", "beside_out")
        shapes |= dict(zip(names, ((taken, input_size), (hidden, given)), strict=True))
    if "up" in linears:
        inner = linears["down"].in_features
        shapes |= {"up": ((2 if layer.gated else 1) * inner, hidden), "down": (hidden, inner)}
    if layer.mixture is not None:
        shapes["router"] = len(layer.mixture.experts.up), hidden
    if "shared_gate" in linears:
        shapes["shared_gate"] = 1, hidden
    for name, shape in shapes.items():
        if (linears[name].out_features, linears[name].in_features) != shape:
            raise ValueError(f"{name}: a weight {shape} expected")


def compiled_dtypes(library: ctypes.CDLL, layer: Layer, *, norm_first: bool) -> set[torch.dtype] | None:
    """The dtypes of a layer's weights and norms; None if stack.cpp does not compute it."""
    if layer.softplus_gates or layer.value_dim is not None or layer.value_scale != 1.0:
        return None
    inner = [*(layer.head_norms or ()), layer.value_norm, layer.out_norm, layer.down_norm]
    if any(isinstance(norm, DividedNorm) for norm in inner) or isinstance(layer.value_norm, LayerNorm):
        return None
    if (gate := layer.input_gate) is not None:
        if layer.activation is Activation.CLAMPED_SWIGLU:  # it takes pairs
            return None
        inner.append(gate.norm)
    if (mixture := layer.mixture) is not None:
        if mixture.router.routing.by_logits:
            return None
        if (own := mixture.of_sum) is not None:
            if mixture.router.linear.dtype != layer.dtype or layer.up is None:
                return None
            inner += [own.router_norm, own.norm, own.given_norm, own.dense_norm]
    of_latents = {} if layer.latents is None else layer.latents.linears()
    linears = {name: linear for name, linear in layer.linears().items() if name not in of_latents}
    if not all(map(is_packed, linears.values())):
        return None
    if layer.gated if isinstance(layer.activation, Xielu) else layer.activation not in ACTIVATION_CODES:
        return None
    if (router := linears.get("router")) is not None and router.dtype is torch.float32:
        if isinstance(router, AdaptedLinear) and layer.dtype is not torch.float32:
            return None
        del linears["router"]
    if not norm_first and (layer.latents is not None or any(isinstance(norm, Norm) for norm in layer.norms)):
        return None
    dtypes = {part.dtype for part in linears.values()}
    if layer.latents is not None:
        if (latents := CompiledLatents.of(library, layer.latents)) is None:
            return None
        dtypes |= latents.dtypes
    if layer.mixture is not None:
        experts = layer.mixture.experts
        if CompiledExperts.of(library, experts) is None:
            return None
        dtypes |= {experts.up[0].dtype, experts.down[0].dtype}
    norms = (*layer.norms, *inner)
    if (mixer := layer.state_mixer) is not None:
        dtypes.add(mixer.conv.taps.dtype)
    return dtypes | {norm.weight.dtype for norm in norms if norm is not None}


def _matrices(layer: Layer, linears: Mapping[str, Linear]) -> dict[str, ctypes.Structure]:
    """The layer's linear layers as structs, by name. Its latents and its mixer have structs of their own."""
    latents = () if layer.latents is None else layer.latents.linears()
    own = {name for name in linears if name in latents or name.startswith(MIXER)}
    return {name: matrix(linear) for name, linear in linears.items() if name not in own}


def _norms(
    layer: Layer, linears: Mapping[str, Linear], hidden: int
) -> dict[str, tuple[Norm | LayerNorm, int]]:
    """The norms of a layer by the names of fields of `LayerParameters`, and the sizes of their rows."""
    sizes = dict.fromkeys(("attention_norm", "output_norm", "attended_norm", "fed_norm"), hidden)
    sizes |= {f"{name}_norm": linears[name].in_features for name in ("out", "down") if name in linears}
    norms = {name: (norm, size) for name, size in sizes.items() if (norm := getattr(layer, name)) is not None}
    counts = layer.num_heads, layer.num_kv_heads
    for name, norm, count in zip(("query_norm", "key_norm"), layer.head_norms or (), counts, strict=False):
        together = count if layer.head_norm_form is HeadNormForm.TOGETHER else 1
        if count:
            norms[name] = norm, together * layer.head_dim
    if layer.value_norm is not None:
        norms["value_norm"] = layer.value_norm, layer.head_dim
    return norms


def layer_struct(
    library: ctypes.CDLL, layer: Layer, experts: CompiledExperts | None, input_size: int
) -> tuple[ctypes.Structure, list[Any]]:
    """A layer but for its caches, and what must live as long as the struct.

    experts: of its mixture. input_size: of what its first product takes.

    Raises:
        ValueError: its parts do not fit together.
    """
    linears, hidden, dtype = layer.linears(), layer.hidden_size, layer.dtype
    _check_shapes(layer, linears, AttentionSizes.of(layer), hidden, input_size)
    latents = None if layer.latents is None else CompiledLatents.of(library, layer.latents)
    matrices = _matrices(layer, linears)
    if latents is not None:
        matrices["latents"] = latents.struct
    if layer.mixture is not None and experts is not None:
        matrices["mixture"] = _mixture(layer.mixture, experts, hidden, matrices)
    if layer.input_gate is not None:
        matrices["input_gate"] = _input_gate(layer.input_gate, hidden, dtype, matrices)
    if (mixer := layer.state_mixer) is not None:
        matrices["mixer"] = mixer_struct(mixer, dtype)
    norms = _norms(layer, linears, hidden)
    terms, owners = logit_terms(layer.terms, layer.num_heads)
    angles, query_angles = tables_of(layer)
    struct = LayerParameters(
        **matrices,
        **{name: norm_struct(norm, size, dtype) for name, (norm, size) in norms.items()},
        terms=terms,
        angles=angles,
        query_angles=query_angles,
        **_numbers(layer),
    )
    return struct, [latents, *owners]
