"""Networks of hybrids: layers whose mixers keep states beside layers that attend, each with a feed-forward half.

A half whose parts the kernels know is data, as in any other network (`workers/families`), and so are mixers of the
classes in `FORMS`. The other ones are modules of transformers that compute themselves (`ModuleHalf`), within a step
with our recurrences and our attention. Norms, sums and gated products between them then run compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.data.layer import MIXER, HeadNormForm
from pagewire.kernels.data.mixers import (
    Convolution,
    GatedDelta,
    OutputGate,
    SelectiveScan,
    ShortConv,
    StateMixer,
    StateSpace,
)
from pagewire.kernels.linear import Linear
from pagewire.workers.families.structures import (
    Factors,
    LayerParts,
    OtherStructureError,
    Structure,
    attention_window,
    children,
    chosen,
    decoder_structure,
    has_latents,
    latent_parts,
    named,
    require,
    rotation_kind,
    with_dense,
    with_feed_forward,
)
from pagewire.workers.module.invariant import Invariant
from pagewire.workers.module.recurrences import MIXERS, NORM_EPS
from pagewire.workers.module.structure import LLAMA, OLMO_2, STACKED_HYBRIDS, DecoderNames
from pagewire.workers.module.transforms import pack_joined
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.parts import module_bytes, transform_parts
from pagewire.workers.step.context import current_step
from pagewire.workers.versions import norm_group

HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
HEAD_GATES = "g_proj"
OUTPUTS = ("o_proj", "out_proj")
ROTARIES = ("rotary_emb", "pos_emb")


@dataclass(frozen=True)
class HybridNames:
    """How a family names the parts of its layers.

    mixers: what may stand in the place of attention. names: all others; of layers of one half, all are `attention`.
    attending: those of layers that attend, if they are others. words: the tokens' table.
    beside: a mixer that all layers have beside attention. factors: of a layer, see `LayerParts`.
    """

    mixers: tuple[str, ...] = ("linear_attn",)
    names: DecoderNames = LLAMA
    attending: DecoderNames | None = None
    words: str = "embed_tokens"
    beside: str = ""
    factors: Callable[[Any], Factors] | None = None

    def layers(self, base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
        """The parts of a base's layers of these numbers; None: of all."""
        for layer in chosen(base.layers, numbers):
            yield (
                self._one_half(layer, base.config) if self.names.mlp == "" else self._both(layer, base.config)
            )

    def _both(self, layer: Any, config: Any) -> LayerParts:
        """The parts of a layer that has two halves."""
        names, found = self.names, children(layer)
        (mixer,) = found & {names.attention, *self.mixers}
        if self.attending is not None and mixer == names.attention:
            names = self.attending
        fed = found - {mixer, self.beside} - names.all_norms
        require(len(fed) > 0 and fed <= {names.mlp, names.shared} and found >= names.all_norms)
        parts = _mixer(getattr(layer, mixer), config, named(layer, names.norms), names.head_norm_form)
        if names.own_norms is not None:
            parts = replace(parts, own_norms=named(layer, names.own_norms))
        if self.beside:
            parts = replace(parts, beside=_mixer(getattr(layer, self.beside), config, ()))
        if self.factors is not None:
            parts = replace(parts, factors=self.factors(layer))
        if names.residual_scale:
            parts = replace(parts, residual_scale=float(getattr(layer, names.residual_scale)))
        try:
            whole = with_feed_forward(parts, getattr(layer, names.mlp), names) if names.mlp in fed else parts
            return with_dense(whole, getattr(layer, names.shared), names) if names.shared in fed else whole
        except OtherStructureError as error:
            require(fed == {names.mlp})
            own = getattr(layer, names.mlp)
            return replace(parts, feed_forward=own, why=parts.why or str(error))  # it runs as it is

    def _one_half(self, layer: Any, config: Any) -> LayerParts:
        """The parts of a layer that has one half: attention, a mixer, or a feed-forward half."""
        half, (norm, _) = getattr(layer, self.names.attention), self.names.norms
        require(children(layer) == {self.names.attention, norm})
        norms = (getattr(layer, str(norm)),)
        if form_of(half) is not None or hasattr(half, "q_proj"):
            return _mixer(half, config, norms)
        none = LayerParts((), None, (), None, norms, head_dim=0, gated=self.names.gated)
        try:
            return with_feed_forward(none, half, self.names)
        except OtherStructureError as error:
            return replace(none, feed_forward=half, why=str(error))

    def structure(self, base: Any) -> Structure:
        """The structure of a base with these names."""
        rotary, names = children(base) & set(ROTARIES), self.names
        require(children(base) - rotary == {self.words, "layers", names.final_norm})
        is_wide = getattr(base.config, "residual_in_fp32", False) and base.dtype is not torch.float32
        require(not is_wide, "its sums are float32 beside layers of another dtype")
        return replace(
            decoder_structure(names),
            layers=self.layers,
            words=self.words,
            rotary=next(iter(rotary), None),
            activations=("mlp_hidden_act", "hidden_act"),
        )


OF_LFM2 = HybridNames(
    ("conv",),
    DecoderNames(
        mlp="feed_forward",
        up=("w1", "w3"),
        down="w2",
        norms=("operator_norm", "ffn_norm"),
        final_norm="embedding_norm",
    ),
)
OF_LFM3 = replace(OF_LFM2, names=replace(OF_LFM2.names, own_norms=("post_operator_norm", "post_ffn_norm")))
OF_OLMO = HybridNames(attending=OLMO_2)
OF_MAMBA = HybridNames(
    ("mamba",),
    DecoderNames(
        mlp="feed_forward", norms=("input_layernorm", "pre_ff_layernorm"), final_norm="final_layernorm"
    ),
)
OF_GRANITE = HybridNames(
    ("mamba",),
    DecoderNames(
        mlp="block_sparse_moe",
        shared="shared_mlp",
        up=("input_linear",),
        down="output_linear",
        residual_scale="residual_multiplier",
        embedding_scale="embedding_multiplier",
    ),
)


def _falcon_factors(layer: Any) -> Factors:
    """What Falcon-H1 multiplies what its linear layers take, or what they give, by."""
    attention, mixer, fed = layer.self_attn, layer.mamba, layer.feed_forward
    taken, given = layer.attention_in_multiplier, mixer.ssm_in_multiplier
    # What a layer takes is multiplied, but not the bias that it adds.
    require(
        taken == 1.0 or attention.q_proj.bias is None, "its attention multiplies what layers with biases take"
    )
    require(given == 1.0 or mixer.in_proj.bias is None, "its mixers multiply what a layer with a bias takes")
    return {
        attention.q_proj: taken,
        attention.k_proj: taken * attention.key_multiplier,
        attention.v_proj: taken,
        attention.o_proj: layer.attn_out_multiplier,
        mixer.in_proj: given * mixer.mup_vector.flatten().float(),
        mixer.out_proj: layer.ssm_out_multiplier,
        fed.gate_proj: fed.gate_multiplier,
        fed.down_proj: fed.down_multiplier,
    }


OF_FALCON = HybridNames(
    (),
    replace(OF_MAMBA.names, embedding_scale="embedding_multiplier"),
    beside="mamba",
    factors=_falcon_factors,
)
ALONE = DecoderNames(
    attention="mixer", mlp="", up=("up_proj",), gated=False, norms=("norm", None), final_norm="norm_f"
)
OTHERS = {
    **dict.fromkeys(("bamba", "jamba"), OF_MAMBA),
    **dict.fromkeys(("lfm2", "lfm2_moe"), OF_LFM2),
    "falcon_h1": OF_FALCON,
    "granitemoehybrid": OF_GRANITE,
    "lfm3": OF_LFM3,
    "olmo_hybrid": OF_OLMO,
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "nemotron_h"), HybridNames(names=ALONE, words="embeddings")
    ),
}
HYBRIDS: dict[str, HybridNames] = {name: OTHERS.get(name, HybridNames()) for name in STACKED_HYBRIDS}
"""By model type."""


def _mixer(module: Any, config: Any, norms: tuple[Any, ...], head_norm_form: str = "each") -> LayerParts:
    """The parts of a layer with this mixer, and no feed-forward half yet."""
    if has_latents(module):
        return latent_parts(module, norms, interleaved=True)
    form = form_of(module)
    if form is not None:
        return LayerParts(
            qkv=[getattr(module, name) for name in form.inputs],
            out=getattr(module, form.out),
            up=(),
            down=None,
            norms=norms,
            head_dim=0,
            gated=True,
            mixer=module,
        )
    found = children(module)
    output = next((name for name in OUTPUTS if name in found), "")
    head_norms = next((names for names in HEAD_NORMS if found >= set(names)), ())
    gates = found & {HEAD_GATES}
    is_plain = (
        found == {"q_proj", "k_proj", "v_proj", output, *head_norms, *gates}
        and not list(module.named_parameters(recurse=False))
        and hasattr(module, "scaling")
    )
    if not is_plain:
        own = LayerParts((), None, (), None, norms, head_dim=0, gated=True, mixer=module)
        return replace(own, why=why_as_it_is(module))
    queries, attended = module.q_proj.out_features, getattr(module, output).in_features
    require(queries in (attended, 2 * attended))
    made = [module.q_proj, module.k_proj, module.v_proj, *(getattr(module, name) for name in gates)]
    require(not gates or made[-1].out_features * module.head_dim == queries == attended)
    return LayerParts(
        qkv=made,
        out=getattr(module, output),
        up=(),
        down=None,
        norms=norms,
        head_dim=module.head_dim,
        gated=True,
        window=attention_window(module, config),
        kind=rotation_kind(module, config),
        index=module.layer_idx,
        scale=float(module.scaling),
        head_norms=tuple(getattr(module, name) for name in head_norms) or None,
        head_norm_form=HeadNormForm(head_norm_form),
        gated_queries=queries == 2 * attended,
        head_gates=bool(gates),
    )


class ModuleHalf:
    """A module of transformers that is a half of a layer; its products are ours.

    rotary: makes the angles that it takes beside states; None: it takes none.
    """

    def __init__(self, module: Any, rotary: Any) -> None:
        self.module, self._rotary = module, rotary
        self._mixer = MIXERS.get(type(module).__name__)
        names = inspect.signature(type(module).forward).parameters
        self._takes_angles = rotary is not None and "position_embeddings" in names
        self._rest = {"attention_mask": None} if "attention_mask" in names else {}
        self.num_bytes = module_bytes([module])

    @classmethod
    def of(cls, module: nn.Module, rotary: Any, weights: Weights, device: torch.device) -> ModuleHalf:
        """With its products packed on a device."""
        transform_parts(module, weights, device)
        return cls(module, rotary)

    def __call__(self, x: Tensor) -> Tensor:
        """Normed states [T, H] to [T, H]."""
        if self._mixer is not None:
            return self._mixer(self.module, x)
        with Invariant():
            states, rest = x[None], self._rest
            if self._takes_angles:
                rest = rest | {"position_embeddings": self._rotary(states, current_step().positions[None])}
            out = self.module(states, **rest)
            return (out[0] if isinstance(out, tuple) else out)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MixerWeights:
    """The weights of mixers, or this rank's part of them, on a device. dtype: of the states that they take."""

    weights: Weights
    device: torch.device
    dtype: torch.dtype

    def linear(self, modules: Sequence[Any], order: Tensor | None = None) -> Linear:
        """One linear layer in place of several with the same input. order: of its outputs."""
        require(all(type(module) is nn.Linear for module in modules))
        return pack_joined(modules, self.weights, self.device, order)

    def own_linears(self, module: Any) -> dict[str, Any]:
        """The linear layers of a mixer itself, by the names of its fields."""
        form = FORMS[type(module).__name__]
        orders = {name: order(module) for name, order in form.own_orders.items()}
        return {name: self.linear(own, orders.get(name)) for name, own in form.linears(module).items()}

    def vector(self, module: Any, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A parameter of a module as contiguous numbers."""
        own = getattr(module, name)
        own = self.weights.part(module, name) if own.device.type == "meta" else own.detach()
        return own.to(self.device, dtype).contiguous()  # type: ignore[union-attr]

    def decay(self, module: Any) -> Tensor:
        """What a step of 1 leaves of a state, as logarithms: float32, of the form of `A_log`."""
        return -torch.exp(self.vector(module, "A_log"))

    def normed_gate(self, norm: Any, group: int) -> OutputGate:
        """A gate behind the norm of a module, of groups of so many numbers."""
        return OutputGate(group, self.vector(norm, "weight", self.dtype), norm.variance_epsilon)

    def convolution(self, module: Any, activation: str | None) -> Convolution:
        """A convolution of single channels, and SiLU if that is the activation."""
        require(activation in (None, "silu", "swish"), f"its convolution has the activation {activation!r}")
        bias = None if module.bias is None else self.vector(module, "bias", self.dtype)
        taps = self.vector(module, "weight", self.dtype).squeeze(1).T.contiguous()
        return Convolution(taps, bias, activation is not None)


@dataclass(frozen=True)
class MixerForm:
    """Where a class of mixers has its parts.

    inputs: the names of the linear layers whose outputs, one behind the other, the mixer takes. make: of the rest.
    order: of these outputs; None: as they are. out: the name of the last linear layer.
    own: by the field of a linear layer of the mixer itself, the names of its parts. own_orders: of their outputs.
    """

    inputs: tuple[str, ...]
    make: Callable[[Any, MixerWeights], StateMixer]
    order: Callable[[Any], Tensor] | None = None
    out: str = "out_proj"
    own: Mapping[str, Sequence[str]] = field(default_factory=dict)
    own_orders: Mapping[str, Callable[[Any], Tensor]] = field(default_factory=dict)

    def linears(self, module: Any) -> dict[str, Sequence[Any]]:
        """The modules of the mixer's own linear layers."""
        return {name: [module.get_submodule(part) for part in parts] for name, parts in self.own.items()}


def _short_conv(module: Any, weights: MixerWeights) -> ShortConv:
    return ShortConv(weights.convolution(module.conv, None))


def _factors_by_head(module: Any) -> Tensor:
    """The order of what makes the factors of all values, and then of all steps, of what is by heads of keys."""
    per_key = module.num_v_heads // module.num_k_heads
    return _apart(module.num_k_heads, [per_key, per_key])


def _gated_delta_of_olmo(module: Any, weights: MixerWeights) -> GatedDelta:
    return replace(_delta(module, weights), rate=2.0 if module.allow_neg_eigval else 1.0)


def _delta(module: Any, weights: MixerWeights) -> GatedDelta:
    return GatedDelta(
        **weights.own_linears(module),
        conv=weights.convolution(module.conv1d, module.activation),
        bias=weights.vector(module, "dt_bias"),
        decay=weights.decay(module),
        gate=weights.normed_gate(getattr(module, "norm", None) or module.o_norm, module.head_v_dim),
        key_heads=module.num_k_heads,
        key_dim=module.head_k_dim,
        value_heads=module.num_v_heads,
        value_dim=module.head_v_dim,
        norm_eps=NORM_EPS,
    )


def _delta_by_row(module: Any, weights: MixerWeights) -> GatedDelta:
    """A gated delta rule with a step for each row of a state."""
    forget, size = module.forget_gate, module.head_dim
    return GatedDelta(
        **weights.own_linears(module),
        conv=weights.convolution(module.conv1d, module.activation),
        bias=weights.vector(forget, "dt_bias"),
        decay=weights.decay(forget).flatten().repeat_interleave(size),
        gate=replace(weights.normed_gate(module.o_norm, size), sigmoid=True),
        key_heads=module.num_heads,
        key_dim=size,
        value_heads=module.num_heads,
        value_dim=size,
        norm_eps=NORM_EPS,
    )


def _qkvz_order(module: Any) -> Tensor:
    """Queries, keys, values and gates of all heads, of what lies together for each head of keys."""
    values = module.num_v_heads // module.num_k_heads * module.head_v_dim
    return _apart(module.num_k_heads, [module.head_k_dim, module.head_k_dim, values, values])


def _apart(num_groups: int, sizes: Sequence[int]) -> Tensor:
    """The order, int64, that puts the parts of these sizes of all groups one behind the other."""
    places = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    return torch.cat([part.flatten() for part in torch.split(places, list(sizes), 1)])


def _mamba2(module: Any, weights: MixerWeights) -> StateSpace:
    least, most = module.time_step_limit
    return StateSpace(
        conv=weights.convolution(module.conv1d, module.activation),
        bias=weights.vector(module, "dt_bias"),
        decay=weights.decay(module),
        skip=weights.vector(module, "D"),
        limits=(float(least), float(most)),
        gate=_gate_of_mamba2(module, weights),
        num_heads=module.num_heads,
        head_dim=module.head_dim,
        num_groups=module.n_groups,
        state_dim=module.ssm_state_size,
    )


def _gate_of_mamba2(module: Any, weights: MixerWeights) -> OutputGate:
    """The gate of Mamba 2, whose norm Falcon-H1 may lack, or take before it is opened."""
    norm, size = module.norm, module.intermediate_size
    if type(norm) is nn.Identity:
        return OutputGate(size)
    group = size // norm.n_groups if hasattr(norm, "n_groups") else norm_group(norm, size)
    return replace(weights.normed_gate(norm, group), first=not getattr(norm, "norm_before_gate", False))


def _factor_norms(module: Any, weights: MixerWeights) -> tuple[tuple[Tensor, Tensor, Tensor], float] | None:
    """The weights, and the number under the root, of norms of Mamba 1's factors; Falcon Mamba's have no weights."""
    norms: list[Any] = [getattr(module, f"{name}_layernorm", None) for name in ("dt", "b", "c")]
    if None in norms:
        return None
    sizes = module.time_step_rank, module.ssm_state_size, module.ssm_state_size
    first, second, third = (
        weights.vector(norm, "weight", weights.dtype)
        if list(norm.parameters())
        else torch.ones(size, dtype=weights.dtype, device=weights.device)
        for norm, size in zip(norms, sizes, strict=True)
    )
    eps = getattr(norms[0], "variance_epsilon", None) or norms[0].eps
    return (first, second, third), eps


def _mamba(module: Any, weights: MixerWeights) -> SelectiveScan:
    normed, eps = _factor_norms(module, weights) or (None, 0.0)
    return SelectiveScan(
        **weights.own_linears(module),
        conv=weights.convolution(module.conv1d, module.activation),
        decay=weights.decay(module).T.contiguous(),
        skip=weights.vector(module, "D"),
        gate=OutputGate(module.intermediate_size),
        norms=normed,
        eps=eps,
    )


MAMBA_2 = MixerForm(("in_proj",), _mamba2)
FORMS: dict[str, MixerForm] = {
    **dict.fromkeys(
        ("Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv"), MixerForm(("in_proj",), _short_conv)
    ),
    **dict.fromkeys(
        ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        MixerForm(("in_proj_qkv", "in_proj_z"), _delta, own={"factors": ("in_proj_b", "in_proj_a")}),
    ),
    "Qwen3NextGatedDeltaNet": MixerForm(
        ("in_proj_qkvz",),
        _delta,
        _qkvz_order,
        own={"factors": ("in_proj_ba",)},
        own_orders={"factors": _factors_by_head},
    ),
    "OlmoHybridGatedDeltaNet": MixerForm(
        ("q_proj", "k_proj", "v_proj", "g_proj"),
        _gated_delta_of_olmo,
        out="o_proj",
        own={"factors": ("b_proj", "a_proj")},
    ),
    "KimiLinearDeltaAttention": MixerForm(
        ("q_proj", "k_proj", "v_proj"),
        _delta_by_row,
        out="o_proj",
        own={
            "factors": ("b_proj", "forget_gate.f_a_proj", "g_a_proj"),
            "steps": ("forget_gate.f_b_proj",),
            "gates": ("g_b_proj",),
        },
    ),
    "BailingHybridDeltaAttention": MixerForm(
        ("q_proj", "k_proj", "v_proj", "g_proj"),
        _delta_by_row,
        out="o_proj",
        own={"factors": ("b_proj", "forget_gate.f_proj")},
    ),
    **dict.fromkeys(("BambaMixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer"), MAMBA_2),
    "FalconH1Mixer": MAMBA_2,
    "NemotronHMamba2Mixer": MAMBA_2,
    "Zamba2MambaMixer": MAMBA_2,
    **dict.fromkeys(
        ("FalconMambaMixer", "JambaMambaMixer", "MambaMixer"),
        MixerForm(("in_proj",), _mamba, own={"factors": ("x_proj",), "steps": ("dt_proj",)}),
    ),
}
"""By the class of a module."""


def form_of(module: nn.Module) -> MixerForm | None:
    """The form of a mixer; None: it computes itself.

    So does one whose norm is over what several ranks have, and one whose forget gates have a lower bound.
    """
    forget: Any = getattr(module, "forget_gate", None)
    if hasattr(module, "gather") or getattr(forget, "safe_gate", False):
        return None
    return FORMS.get(type(module).__name__)


def why_as_it_is(module: Any) -> str:
    """Why a mixer without a form runs as it is."""
    name = type(module).__name__
    if name not in FORMS:
        return f"a {name} is no mixer that the kernels have"
    reason = "norms what several ranks have" if hasattr(module, "gather") else "bounds its forget gates"
    return f"a {name} {reason}"


def order_of(part: LayerParts) -> Tensor | None:
    """The order, int64, of what a mixer's first linear layers make; None: they stay as they are."""
    form = form_of(part.mixer)
    return None if form is None or form.order is None else form.order(part.mixer)


def mixer_linears(part: LayerParts) -> dict[str, Sequence[Any]]:
    """The modules of the linear layers of a layer's mixer itself, by the names of their fields in the layer."""
    mixer = part.mixer if part.beside is None else part.beside.mixer
    form = None if mixer is None else form_of(mixer)
    return {} if form is None else {f"{MIXER}{name}": own for name, own in form.linears(mixer).items()}


def mixer_orders(part: LayerParts) -> dict[str, Tensor | None]:
    """The orders of the outputs of linear layers of a layer's mixers, by the names of their fields in the layer."""
    mixer = part.mixer if part.beside is None else part.beside.mixer
    form = None if mixer is None else form_of(mixer)
    if form is None:
        return {}
    beside = {} if part.beside is None else {"beside": order_of(part.beside)}
    return {f"{MIXER}{name}": order(mixer) for name, order in form.own_orders.items()} | beside


def built_beside(
    part: LayerParts, weights: Weights, device: torch.device, dtype: torch.dtype
) -> StateMixer | None:
    """The mixer beside a layer's attention; None: there is none. dtype: of states."""
    if part.beside is None:
        return None
    if (form := form_of(part.beside.mixer)) is None:
        raise OtherStructureError("a mixer beside attention computes itself")
    return form.make(part.beside.mixer, MixerWeights(weights, device, dtype))


def built_halves(
    part: LayerParts, rotary: Any, weights: Weights, device: torch.device, dtype: torch.dtype
) -> tuple[StateMixer | ModuleHalf | None, ModuleHalf | None]:
    """A layer's mixer and feed-forward half, where they are data of their own or compute themselves.

    rotary: see `ModuleHalf`. dtype: of states.
    """
    form = None if part.mixer is None else form_of(part.mixer)
    mixer, feed_forward = (
        None if module is None else ModuleHalf.of(module, rotary, weights, device)
        for module in (part.mixer if form is None else None, part.feed_forward)
    )
    if form is None:
        return mixer, feed_forward
    return form.make(part.mixer, MixerWeights(weights, device, dtype)), feed_forward
