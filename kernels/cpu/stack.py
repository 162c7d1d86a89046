"""The stack of stack.cpp."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cpu.adapters import RunningRows
from pagewire.kernels.cpu.all_reduce import AllReduce
from pagewire.kernels.cpu.experts import (
    ACTIVATION_CODES,
    CompiledExperts,
    is_packed,
    matrix,
    routing_struct,
)
from pagewire.kernels.cpu.latents import AttentionSizes, CompiledLatents, common_sizes, index_address
from pagewire.kernels.cpu.library import AttentionCall, structure
from pagewire.kernels.cpu.mixers import CompiledStates, mixer_struct, scratch_widths
from pagewire.kernels.cpu.tensors import DTYPES, cache_fields, logit_terms, norm_struct, set_batch
from pagewire.kernels.data.deltas import AdaptedLinear
from pagewire.kernels.data.kv_codes import CODES, head_size
from pagewire.kernels.data.layer import (
    MIXER,
    Angles,
    DividedNorm,
    Half,
    HeadNormForm,
    Layer,
    LayerNorm,
    LimitedGate,
    Mixture,
    Norm,
    Xielu,
)
from pagewire.kernels.data.paging import AttentionBatch, Cache, check_scales
from pagewire.kernels.data.states import MixerStates
from pagewire.kernels.data.weight import Linear

GROUP_TOKENS = 768
"""Tokens of whole prompts that pass through all layers together, for each thread: two chunks of rows in linear.cpp.
What lies between two kernels then stays in the processor's caches."""
ALIGNMENT = 32
"""Elements: the scratch buffers begin at multiples, so at those of a cache line."""
SCRATCH = (
    *("qkv", "attended", "queries", "absorbed", "index"),
    *("up", "shared", "logits", "floats", "of_experts", "aside"),
    *("convolved", "factors", "numbers"),
)
"""The scratch buffers of `StackCall` whose widths are counted in numbers of the layers' dtype."""
HEAD_NORM_CODES = {HeadNormForm.EACH: 0, HeadNormForm.TOGETHER: 1, HeadNormForm.ROTATED: 2}
"""The forms of head norms in kernels.h."""

XIELU_CODE = 7
"""Of a layer whose activation is `Layer.xielu` in kernels.h."""

MixtureParameters, LayerParameters, AnglesParameters, StackCall, XieluParameters = map(
    structure, ("Mixture", "Layer", "Angles", "StackCall", "Xielu")
)


def xielu_struct(activation: Xielu) -> ctypes.Structure:
    return XieluParameters(*dataclasses.astuple(activation))


def _numbers(layer: Layer) -> dict[str, Any]:
    """The fields of the struct of a layer that are numbers and names."""
    own = layer.activation
    assert not isinstance(own, LimitedGate), "it is not compiled, see `_compiled_dtypes`"
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
    }


def _tables_of(layer: Layer) -> tuple[int, int]:
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
    routing = routing_struct(mixture.router, len(mixture.experts.up))
    return MixtureParameters(**gates, experts=experts.struct, routing=routing)


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


def _scratch_widths(
    layers: Sequence[Layer],
    of_layers: Sequence[CompiledExperts | None],
    sizes: AttentionSizes,
    hidden_size: int,
    *,
    norm_first: bool,
) -> tuple[int, ...]:
    """Elements per token of the buffers in `SCRATCH`.

    of_layers: the experts of each. sizes: of attention. hidden_size: of a state.
    """
    sides = [layer.beside for layer in layers if layer.beside is not None]
    first = [*(layer.qkv for layer in layers), *(side.taken for side in sides)]
    second = [*(layer.out for layer in layers), *(side.out for side in sides)]
    qkv_size = max((linear.out_features for linear in first if linear is not None), default=0)
    attended_size = max((linear.in_features for linear in second if linear is not None), default=0)
    own_attended, *of_latents = sizes.scratch
    itemsize = layers[0].dtype.itemsize
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    routers = [mixture.router.linear for mixture in mixtures]
    of_experts = (
        mixture.router.routing.num_chosen * experts.scratch_width
        for mixture, experts in zip(mixtures, filter(None, of_layers), strict=True)
    )
    is_shared = any(layer.mixture is not None and layer.up is not None for layer in layers)
    is_wide = any(router.dtype.itemsize > itemsize for router in routers)
    *of_mixers, numbers = scratch_widths(filter(None, (layer.state_mixer for layer in layers)))
    return (
        qkv_size if norm_first else max(qkv_size, hidden_size),
        max(attended_size, own_attended),
        *of_latents,
        max((layer.up.out_features for layer in layers if layer.up is not None), default=0),
        hidden_size if is_shared else 0,
        max((router.out_features * router.dtype.itemsize // itemsize for router in routers), default=0),
        hidden_size * torch.float32.itemsize // itemsize if is_wide else 0,
        max(of_experts, default=0),
        hidden_size if sides or any(layer.parallel for layer in layers) else 0,
        *of_mixers,
        numbers * torch.float32.itemsize // itemsize,
    )


def _set_scratch(
    call: ctypes.Structure,
    widths: Sequence[int],
    num_chosen: tuple[int, int],
    num_tokens: int,
    states: Tensor,
) -> tuple[Tensor, ...]:
    """Point a `StackCall` to scratch for tokens; returns what must live until it is over.

    widths: see `SCRATCH`. num_chosen: experts of a token, and keys that it sees by an indexer. states: a tensor of
    the layers' dtype.
    """
    sizes = [-(-num_tokens * width // ALIGNMENT) * ALIGNMENT for width in widths]
    scratch = states.new_empty(sum(sizes))
    place = scratch.data_ptr()
    for name, size in zip(SCRATCH, sizes, strict=True):
        setattr(call, name, place)
        place += size * scratch.itemsize
    num_experts, num_keys = num_chosen
    ids = torch.empty(num_tokens, num_experts, dtype=torch.int64)
    weights = torch.empty(num_tokens, num_experts)
    chosen = torch.empty(num_tokens, num_keys, dtype=torch.int32)
    call.ids, call.weights, call.chosen = ids.data_ptr(), weights.data_ptr(), chosen.data_ptr()
    return scratch, ids, weights, chosen


@dataclass(frozen=True)
class Stretch:
    """Halves of layers that run in one call, from the first to before the last.

    given: computes the first one itself; None: it is compiled as well.
    """

    first: int
    last: int
    given: Half | None

    @staticmethod
    def of(layers: Sequence[Layer]) -> list[Stretch]:
        """All halves of layers; without any in the first one, if that only norms what the first half takes."""
        halves = [half for layer in layers for half in layer.halves]
        starts = [number for number, half in enumerate(halves) if half is not None]
        ends = [*starts, len(halves)]
        return [Stretch(0, ends[0], None), *(Stretch(a, b, halves[a]) for a, b in pairwise(ends))]


def _compiled_dtypes(library: ctypes.CDLL, layer: Layer, *, norm_first: bool) -> set[torch.dtype] | None:
    """The dtypes of a layer's weights and norms; None if stack.cpp does not compute it."""
    if layer.ends or layer.softplus_gates or layer.value_norm is not None or layer.values_are_keys:
        return None
    if layer.value_dim is not None or layer.value_scale != 1.0:
        return None
    inner = (*(layer.head_norms or ()), layer.out_norm, layer.down_norm)
    if any(isinstance(norm, DividedNorm) for norm in inner):
        return None
    if (mixture := layer.mixture) is not None and (mixture.of_sum or mixture.router.routing.by_logits):
        return None
    if layer.attends and layer.mixer is None and not layer.num_kv_heads:
        return None
    own = {} if layer.latents is None else layer.latents.linears()
    linears = {name: linear for name, linear in layer.linears().items() if name not in own}
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
    """Those of a layer's linear layers that are not parts of what it has for latents, or of its mixer."""
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
        norms[name] = norm, together * layer.head_dim
    return norms


class CompiledStack:
    """A stack of layers in one call, or in one from each half that computes itself to the next.

    All that attend have equal shapes; see `pagewire.kernels.stack.Stack`.
    """

    @classmethod
    def of(
        cls,
        library: ctypes.CDLL,
        input_norm: Norm | LayerNorm | None,
        layers: Sequence[Layer],
        *,
        norm_first: bool,
    ) -> CompiledStack | None:
        """None if the layers differ in shape, or their linear layers are not packed weights, dense or quantised.

        Either all layers have their parts on the same ranks, or none has.
        """
        if len({id(layer.ranks) for layer in layers}) > 1:
            return None
        norms = [input_norm, *(layer.output_norm for layer in layers)]
        norms += [layer.attention_norm for layer in layers if layer.attends and layer.feeds]
        if layers[-1].output_norm is None or (len(Stretch.of(layers)) > 1 and None in norms):
            return None  # the result, and what a half that computes itself takes, are a norm's
        # What an indexer has chosen is not kept from one call to the next.
        if len(Stretch.of(layers)) > 1 and any(layer.latents and layer.latents.follows for layer in layers):
            return None
        dtypes = set() if input_norm is None else {input_norm.weight.dtype}
        for layer in layers:
            if (found := _compiled_dtypes(library, layer, norm_first=norm_first)) is None:
                return None
            dtypes |= found
        if common_sizes(layers) is None or len(dtypes) > 1:
            return None
        return cls(library, input_norm, layers, norm_first=norm_first)

    def __init__(
        self,
        library: ctypes.CDLL,
        input_norm: Norm | LayerNorm | None,
        layers: Sequence[Layer],
        *,
        norm_first: bool,
    ) -> None:
        self.library, self._layers, self._norm_first = library, layers, norm_first
        self._stretches = Stretch.of(layers)
        self._is_mixed = [layer.mixer is not None or not layer.attends for layer in layers]
        first = layers[0]
        sizes = common_sizes(layers)
        assert sizes is not None
        self._sizes = sizes
        self._hidden_size = first.hidden_size
        self._input_size = self._hidden_size if first.qkv is None else first.qkv.in_features
        self.dtype = first.dtype
        self._experts = [
            None if layer.mixture is None else CompiledExperts.of(library, layer.mixture.experts)
            for layer in layers
        ]
        self._widths = _scratch_widths(
            layers, self._experts, self._sizes, self._hidden_size, norm_first=norm_first
        )
        mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
        num_experts = max((mixture.router.routing.num_chosen for mixture in mixtures), default=0)
        self._num_chosen = num_experts, self._sizes.num_chosen
        self._tables = (AnglesParameters * (1 + max(max(_tables_of(layer)) for layer in layers)))()
        self._in_groups = any(layer.terms.future > 0 for layer in layers)  # so all prompts are whole
        self._owners: list[Any] = [input_norm]  # the structs point to their memory
        self._structs = (LayerParameters * len(layers))(*map(self._struct, layers, self._experts))
        self.states = CompiledStates([layer.state_mixer for layer in layers], self._structs)
        self._rows = RunningRows(linear for layer in layers for linear in layer.all_linears())
        self._known_caches: list[weakref.ref[Cache]] = []
        self._call = self._form(input_norm)
        self._sum = AllReduce.of(first.ranks)
        if self._sum is not None:
            self._call.all_reduce, self._call.ranks = self._sum.function, self._sum.ranks

    def _form(self, input_norm: Norm | LayerNorm | None) -> ctypes.Structure:
        """A call with all fields that do not change from step to step."""
        sizes, dtype = self._sizes, DTYPES[self.dtype]
        attention = AttentionCall(num_heads=sizes.num_heads, head_dim=sizes.head_dim, dtype=dtype)
        call = StackCall(
            layers=ctypes.addressof(self._structs),
            hidden=self._hidden_size,
            angles=ctypes.addressof(self._tables),
            attention=attention,
        )
        if input_norm is not None:
            call.input_norm = norm_struct(input_norm, self._hidden_size, self.dtype)
        return call

    def _struct(self, layer: Layer, experts: CompiledExperts | None) -> ctypes.Structure:
        linears, hidden = layer.linears(), self._hidden_size
        # The first layer may take something wider than the states.
        input_size = self._input_size if layer is self._layers[0] else hidden
        _check_shapes(layer, linears, AttentionSizes.of(layer), hidden, input_size)
        latents = None if layer.latents is None else CompiledLatents.of(self.library, layer.latents)
        matrices = _matrices(layer, linears)
        if latents is not None:
            self._owners.append(latents)
            matrices["latents"] = latents.struct
        if layer.mixture is not None and experts is not None:
            matrices["mixture"] = _mixture(layer.mixture, experts, hidden, matrices)
        if (mixer := layer.state_mixer) is not None:
            matrices["mixer"] = mixer_struct(mixer, self.dtype)
        norms = _norms(layer, linears, hidden)
        terms, owners = logit_terms(layer.terms, layer.num_heads)
        self._owners += owners
        angles, query_angles = _tables_of(layer)
        return LayerParameters(
            **matrices,
            **{name: norm_struct(norm, size, self.dtype) for name, (norm, size) in norms.items()},
            terms=terms,
            angles=angles,
            query_angles=query_angles,
            **_numbers(layer),
        )

    def __call__(
        self,
        states: Tensor,
        batch: AttentionBatch,
        caches: Sequence[Cache | None],
        angles: Sequence[Angles] = (),
        x: Tensor | None = None,
        taps: Mapping[int, Tensor] = {},
        memory: MixerStates | None = None,
    ) -> Tensor:
        """states [T, H], overwritten, to [T, H], normed; where norms come last, it is the same tensor.

        Raises:
            ValueError: x, taps, the batch, the caches, the angles, the memory or the adapters do not fit.
        """
        num_tokens, call = states.shape[0], self._call
        for each in (states, *taps.values()):
            self._check(each, num_tokens, self._hidden_size)
        self._check(states if x is None else x, num_tokens, self._input_size)
        held = self._take_angles(angles, num_tokens), self.states.take(call, memory)
        self._take_caches(caches)
        call.slots = set_batch(call.attention, batch, num_tokens)
        adapters = self._rows.take(num_tokens, self.dtype)
        call.adapters = None if adapters is None else ctypes.addressof(adapters)
        normed = torch.empty_like(states) if self._norm_first else states
        call.states, call.normed = states.data_ptr(), normed.data_ptr() if self._norm_first else None
        call.group_tokens = 0 if adapters is not None else self.group_tokens(batch.max_query_len)
        most = min(call.group_tokens or num_tokens, num_tokens)
        scratch = _set_scratch(call, self._widths, self._num_chosen, most, states)
        call.x = None if x is None else x.data_ptr()
        for number, tap in taps.items():
            self._structs[number - 1].tap = tap.data_ptr()
        try:
            self._run(normed)
        finally:
            for number in taps:
                self._structs[number - 1].tap = None
        del held, scratch
        return normed

    @property
    def is_single(self) -> bool:
        """True if all layers are one call, and this rank alone computes them."""
        return len(self._stretches) == 1 and self._sum is None

    def call_for(
        self,
        num_tokens: int,
        tables: Sequence[Angles],
        caches: Sequence[Cache | None],
        group_tokens: int = 0,
    ) -> tuple[ctypes.Structure, object, Tensor]:
        """A call for up to num_tokens tokens that has all but them.

        tables: of all positions; the call has memory for what its tokens take. group_tokens: see `StackCall`.

        Returns:
            The call, what must live as long as it, and the memory [num_tokens, H] that its results will be in.

        Raises:
            ValueError: the caches or the angles do not fit.
        """
        sizes = [(num_tokens, cos.shape[1]) for cos, _ in tables]
        angles = [
            (cos.new_empty(size), sin.new_empty(size)) for size, (cos, sin) in zip(sizes, tables, strict=True)
        ]
        held = self._take_angles(angles, num_tokens)
        self._take_caches(caches)
        call = StackCall.from_buffer_copy(self._call)
        structs = type(self._tables).from_buffer_copy(self._tables)
        call.angles, call.x, call.adapters = ctypes.addressof(structs), None, None
        call.first_half, call.last_half, call.given = 0, self._stretches[0].last, None
        states = torch.empty(num_tokens, self._hidden_size, dtype=self.dtype)
        normed = torch.empty_like(states) if self._norm_first else states
        call.states, call.normed = states.data_ptr(), normed.data_ptr() if self._norm_first else None
        call.group_tokens = group_tokens
        most = min(group_tokens or num_tokens, num_tokens)
        scratch = _set_scratch(call, self._widths, self._num_chosen, most, states)
        call.attention.whole, call.attention.num_threads = None, torch.get_num_threads()
        return call, (held, structs, states, normed, scratch), normed

    def group_tokens(self, longest: int) -> int:
        """How many tokens of whole prompts run together at most, given the longest prompt; 0: all do."""
        return max(GROUP_TOKENS * torch.get_num_threads(), longest) if self._in_groups else 0

    def _run(self, normed: Tensor) -> None:
        """Run the call that is set up, stretch by stretch. normed: [T, H], its result; and what halves take.

        Raises:
            ValueError: the batch, or what a half gives, does not fit.
        """
        call = self._call
        for stretch in self._stretches:
            given = None
            if stretch.given is not None:
                given = stretch.given(normed)
                self._check(given, len(normed), self._hidden_size)
            call.first_half, call.last_half = stretch.first, stretch.last
            call.given = None if given is None else given.data_ptr()
            failed = self.library.pagewire_stack(ctypes.byref(call))
            if self._sum is not None:
                self._sum.check()
            if failed:
                raise ValueError("lengths, slots or block numbers of the batch do not fit its tensors")

    def _check(self, x: Tensor, num_tokens: int, size: int) -> None:
        """Raises ValueError unless x is a contiguous tensor [num_tokens, size] of the layers' dtype."""
        if x.shape != (num_tokens, size) or x.dtype != self.dtype or not x.is_contiguous():
            raise ValueError(f"contiguous states [T, {size}] of {self.dtype} expected")

    def _take_angles(self, angles: Sequence[Angles], num_tokens: int) -> object:
        """Point the call to tables of cosines and sines; returns what must live until it is over."""
        if len(angles) < len(self._tables):
            raise ValueError(f"{len(angles)} tables of angles for layers that use {len(self._tables)}")
        size = angles[0][0].shape[-1] if angles else 0
        held = []
        for table, (cos, sin) in zip(self._tables, angles, strict=False):
            if (
                cos.shape != (num_tokens, size)
                or sin.shape != cos.shape
                or size > self._sizes.rotated
                or size % 2
            ):
                raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for {num_tokens} tokens")
            if not cos.dtype == sin.dtype == self.dtype:
                raise ValueError(f"angles of {self.dtype} expected")
            cos, sin = cos.contiguous(), sin.contiguous()
            table.cos, table.sin = cos.data_ptr(), sin.data_ptr()
            held += [cos, sin]
        self._call.rotary_half = size // 2
        return held

    def _take_caches(self, of_layers: Sequence[Cache | None]) -> None:
        """Point the structs to the layers' caches: they are the same from step to step."""
        if [cache is None for cache in of_layers] != self._is_mixed:
            raise ValueError(f"caches of {len(of_layers)} layers, which are not those that attend")
        caches = [cache for cache in of_layers if cache is not None]
        if not caches or (
            self._known_caches
            and all(known() is cache for known, cache in zip(self._known_caches, caches, strict=True))
        ):
            return
        self._known_caches = []
        k_first, v_first = caches[0].k, caches[0].v
        if k_first.dtype not in (self.dtype, *CODES):
            raise ValueError(f"caches of {k_first.dtype} for layers of {self.dtype}")
        for layer, struct, cache in zip(self._layers, self._structs, of_layers, strict=True):
            if cache is None:
                continue
            check_scales(cache)
            k, v = cache.k, cache.v
            if k.shape != k_first.shape or k.stride() != k_first.stride() or k.dtype != k_first.dtype:
                raise ValueError(f"the layers' caches differ: {tuple(k.shape)} of {k.dtype}")
            if v.shape != v_first.shape or v.stride() != v_first.stride() or v.dtype != k_first.dtype:
                raise ValueError(f"the layers' caches differ: {tuple(v.shape)} of {v.dtype}")
            struct.k_cache, struct.v_cache = k.data_ptr(), v.data_ptr()
            struct.index_cache = index_address(cache, layer.latents, self.dtype)
        sizes = self._sizes
        found = k_first.shape[1], head_size(k_first), head_size(v_first), caches[0].values_in_keys
        if k_first.shape[:3] != v_first.shape[:3] or found != (
            sizes.num_kv_heads,
            sizes.head_dim,
            sizes.cached_values,
            sizes.rank > 0,
        ):
            raise ValueError(
                f"caches {tuple(k_first.shape)} and {tuple(v_first.shape)} do not fit the layers"
            )
        for name, value in cache_fields(self.library, caches[0]).items():
            setattr(self._call.attention, name, value)
        self._known_caches = [weakref.ref(cache) for cache in caches]
