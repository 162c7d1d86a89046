"""A layer of a decoder or an encoder: its linear layers, its experts, its norms, its shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from pagewire.kernels.data.mixers import Beside, StateMixer
from pagewire.kernels.data.paging import LogitTerms
from pagewire.kernels.data.reduced import Sum
from pagewire.kernels.data.routing import Routing
from pagewire.kernels.data.weight import Linear


class Activation(Enum):
    """The function between the two products of a gated feed-forward."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"
    GELU_QUICK = "quick_gelu"
    """x sigmoid(1.702 x), CLIP's."""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss's: see `Kernels.activate_and_mul`."""
    RELU = "relu"
    RELU_SQUARED = "relu2"


OF_EACH = tuple(activation for activation in Activation if activation is not Activation.CLAMPED_SWIGLU)
"""Those of each element by itself, see `Kernels.activate_each`."""


@dataclass(frozen=True, slots=True)
class Xielu:
    """The activation xIELU of a layer: `positive * x * x + slope * x` for x over 0, and for others
    `(expm1(min(x, least)) - x) * negative + slope * x`."""

    positive: float
    negative: float
    slope: float
    least: float


@dataclass(frozen=True, slots=True)
class LimitedGate:
    """Of a row's first half `gate` and second half `up`: `min(silu(gate), limit) * up`, up from -limit to limit.

    With a slope, gates are cut before: `(up + 1) * gate * sigmoid(slope * gate)`. Every step is rounded."""

    limit: float
    slope: float | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, as `Kernels.rms_norm` computes it."""

    weight: Tensor
    eps: float
    offset: float

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm, as `Kernels.layer_norm` computes it."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Gathered(Protocol):
    """Vectors that are divided over ranks, put together."""

    own: range
    """The places of this rank."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., n] of this rank's places to [..., all places], with the same bits on all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class DividedNorm:
    """A norm over what is divided over ranks, of which each gets its part of the result."""

    norm: Norm
    """Of all places."""
    gather: Gathered

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, which every rank has."""
        return self.norm.num_bytes


HeadNorms = tuple[Norm, Norm]
"""The norms of queries and of keys, as `Kernels.rotate_and_store` computes them."""


class HeadNormForm(Enum):
    """What the norms of queries and keys are taken over, and when."""

    EACH = "each"
    """Over each head, before it is rotated."""
    TOGETHER = "together"
    """Over all heads of a token, before they are rotated (OLMo 2)."""
    ROTATED = "rotated"
    """Over each head, after it is rotated (Hunyuan)."""


MIXER = "mixer."
"""Before the names of a mixer's own linear layers, among those of its layer."""
Angles = tuple[Tensor, Tensor]
"""Cosines and sines [T, rot_dim] of the angles by which heads are rotated, see `Kernels.rotary`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, all of the same shape."""

    up: Sequence[Linear]
    """Of each expert: [n, H] to [n, 2 I], gate and up together; not `gated`: to [n, I]."""
    down: Sequence[Linear]
    """[n, I] to [n, H]."""
    activation: Activation | LimitedGate | None
    """None: one that the kernels do not have, see `experts.GroupedExperts`."""
    weighs_inputs: bool = False
    """Weights are of what experts take, not of what they give: states are multiplied by them before (Llama 4)."""
    gated: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(linear.num_bytes for linear in (*self.up, *self.down))


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of a token."""

    linear: Linear
    """[T, H] to logits [T, E]. In layers of another dtype it may be of float32, and is given states of float32."""
    routing: Routing
    bias: Tensor | None = None
    """float32 [E], contiguous: added to scores for the choice alone."""


@dataclass(frozen=True, slots=True)
class SumTaker:
    """What experts have for themselves that take the sum before the half, and not what its norm gives (Gemma 4).

    Beside them the layer's `up` and `down` take that. Both results are normed before they are added.
    """

    router_norm: Norm | LayerNorm
    """Of what the router takes of the sum; it is then multiplied by `router_scale` and by `router_factor`."""
    router_scale: Tensor
    """[H], of the states' dtype."""
    router_factor: float
    expert_scales: Tensor
    """float32 [E]: the weight of an expert is multiplied by its own."""
    norm: Norm | LayerNorm
    """Of what experts take of the sum."""
    given_norm: Norm | LayerNorm
    """Of what experts give."""
    dense_norm: Norm | LayerNorm
    """Of what `down` gives."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its norms and scales."""
        norms = (self.router_norm, self.norm, self.given_norm, self.dense_norm)
        return self.router_scale.nbytes + self.expert_scales.nbytes + sum(norm.num_bytes for norm in norms)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A feed-forward half of experts."""

    router: Router
    experts: Experts
    shared_gate: Linear | None
    """[T, H] to [T, 1]: its sigmoid weights an expert that every token gets, the layer's `up` and `down`. None:
    that expert, if there is one, is added as it is."""
    of_sum: SumTaker | None = None
    """None: router and experts take what the layer's `up` takes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, but for those of the shared expert."""
        parts = (self.router.linear, self.experts, self.shared_gate, self.of_sum)
        return sum(part.num_bytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the keys that a token sees by keys of its own (`pagewire.kernels.indexed`)."""

    keys: Linear
    """[T, H] to [T, size]."""
    norm: LayerNorm
    """Of keys; may be of another dtype."""
    queries: Linear
    """What the layer's queries are made of, [T, Q] to [T, heads * size]."""
    weights: Linear
    """[T, H] to [T, heads], of its own dtype: what a head's products count, times heads ** -0.5."""
    num_chosen: int
    """Keys that a token sees."""
    interleaved: bool
    """Rotation turns neighbours."""

    @property
    def size(self) -> int:
        """Elements of a key."""
        return len(self.norm.weight)


@dataclass(frozen=True, slots=True)
class Latents:
    """Attention to latents (`pagewire.kernels.latents`): what a layer has for it beside `qkv` and `out`.

    `qkv` makes queries, or what they are made of, and behind it a latent and the rotated part of a key, [T, rank +
    rope]. Both together are the one key of a token, of `head_dim` elements, and the normed latent is its value.
    """

    query_norm: Norm | None
    """Of what queries are made of."""
    queries: Linear | None
    """Makes them, [T, Hq (nope + rope)]; None: `qkv` does. The last `rope` elements of each are rotated."""
    norm: Norm
    """Of latents."""
    heads: Linear
    """Keys and values [T, Hq (nope + Dv)] of latents: `LatentHeads`, which adapters may change."""
    indexer: Indexer | None = None
    """Chooses the keys that tokens see; None: see `follows`."""
    follows: bool = False
    """Tokens see what the indexer of a layer before has chosen; else, without an indexer, all keys."""

    @property
    def rank(self) -> int:
        """Elements of a latent."""
        return len(self.norm.weight)

    def linears(self) -> dict[str, Linear]:
        """The linear layers that it has, by the names of their fields."""
        found = {"queries": self.queries, "heads": self.heads}
        if (index := self.indexer) is not None:
            found |= {
                "index_keys": index.keys,
                "index_queries": index.queries,
                "index_weights": index.weights,
            }
        return {name: linear for name, linear in found.items() if linear is not None}

    def replaced(self, linears: Mapping[str, Linear]) -> "Latents":
        """The same with other linear layers, by the names of their fields."""
        indexer = self.indexer
        if indexer is not None:
            own = {name: linears[f"index_{name}"] for name in ("keys", "queries", "weights")}
            indexer = replace(indexer, **own)  # type: ignore[arg-type]
        return replace(self, queries=linears.get("queries"), heads=linears["heads"], indexer=indexer)


@dataclass(frozen=True, slots=True)
class InputGate:
    """What a layer adds to its sum x [T, H] at its end: norm(out(activation(gate(x)) * given)).

    given: [T, P], what the layer gets of each token beside states, see `pagewire.kernels.stack.Stack`.
    """

    gate: Linear
    """[T, H] to [T, P]."""
    out: Linear
    """[T, P] to [T, H]."""
    norm: Norm | LayerNorm
    number: int
    """Which of the layers' inputs is given."""

    def linears(self) -> dict[str, Linear]:
        """Its linear layers, by names that no other one of a layer has."""
        return {"input_gate": self.gate, "input_out": self.out}


class Half(Protocol):
    """A half of a layer that computes itself: attention, a mixer or experts of a kind that is no data.

    It runs within a step, of which it takes its caches and its states.
    """

    num_bytes: int
    """Of its weights."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Normed states [T, H] to a new tensor [T, H], the same on all ranks, which is added to the states."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a stack: attention and a feed-forward half, or one of them.

    `attention_norm` and `output_norm` are of a sum, as `pagewire.kernels.stack.Stack` says: what the next product
    takes. Without one it takes the sum itself. The other norms and the scale are of what a half gives, before that
    is added.
    """

    qkv: Linear | None
    """[T, H] to [T, (Hq + 2 Hkv) D], to what a mixer of states takes, or see `gated_queries`, `values_are_keys`,
    `value_dim`, `num_kv_heads` and `Latents`; None where a `mixer` computes itself."""
    out: Linear | None
    """[T, Hq Dv], or what a mixer or attention to latents gives, to [T, H]; None likewise."""
    attention_norm: Norm | LayerNorm | None
    """Of the sum after attention, where a feed-forward half follows. In a parallel layer: of the layer's input, for
    its feed-forward half; None: both halves take the same."""
    up: Linear | None
    """[T, H] to [T, 2 I], gate and up together; not `gated`: to [T, I]. None where all of the feed-forward half is
    experts that a router chooses, or `feed_forward`."""
    down: Linear | None
    """[T, I] to [T, H]; None likewise."""
    output_norm: Norm | LayerNorm | None
    """Of the layer's last sum."""
    activation: Activation | Xielu | LimitedGate
    num_heads: int
    num_kv_heads: int
    """Of those that it makes: 0 in a layer that makes queries alone, and reads another one's keys and values."""
    head_dim: int
    scale: float
    """Of the dot products of queries and keys."""
    terms: LogitTerms
    gated: bool = True
    angles: int | None = 0
    """Which of the call's tables of angles turns queries and keys; None: none does."""
    query_angles: int | None = None
    """Which one turns queries, if it is another one; a table may scale what it turns."""
    interleaved: bool = False
    """Rotation turns neighbours in a head; else elements of its two halves."""
    qkv_limit: float | None = None
    """Queries, keys and values are cut to numbers from -qkv_limit to qkv_limit; None: they are not."""
    head_norms: HeadNorms | tuple[LayerNorm, LayerNorm] | tuple[DividedNorm, DividedNorm] | None = None
    head_norm_form: HeadNormForm = HeadNormForm.EACH
    value_norm: Norm | LayerNorm | None = None
    """Of each head of values."""
    values_are_keys: bool = False
    """Values are what `qkv` gives for keys, before these are normed and turned: [T, (Hq + Hkv) D]."""
    value_dim: int | None = None
    """Numbers of a head of values Dv, where keys have others: `qkv` gives [T, (Hq + Hkv) D + Hkv Dv]."""
    value_scale: float = 1.0
    """Values are multiplied by it."""
    out_norm: Norm | DividedNorm | None = None
    """Of what `out` takes."""
    down_norm: Norm | DividedNorm | None = None
    """Of what `down` takes."""
    attended_norm: Norm | LayerNorm | None = None
    """Of what attention gives."""
    fed_norm: Norm | LayerNorm | None = None
    """Of what the feed-forward half gives."""
    residual_scale: float = 1.0
    """What each half gives is multiplied by it."""
    parallel: bool = False
    """The feed-forward half takes the layer's input, not the sum after attention."""
    input_gate: InputGate | None = None
    output_scale: float = 1.0
    """The layer's sum is multiplied by it, at its end."""
    latents: Latents | None = None
    """What keys and values are made of; None: `qkv` makes them."""
    mixture: Mixture | None = None
    ranks: Sum | None = None
    """Adds up what `out` and the feed-forward half give, where every rank has a part of their inputs; None: all."""
    mixer: StateMixer | Half | None = None
    """In place of attention."""
    beside: Beside | None = None
    """Beside attention, which is then no mixer."""
    gated_queries: bool = False
    """Behind all query heads in what `qkv` gives stands a gate as long for each: its sigmoid opens what attention
    gives."""
    head_gates: bool = False
    """Behind the values in what `qkv` gives stands one gate for each query head: its sigmoid opens what the head's
    attention gives (LFM3)."""
    softplus_gates: bool = False
    """What attention gives is multiplied by the softplus of either, and not by the sigmoid (Laguna)."""
    feed_forward: Half | None = None
    """In place of the feed-forward half."""

    @property
    def norms(self) -> list[Norm | LayerNorm]:
        """The norms of states [T, H]."""
        found = (self.attention_norm, self.output_norm, self.attended_norm, self.fed_norm)
        return [norm for norm in found if norm is not None]

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's state."""
        return len(self.norms[0].weight)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of states."""
        return self.norms[0].weight.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, and of the norms."""
        own = [] if self.latents is None else [*self.latents.linears().values()]
        if (gate := self.input_gate) is not None:
            own += gate.linears().values()
        parts = (
            *(self.qkv, self.out, self.mixer, self.beside),
            *(self.up, self.down, self.mixture, self.feed_forward),
        )
        norms = [*self.norms, *(self.head_norms or ()), self.value_norm, self.out_norm, self.down_norm]
        norms += [] if gate is None else [gate.norm]
        return sum(part.num_bytes for part in (*parts, *own, *norms) if part is not None)

    @property
    def feeds_whole(self) -> bool:
        """True if its feed-forward half gives what is that of all ranks."""
        return self.feed_forward is not None or (self.mixture is not None and self.mixture.of_sum is not None)

    @property
    def ends(self) -> bool:
        """True if something is done to the sum behind the feed-forward half."""
        return self.input_gate is not None or self.output_scale != 1.0

    @property
    def halves(self) -> tuple[Half | None, Half | None]:
        """What computes each of the two halves itself; None where the layer has its parts."""
        return None if isinstance(self.mixer, StateMixer) else self.mixer, self.feed_forward

    @property
    def state_mixer(self) -> StateMixer | None:
        """The mixer of states that it has, in place of attention or beside it."""
        if self.beside is not None:
            return self.beside.mixer
        return self.mixer if isinstance(self.mixer, StateMixer) else None

    @property
    def attends(self) -> bool:
        """True if it has attention, or a mixer in its place."""
        return self.qkv is not None or self.mixer is not None

    @property
    def feeds(self) -> bool:
        """True if it has a feed-forward half."""
        return self.down is not None or self.mixture is not None or self.feed_forward is not None

    def linears(self) -> dict[str, Linear]:
        """The linear layers that it has, but for experts, by the names of their fields."""
        found = {"qkv": self.qkv, "out": self.out, "up": self.up, "down": self.down}
        if self.latents is not None:
            found |= self.latents.linears()
        if self.input_gate is not None:
            found |= self.input_gate.linears()
        if self.mixture is not None:
            found |= {"router": self.mixture.router.linear, "shared_gate": self.mixture.shared_gate}
        if self.beside is not None:
            found |= self.beside.linears
        if (mixer := self.state_mixer) is not None:
            found |= {f"{MIXER}{name}": linear for name, linear in mixer.linears.items()}
        return {name: linear for name, linear in found.items() if linear is not None}

    def all_linears(self) -> list[Linear]:
        """The linear layers that it has, with those of its experts."""
        experts = () if self.mixture is None else (*self.mixture.experts.up, *self.mixture.experts.down)
        return [*self.linears().values(), *experts]

    def replaced(self, change: Callable[[str, Linear], Linear]) -> "Layer":
        """The layer with other linear layers.

        change: makes one, of the name of its field and the one that is there; of experts first all "experts.up",
        and then all "experts.down".
        """
        linears = {name: change(name, linear) for name, linear in self.linears().items()}
        if (latents := self.latents) is not None:
            latents = latents.replaced({name: linears.pop(name) for name in latents.linears()})
        if (gate := self.input_gate) is not None:
            gate = replace(gate, gate=linears.pop("input_gate"), out=linears.pop("input_out"))
        if (mixture := self.mixture) is not None:
            experts = replace(
                mixture.experts,
                up=[change("experts.up", linear) for linear in mixture.experts.up],
                down=[change("experts.down", linear) for linear in mixture.experts.down],
            )
            router = replace(mixture.router, linear=linears.pop("router"))
            gate_of_shared = linears.pop("shared_gate", None)
            mixture = replace(mixture, router=router, experts=experts, shared_gate=gate_of_shared)
        fields: dict[str, Any] = {"latents": latents, "mixture": mixture, "input_gate": gate}
        if (mixer := self.state_mixer) is not None:
            mixer = mixer.with_linears({name: linears.pop(f"{MIXER}{name}") for name in mixer.linears})
            if self.beside is None:
                fields["mixer"] = mixer
            else:
                fields["beside"] = Beside(linears.pop("beside"), mixer, linears.pop("beside_out"))
        fields |= linears
        return replace(self, **fields)
