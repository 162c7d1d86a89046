"""Where transformers' base models have the parts of which a network is made (`network`), and those of decoders.

Those of encoders are in `encoder_structures.py`, those of decoders before Llama in `gpt_structures.py`.

A base whose structure is not here, or that has other parts than its structure says, keeps its own forward. Models
of the same structure but with other arithmetic do so too: the proof (`network/proof.py`) finds them, or
`module/structure.py` names them before anything is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.data.layer import Activation, Angles, HeadNormForm, LayerNorm, LimitedGate, Norm
from pagewire.kernels.ops import layer_norm
from pagewire.kernels.stack import normed_by
from pagewire.workers.families.routers import RouterParts, SumRouterParts, router_parts
from pagewire.workers.module.experts import limited_gate
from pagewire.workers.module.structure import (
    CHUNKED,
    DECODERS,
    DEFAULT_ACTIVATION,
    EXPERTS,
    GIVEN_NORMS,
    LATENT_KEYS,
    LATENT_QUERIES,
    LLAMA,
    OTHER_ARITHMETIC,
    SHARED,
    SHARED_GATE,
    WINDOWS,
    DecoderNames,
)
from pagewire.workers.module.transforms import norm_kernel, tolerance
from pagewire.workers.module.weights import Weights

WINDOW_EVERYWHERE = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Model types whose every layer uses config.sliding_window."""
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}
"""The activations by transformers' names."""


UNKNOWN_ROUTER = "its router chooses or weighs experts in a way that the kernels do not have"
USUAL_EPS = (1e-5, 1e-6)
"""Of norms that do not tell theirs."""


class OtherStructureError(Exception):
    """A module has other parts than its structure says, so it is no network."""


def require(condition: bool, why: str = "it has another structure") -> None:
    """Raise `OtherStructureError` unless the condition holds; why: it says so of the model."""
    if not condition:
        raise OtherStructureError(why)


def children(module: nn.Module) -> set[str]:
    """The names of a module's parts."""
    return {name for name, _ in module.named_children()}


Factors = dict[Any, float | Tensor]
"""By modules of linear layers: what their outputs [..., N] are multiplied by, a number or [N]."""


@dataclass(frozen=True)
class LayerParts:
    """The modules of a layer.

    qkv: of queries, keys and values, or one that makes all of them. norms: of each half that it has.
    up: what the feed-forward half begins with: one layer, or gate and up. gated: it makes gates, too.
    window: keys that a query sees, its own among them, in an encoder to each side; None: all.
    chunk: see `LogitTerms`.
    kind: of the layer's angles, an argument of the rotary module. index: of its KV cache.
    scale: of dot products; None: 1 / sqrt(head_dim). head_norms: of query and key heads.
    heads: the numbers of query and of key heads where one module makes all; None: as many of all three.
    own_norms: of what each half gives. turned: its queries and keys are rotated.
    softcap: of logits of attention. residual_scale, parallel, interleaved, head_norm_form: see `Layer`.
    single_angles: see `DecoderNames`.
    mixture: a module with `experts`, of a layer that has some, and router: what chooses them. Then `up` and `down`
    are those of the expert that every token gets, or there are none.
    sinks: a module with a parameter of this name, one more logit of each head.
    latents: a module that attends to latents (`network/latents.py`); `qkv` is then what makes these and queries.
    index_interleaved: see `Indexer`, if it has one.
    blocks: of the one layer that makes all: how many blocks lie one below the other, 0 for one of each key head,
    and the order of queries, keys and values in each; None: it is one block in the order "qkv".
    qkv_limit: see `Layer`. alibi: a factor of the usual slopes of a bias by distance; None: there is none.
    out_norm, down_norm: modules, of what `out` and `down` take. curve: the module of an xIELU.
    limited: the gate with limits of the feed-forward half that every token gets; None: it has none.
    turned_back: see `DecoderNames`.
    value_norm: of heads of values. source: the layer whose keys and values it reads; `qkv` is of queries alone.
    Where `qkv` is of queries and keys, values are keys. input_gate: the products and the norm of an `InputGate`.
    output_scale: a module, and the name of a buffer of it with one number.
    value_dim: numbers of a head of values; None: as many as of keys. value_scale: see `Layer`.
    of_sum: the router and the norms of a `SumTaker`: of what experts take and give, and of what `down` gives.
    mixer, feed_forward: modules in place of attention and of the feed-forward half. They run as they are, but for a
    mixer that takes what `qkv` gives, and gives what `out` takes (`network/hybrids.py`). why: the first one that
    does so is no data; empty: none does.
    gated_queries: see `Layer`. Gates are made by the second of four modules in `qkv`; of three, the first one makes
    a gate behind each query head.
    head_gates: see `Layer`; they are the last of `qkv`. softplus_gates: see there.
    gate_bias: a module, and the name of its parameter, which has one number for all gates of a head.
    beside: the parts of a mixer beside attention, which has no norms of its own.
    factors: what linear layers give is multiplied by these.
    """

    qkv: Sequence[Any]
    out: Any
    up: Sequence[Any]
    down: Any
    norms: tuple[Any, ...]
    head_dim: int
    gated: bool = False
    window: int | None = None
    chunk: int | None = None
    kind: str | None = None
    index: int = 0
    scale: float | None = None
    head_norms: tuple[Any, Any] | None = None
    mixture: Any = None
    router: RouterParts | SumRouterParts | None = None
    of_sum: tuple[Any, Any, Any, Any] | None = None
    sinks: Any = None
    latents: Any = None
    index_interleaved: bool = False
    mixer: Any = None
    feed_forward: Any = None
    why: str = ""
    gated_queries: bool = False
    head_gates: bool = False
    softplus_gates: bool = False
    gate_bias: tuple[Any, str] | None = None
    beside: LayerParts | None = None
    factors: Factors | None = None
    heads: tuple[int, int] | None = None
    own_norms: tuple[Any, Any] = (None, None)
    turned: bool = True
    softcap: float | None = None
    residual_scale: float = 1.0
    parallel: bool = False
    interleaved: bool = False
    single_angles: bool = False
    head_norm_form: HeadNormForm = HeadNormForm.EACH
    blocks: tuple[int, str] | None = None
    qkv_limit: float | None = None
    alibi: float | None = None
    out_norm: Any = None
    down_norm: Any = None
    curve: Any = None
    limited: LimitedGate | None = None
    turned_back: bool = False
    value_norm: Any = None
    value_dim: int | None = None
    value_scale: float = 1.0
    source: int | None = None
    input_gate: tuple[Any, Any, Any] | None = None
    output_scale: tuple[Any, str] | None = None

    @property
    def attends(self) -> bool:
        """True if its first half is attention of these parts."""
        return self.mixer is None and bool(self.qkv)

    @property
    def values_are_keys(self) -> bool:
        """See `Layer`."""
        return self.mixer is None and self.latents is None and len(self.qkv) == 2

    @property
    def halves(self) -> list[Any]:
        """The modules of its halves that run as they are."""
        mixer = None if self.qkv else self.mixer
        return [half for half in (mixer, self.feed_forward) if half is not None]

    def linears(self) -> dict[str, Sequence[Any]]:
        """The modules of the linear layers of a `Layer`, by the name of its field."""
        found: dict[str, Sequence[Any]] = {
            "qkv": self.qkv,
            "out": [self.out],
            "up": self.up,
            "down": [self.down],
        }
        if self.latents is not None:
            found |= {"heads": [self.latents.kv_b_proj]}
            if self.latents.q_lora_rank is not None:
                found |= {"queries": [self.latents.q_b_proj]}
            if (indexer := getattr(self.latents, "indexer", None)) is not None:
                found |= {
                    "index_keys": [indexer.wk],
                    "index_queries": [indexer.wq_b],
                    "index_weights": [indexer.weights_proj],
                }
        if self.input_gate is not None:
            gate, out, _ = self.input_gate
            found |= {"input_gate": [gate], "input_out": [out]}
        if self.beside is not None:
            found |= {"beside": self.beside.qkv, "beside_out": [self.beside.out]}
        if self.router is not None:
            found |= {"router": [self.router.linear]}
        if self.shared_gate is not None:
            found |= {"shared_gate": [self.shared_gate]}
        return found

    @property
    def shared_gate(self) -> Any:
        """The module of the gate of the expert that every token gets; None: there is none."""
        return getattr(self.mixture, SHARED_GATE, None)


Layers = Callable[[Any, Iterable[int] | None], Iterable[LayerParts]]
"""The parts of a base's layers of these numbers; None: of all."""
NormOf = Callable[[nn.Module, Weights, torch.device], Norm | LayerNorm]
"""The norm that a module computes, with its weights on a device."""


def layer_norm_of(module: Any, weights: Weights, device: torch.device) -> LayerNorm:
    """A layer norm.

    Raises:
        OtherStructureError: the module is none.
    """
    require(type(module) is nn.LayerNorm)
    weights.fill(module)
    bias = None if module.bias is None else module.bias.detach().to(device)
    return LayerNorm(module.weight.detach().to(device), bias, module.eps)


def rms_norm_of(module: nn.Module, weights: Weights, device: torch.device) -> Norm:
    """An RMS norm, as a trial of the module shows.

    Raises:
        OtherStructureError: the module is none.
    """
    weights.fill(module)
    norm = norm_kernel(module)
    if norm is None:
        raise OtherStructureError(f"{type(module).__name__} is no RMS norm that the kernels have")
    return Norm(norm.weight.to(device), norm.eps, norm.offset)


def norm_of(module: nn.Module, weights: Weights, device: torch.device) -> Norm | LayerNorm:
    """An RMS norm, or a layer norm of PyTorch or one that a trial shows to be like it (Cohere, Nemotron).

    Raises:
        OtherStructureError: the module is neither.
    """
    if "LayerNorm" not in type(module).__name__:
        return rms_norm_of(module, weights, device)
    if type(module) is nn.LayerNorm:
        return layer_norm_of(module, weights, device)
    weights.fill(module)
    weight: Any = getattr(module, "weight", None)
    bias: Any = getattr(module, "bias", None)
    eps: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    require(weight is not None and weight.dim() == 1 and isinstance(eps, float), "a norm has no weight")
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected = module(x)
    for scale in (weight, weight + 1):
        close = torch.allclose(layer_norm(x, scale, bias, eps), expected, rtol=tolerance(x.dtype), atol=1e-5)
        if expected.dtype == x.dtype and close:
            return LayerNorm(
                scale.detach().to(device), None if bias is None else bias.detach().to(device), eps
            )
    raise OtherStructureError(f"{type(module).__name__} is no layer norm that the kernels have")


def plain_norm_of(module: Any, size: int, dtype: torch.dtype, device: torch.device) -> Norm | LayerNorm:
    """A norm without weights, over `size` numbers of a dtype, as a trial of the module shows.

    Raises:
        OtherStructureError: the module is none.
    """
    ones = torch.ones(size)
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    x = (x + 1) / 64  # where eps shows, and whether the mean is taken off
    expected = module(x)
    for eps in filter(None, (getattr(module, "eps", None), *USUAL_EPS)):
        for norm in (Norm(ones, eps, 0.0), LayerNorm(ones, None, eps)):
            if torch.allclose(normed_by(norm, x), expected, rtol=tolerance(x.dtype), atol=1e-5):
                return replace(norm, weight=ones.to(device, dtype))
    raise OtherStructureError(f"{type(module).__name__} is no norm that the kernels have")


@dataclass(frozen=True)
class UnturnedScales:
    """The factors of queries in layers without rotation.

    factors: of a base and the number of positions, float32 [P]. by_place: see `Network`.
    """

    factors: Callable[[Any, int], Tensor]
    by_place: bool


@dataclass(frozen=True)
class Structure:
    """Where a base has what a network is made of.

    final_norm: behind the last layer, of a base whose layers begin with their norms; None: theirs come last.
    words: the name of the tokens' table, in a causal base itself or in the module of an encoder's embeddings.
    norm: the name of the norm of their sum; None: it is not normed. relative_bias: of a base and its weights,
    float32 [Hq, 2 R]; None: attention has none. causal: tokens attend to none behind them.
    rotary: the name of the module that makes angles, if the base has one, or of a list of them, whose kinds are the
    bases of their frequencies; None: there are none.
    embedding_scale: of a base and the dtype of its embeddings, what these are multiplied by.
    positions: of a causal base and its weights, [P, H], what is added to embeddings; None: nothing is.
    angles: of a base and its weights, cosines and sines [P, n] of neighbours, for a base without `rotary`.
    query_scales: of a base and the number of positions, float32 [P], the factors of queries; None: there are none.
    unturned_scales: those of queries in layers without rotation.
    activation_name: of a base whose configuration names none.
    layer_inputs, depth_scaled: see `DecoderNames`.
    """

    layers: Layers
    final_norm: Callable[[Any], Any] | None = None
    words: str = "word_embeddings"
    norm: str | None = "LayerNorm"
    relative_bias: Callable[[Any, Weights], Tensor] | None = None
    norm_of: NormOf = layer_norm_of
    activations: tuple[str, ...] = ("hidden_act", "activation", "hidden_activation")
    causal: bool = False
    rotary: str | None = "rotary_emb"
    embedding_scale: Callable[[Any, torch.dtype], float] = lambda base, dtype: 1.0
    positions: Callable[[Any, Weights], Tensor] | None = None
    angles: Callable[[Any, Weights], Angles] | None = None
    query_scales: Callable[[Any, int], Tensor] | None = None
    unturned_scales: UnturnedScales | None = None
    activation_name: str = DEFAULT_ACTIVATION
    layer_inputs: tuple[str, ...] = ()
    depth_scaled: bool = False

    def activation(self, config: Any) -> Activation:
        """The activation that a configuration names.

        Raises:
            OtherStructureError: the kernels have none like it, or the structure is not known with it.
        """
        names = (getattr(config, name, None) for name in self.activations)
        name = next(
            (name for name in names if name is not None), self.activation_name if self.causal else None
        )
        require(name in ACTIVATIONS, f"the kernels have no activation like {name!r}")
        return ACTIVATIONS[str(name)]


def chosen(layers: Iterable[Any], numbers: Iterable[int] | None) -> list[Any]:
    """The layers of these numbers; None: all."""
    own = list(layers)
    return own if numbers is None else [own[number] for number in numbers]


def of_decoder(names: DecoderNames) -> Layers:
    """The parts of the layers of decoders with these names."""

    def layers(base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
        for layer in chosen(base.layers, numbers):
            if type(layer) is not nn.Identity:  # see `without_picture_layers`
                yield decoder_layer(layer, names, base.config)

    return layers


def decoder_layer(layer: Any, names: DecoderNames, config: Any) -> LayerParts:
    """The parts of a decoder's layer.

    Raises:
        OtherStructureError: it has other ones.
    """
    plain = {name for name, child in layer.named_children() if type(child) is not nn.Dropout}
    has_gate = bool(names.input_gate) and set(names.input_gate) <= plain
    plain -= {*names.input_gate, "act_fn"} if has_gate else set()
    has_experts = bool(names.experts_beside) and set(names.experts_beside) <= plain
    plain -= set(names.experts_beside) if has_experts else set()
    require(
        plain - {names.shared} == {names.attention, names.mlp} | names.all_norms,
        f"a layer has {', '.join(sorted(plain))}",
    )
    attention, mlp = getattr(layer, names.attention), getattr(layer, names.mlp)
    residual_scale = float(getattr(layer, names.residual_scale)) if names.residual_scale else 1.0
    if has_latents(attention):
        interleaved = getattr(config, "rope_interleave", names.interleaved)
        parts = latent_parts(attention, named(layer, names.norms), interleaved=interleaved)
        parts = replace(parts, residual_scale=residual_scale, index_interleaved=names.index_interleaved)
        return with_feed_forward(parts, mlp, names)
    parts = attending_parts(layer, attention, names, config)
    parts = with_feed_forward(replace(parts, residual_scale=residual_scale), mlp, names)
    if has_gate:
        gate, out, norm = (getattr(layer, name) for name in names.input_gate)
        parts = replace(parts, input_gate=(gate, out, norm))
    if has_experts:
        router, _, *norms = (getattr(layer, name) for name in names.experts_beside)
        own = SumRouterParts(router, config.top_k_experts)
        return replace(parts, mixture=layer, router=own, of_sum=(router, *norms))
    shared = getattr(layer, names.shared) if names.shared else None
    return parts if shared is None else with_dense(parts, shared, names)


def attending_parts(layer: Any, attention: Any, names: DecoderNames, config: Any) -> LayerParts:
    """The parts of a decoder's layer but for its feed-forward half. attention: attends to keys and values.

    Raises:
        OtherStructureError: it has other ones.
    """
    source = source_of_keys(attention, config)
    made, head_norms = names.qkv, names.head_norms
    if source is not None:  # of a layer without keys, whose norm there is takes their place
        made, head_norms = names.qkv[:1], (names.head_norms[0],) * 2
    made = tuple(name for name in made if getattr(attention, name) is not None)
    inner = {*made, names.out, names.out_norm} - {""}
    found = {name for name, child in attention.named_children() if type(child) is not nn.Dropout}
    found -= {names.value_norm}
    require(found in (inner, inner | set(head_norms)), f"attention has {', '.join(sorted(found))}")
    has_head_norms = found > inner
    limit = getattr(config, "clip_qkv", None)
    require(limit is None or not has_head_norms, "it clips queries and keys that are normed")
    out = getattr(attention, names.out)
    heads = None
    value_dim: int = getattr(attention, names.value_dim or "head_dim")
    if len(names.qkv) == 1:
        count = config.num_attention_heads
        heads = count, getattr(config, "num_key_value_heads", count)
    else:  # no gates among the queries
        queries = getattr(attention, names.qkv[0]).out_features
        require(queries * value_dim == out.in_features * attention.head_dim)
    has_gates = len(made) == 4
    has_head_gates = (
        has_gates and getattr(attention, made[1]).out_features * attention.head_dim == out.in_features
    )
    if has_head_gates:  # one for each head, which come last
        made = (made[0], *made[2:], made[1])
    return LayerParts(
        qkv=[getattr(attention, name) for name in made],
        out=out,
        up=(),
        down=None,
        norms=named(layer, names.norms),
        head_dim=attention.head_dim,
        gated=names.gated,
        window=attention_window(attention, config),
        chunk=attention_chunk(attention, config),
        gated_queries=has_gates and not has_head_gates,
        head_gates=has_head_gates,
        softplus_gates=names.softplus_gates,
        gate_bias=(attention, names.gate_bias) if names.gate_bias else None,
        kind=str(rotation_base(attention, config)) if names.rotaries else rotation_kind(attention, config),
        index=attention.layer_idx,
        scale=float(attention.scaling),
        head_norms=named(attention, head_norms) if has_head_norms else None,
        value_dim=None if value_dim == attention.head_dim else value_dim,
        value_scale=float(getattr(attention, names.value_scale)) if names.value_scale else 1.0,
        value_norm=getattr(attention, names.value_norm) if names.value_norm and source is None else None,
        source=source,
        output_scale=(layer, names.output_scale) if names.output_scale else None,
        head_norm_form=HeadNormForm(names.head_norm_form),
        heads=heads,
        own_norms=(None, None) if names.own_norms is None else named(layer, names.own_norms),
        blocks=(0, "qkv") if names.by_head else None,
        qkv_limit=limit,
        out_norm=getattr(attention, names.out_norm) if names.out_norm else None,
        turned_back=names.turned_back,
        turned=is_turned(attention, names, config),
        sinks=attention if isinstance(getattr(attention, "sinks", None), Tensor) else None,
        softcap=getattr(attention, "attn_logit_softcapping", None),
        parallel=names.parallel,
        interleaved=names.interleaved,
        single_angles=names.single_angles,
    )


def has_latents(attention: nn.Module) -> bool:
    """True if a module attends to latents, of which its keys and values are products, and does no more."""
    parts = children(attention) - {"indexer"}
    return any(parts == {*LATENT_KEYS, *queries} for queries in LATENT_QUERIES)


def latent_parts(attention: Any, norms: tuple[Any, ...], *, interleaved: bool) -> LayerParts:
    """The parts of a layer whose attention `has_latents`, and no feed-forward half yet."""
    queries = attention.q_proj if attention.q_lora_rank is None else attention.q_a_proj
    return LayerParts(
        qkv=(queries, attention.kv_a_proj_with_mqa),
        out=attention.o_proj,
        up=(),
        down=None,
        norms=norms,
        head_dim=attention.kv_lora_rank + attention.qk_rope_head_dim,
        gated=True,
        index=attention.layer_idx,
        scale=float(attention.scaling),
        latents=attention,
        interleaved=interleaved,
    )


def with_feed_forward(parts: LayerParts, half: Any, names: DecoderNames) -> LayerParts:
    """A layer's parts with those of its feed-forward half: a dense one, or experts and maybe one for every token.

    Raises:
        OtherStructureError: it has other ones.
    """
    if getattr(half, EXPERTS, None) is None:
        return with_dense(parts, half, names)
    router = router_parts(half)
    require(router is not None, UNKNOWN_ROUTER)
    parts = replace(parts, mixture=half, router=router)
    if norms := [child for name, child in half.named_children() if name in GIVEN_NORMS]:
        parts = replace(parts, own_norms=(parts.own_norms[0], norms[0]))
    shared = [child for name, child in half.named_children() if name in SHARED]
    if not shared:
        return parts
    parts = with_dense(parts, shared[0], names)
    factor = 1.0 if router is None else router.shared_factor
    return parts if factor == 1.0 else replace(parts, factors={parts.down: factor})


def with_dense(parts: LayerParts, half: Any, names: DecoderNames) -> LayerParts:
    """A layer's parts with those of a feed-forward half that every token gets.

    Raises:
        OtherStructureError: it has other ones.
    """
    found = {name for name, child in half.named_children() if any(True for _ in child.parameters())}
    curve = getattr(half, names.curve) if names.curve in found else None
    expected = {*names.up, names.down, names.down_norm} - {""}
    require(found - {names.curve} == expected, f"its feed-forward half has {', '.join(sorted(found))}")
    require(curve is None or type(curve).__name__ == "XIELUActivation", "its activation has parameters")
    return replace(
        parts,
        up=[getattr(half, name) for name in names.up],
        down=getattr(half, names.down),
        down_norm=getattr(half, names.down_norm) if names.down_norm else None,
        curve=curve,
        limited=limited_gate(half),
    )


def source_of_keys(attention: Any, config: Any) -> int | None:
    """The layer whose keys and values a decoder's layer reads; None: its own."""
    if not getattr(attention, "is_kv_shared_layer", False):
        return None
    kinds = config.layer_types
    own = kinds[
        : len(kinds) - config.num_kv_shared_layers
    ]  # the last of each kind keeps them for all after these
    return max(i for i, kind in enumerate(own) if kind == kinds[attention.layer_idx])


def is_turned(attention: Any, names: DecoderNames, config: Any) -> bool:
    """True if a layer rotates queries and keys."""
    if names.rotaries:
        return rotation_base(attention, config) != 0
    if names.unturned == "is_sliding" and attention.sliding_window is None:  # no layer has a window
        return True
    settings = getattr(config, "rope_parameters", None) or {}
    if settings.get(layer_kind(attention, config), ...) is None:
        return False
    if getattr(attention, "force_rope", False):  # Cohere 2 MoE's first layers
        return True
    return not names.unturned or bool(getattr(attention, names.unturned))


def rotation_base(attention: Any, config: Any) -> float:
    """The base of the frequencies of a layer's angles, where each layer has its own; 0: it has none."""
    return float(config.layer_rope_theta[attention.layer_idx])


def rotation_kind(attention: Any, config: Any) -> str | None:
    """The kind of a layer's angles, where its base makes some for each type of layers; None: all have the same."""
    settings = getattr(config, "rope_parameters", None) or {}
    kind = layer_kind(attention, config)
    return kind if isinstance(settings.get(kind), dict) else None


def layer_kind(attention: Any, config: Any) -> str | None:
    """The type of a layer; None: its configuration names none."""
    kind: str | None = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None)
    if kind is None and (kinds := getattr(config, "layer_types", None)):
        kind = kinds[attention.layer_idx]
    return kind


def named(module: Any, names: tuple[str | None, str | None]) -> tuple[Any, Any]:
    """The parts of a module with these names; None for those that compute nothing."""
    first, second = (None if name is None else getattr(module, name) for name in names)
    return None if type(first) is nn.Identity else first, None if type(second) is nn.Identity else second


def attention_window(attention: Any, config: Any) -> int | None:
    """Keys that a query of a decoder's layer attends to; None for all."""
    if getattr(attention, "is_sliding", None) is False:
        return None
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or config.model_type in WINDOW_EVERYWHERE:
        return window
    kinds = getattr(config, "layer_types", None)
    require(
        kinds is not None and kinds[attention.layer_idx] == "full_attention",
        "its configuration has a window, and its attention does not say whether it uses it",
    )
    return None


def attention_chunk(attention: Any, config: Any) -> int | None:
    """The size of the chunks of keys to which a decoder's layer attends; None: it sees all."""
    kinds = getattr(config, "layer_types", None)
    is_chunked = kinds is not None and kinds[attention.layer_idx] == CHUNKED
    return getattr(config, WINDOWS[CHUNKED]) if is_chunked else None


LLAMA_LIKE = Structure(
    of_decoder(LLAMA),
    final_norm=lambda base: base.norm,
    words="embed_tokens",
    norm=None,
    norm_of=norm_of,
    activations=("hidden_act", "hidden_activation"),
    causal=True,
)


def decoder_structure(names: DecoderNames) -> Structure:
    """The structure of decoders with these names."""
    return replace(
        LLAMA_LIKE,
        layers=of_decoder(names),
        final_norm=lambda base: getattr(base, names.final_norm),
        words=names.words,
        norm=names.embedding_norm or None,
        embedding_scale=lambda base, dtype: embedding_scale(base, names, dtype),
        query_scales=query_scales if names.scales_queries else None,
        unturned_scales=UNTURNED_SCALES[names.scales_unturned] if names.scales_unturned else None,
        layer_inputs=names.layer_inputs,
        depth_scaled=names.depth_scaled,
        rotary=names.rotaries or LLAMA_LIKE.rotary,
    )


def query_scales(base: Any, num_positions: int) -> Tensor:
    """The factors of queries by position, as Ministral 3 has them: float32 [P]."""
    rope = base.config.rope_parameters
    stretches = torch.floor(torch.arange(num_positions) / rope["original_max_position_embeddings"])
    scales: Tensor = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + stretches)
    return scales


def beam_scales(base: Any, num_positions: int) -> Tensor:
    """The factors [P] of Beam's queries in layers without rotation."""
    return torch.exp(0.1 * torch.log1p((torch.arange(num_positions) + 1.0) / 2048))


def llama4_scales(base: Any, num_positions: int) -> Tensor:
    """The factors [P] of Llama 4's queries in layers without rotation."""
    config = base.config
    if not config.attn_temperature_tuning:
        return torch.ones(num_positions)
    stretches = torch.floor((torch.arange(num_positions) + 1.0) / config.floor_scale)
    scales: Tensor = torch.log1p(stretches) * config.attn_scale + 1.0
    return scales


UNTURNED_SCALES = {
    "beam": UnturnedScales(beam_scales, by_place=False),
    "llama4": UnturnedScales(llama4_scales, by_place=True),
}
"""By `DecoderNames.scales_unturned`."""


def embedding_scale(base: Any, names: DecoderNames, dtype: torch.dtype) -> float:
    """What embeddings are multiplied by. Gemma's factor is the root of their size, rounded to their dtype."""
    root: float = base.config.hidden_size**0.5
    if names.embedding_scale == "hidden_size":
        return float(torch.tensor(root, dtype=dtype))
    if names.embedding_scale == "mup_enabled":
        return root if base.config.mup_enabled else 1.0
    return float(getattr(base, names.embedding_scale)) if names.embedding_scale else 1.0


def structure_of(base: Any) -> Structure:
    """The structure of a decoder's base.

    Raises:
        OtherStructureError: none is known.
    """
    model_type = base.config.model_type
    names = DECODERS.get(model_type, LLAMA)
    parts = {name for name, child in base.named_children() if type(child) is not nn.Dropout}
    parts -= {"embed_tokens_extend", names.rotaries}  # Phi-4's, of pictures and sounds
    if parts >= set(names.layer_inputs):
        parts -= set(names.layer_inputs)
    else:
        names = replace(names, layer_inputs=())
    require(
        parts == {names.words.partition(".")[0], "layers", names.final_norm, "rotary_emb"},
        f"the base has {', '.join(sorted(parts))}",
    )
    require(model_type not in OTHER_ARITHMETIC, "its layers are Llama's, and compute something else")
    return LLAMA_LIKE if names is LLAMA else decoder_structure(names)
