"""The stack of stack.cpp."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cpu.adapters import RunningRows
from pagewire.kernels.cpu.all_reduce import AllReduce
from pagewire.kernels.cpu.experts import CompiledExperts
from pagewire.kernels.cpu.layer import (
    OF_LAYERS,
    AttentionSizes,
    LayerParameters,
    SizesParameters,
    compiled_dtypes,
    index_address,
    layer_struct,
    tables_of,
)
from pagewire.kernels.cpu.library import AttentionCall, structure
from pagewire.kernels.cpu.mixers import CompiledStates, scratch_widths
from pagewire.kernels.cpu.tensors import DTYPES, cache_fields, norm_struct, set_batch
from pagewire.kernels.data.kv_codes import CODES, head_size
from pagewire.kernels.data.layer import Angles, Half, Layer, LayerNorm, Norm
from pagewire.kernels.data.paging import AttentionBatch, Cache, check_scales
from pagewire.kernels.data.states import MixerStates

AnglesParameters, StackCall = map(structure, ("Angles", "StackCall"))
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


def _scratch_widths(
    layers: Sequence[Layer],
    of_layers: Sequence[CompiledExperts | None],
    sizes: Sequence[AttentionSizes],
    hidden_size: int,
    *,
    norm_first: bool,
) -> tuple[int, ...]:
    """Elements per token of the buffers in `SCRATCH`.

    of_layers: the experts of each. sizes: of the attention of each. hidden_size: of a state.
    """
    sides = [layer.beside for layer in layers if layer.beside is not None]
    first = [*(layer.qkv for layer in layers), *(side.taken for side in sides)]
    second = [*(layer.out for layer in layers), *(side.out for side in sides)]
    qkv_size = max((linear.out_features for linear in first if linear is not None), default=0)
    attended_size = max((linear.in_features for linear in second if linear is not None), default=0)
    own_attended, *of_latents = map(max, zip(*(size.scratch for size in sizes), strict=True))
    itemsize = layers[0].dtype.itemsize
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    routers = [mixture.router.linear for mixture in mixtures]
    of_experts = (
        mixture.router.routing.num_chosen * experts.scratch_width
        for mixture, experts in zip(mixtures, filter(None, of_layers), strict=True)
    )
    is_shared = any(layer.mixture is not None and layer.up is not None for layer in layers)
    is_wide = any(router.dtype.itemsize > itemsize for router in routers)
    is_aside = any(
        layer.parallel or layer.beside or (layer.mixture and layer.mixture.of_sum) for layer in layers
    )
    ups = [layer.up for layer in layers]
    ups += [None if layer.input_gate is None else layer.input_gate.gate for layer in layers]
    *of_mixers, numbers = scratch_widths(filter(None, (layer.state_mixer for layer in layers)))
    return (
        qkv_size if norm_first else max(qkv_size, hidden_size),
        max(attended_size, own_attended),
        *of_latents,
        max((up.out_features for up in ups if up is not None), default=0),
        hidden_size if is_shared else 0,
        max((router.out_features * router.dtype.itemsize // itemsize for router in routers), default=0),
        hidden_size * torch.float32.itemsize // itemsize if is_wide else 0,
        max(of_experts, default=0),
        hidden_size if is_aside else 0,
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


class CompiledStack:
    """A stack of layers in one call, or in one from each half that computes itself to the next.

    See `pagewire.kernels.stack.Stack`.
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
        """None if stack.cpp lacks something of a layer, or linear layers are not packed weights.

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
            if (found := compiled_dtypes(library, layer, norm_first=norm_first)) is None:
                return None
            dtypes |= found
        return None if len(dtypes) > 1 else cls(library, input_norm, layers, norm_first=norm_first)

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
        self._sizes = [AttentionSizes.of(layer) for layer in layers]
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
        self._num_chosen = num_experts, max(sizes.num_chosen for sizes in self._sizes)
        self._tables = (AnglesParameters * (1 + max(max(tables_of(layer)) for layer in layers)))()
        attending = [layer for layer in layers if layer.attends and layer.mixer is None]
        self._rotated = [
            min(
                (AttentionSizes.of(layer).rotated for layer in attending if table in tables_of(layer)),
                default=None,
            )
            for table in range(len(self._tables))
        ]
        """Elements of a head that each table may turn; None: no layer uses it."""
        gates = [layer.input_gate for layer in layers if layer.input_gate is not None]
        self.input_sizes = {(gate.number, gate.gate.out_features) for gate in gates}
        """The numbers of the inputs that layers get beside states, and how many numbers each has."""
        self._in_groups = any(layer.terms.future > 0 for layer in layers)  # so all prompts are whole
        self._owners: list[Any] = [input_norm]  # the structs point to their memory
        self._structs = (LayerParameters * len(layers))()
        for number, (layer, experts) in enumerate(zip(layers, self._experts, strict=True)):
            # The first layer may take something wider than the states.
            size = self._hidden_size if number else self._input_size
            self._structs[number], owners = layer_struct(library, layer, experts, size)
            self._owners += owners
        self.states = CompiledStates([layer.state_mixer for layer in layers], self._structs)
        self._rows = RunningRows(linear for layer in layers for linear in layer.all_linears())
        self._known_caches: list[weakref.ref[Cache]] = []
        self._call = self._form(input_norm)
        self._sum = AllReduce.of(first.ranks)
        if self._sum is not None:
            self._call.all_reduce, self._call.ranks = self._sum.function, self._sum.ranks

    def _form(self, input_norm: Norm | LayerNorm | None) -> ctypes.Structure:
        """A call with all fields that do not change from step to step."""
        call = StackCall(
            layers=ctypes.addressof(self._structs),
            hidden=self._hidden_size,
            angles=ctypes.addressof(self._tables),
            attention=AttentionCall(dtype=DTYPES[self.dtype]),
        )
        if input_norm is not None:
            call.input_norm = norm_struct(input_norm, self._hidden_size, self.dtype)
        return call

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
        """states [T, H], overwritten, to [T, H], normed; where norms come last, it is the same tensor.

        Raises:
            ValueError: x, taps, batch, caches, angles, memory, inputs or adapters do not fit.
        """
        num_tokens, call = states.shape[0], self._call
        for each in (states, *taps.values()):
            self._check(each, num_tokens, self._hidden_size)
        self._check(states if x is None else x, num_tokens, self._input_size)
        held = self._take_angles(angles, num_tokens), self.states.take(call, memory)
        self._take_inputs(inputs, num_tokens)
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
        inputs: Tensor | None = None,
    ) -> tuple[ctypes.Structure, object, Tensor]:
        """A call for up to num_tokens tokens that has all but them.

        tables: of all positions; the call has memory for what its tokens take. group_tokens: see `StackCall`.
        inputs: memory for what layers get of tokens beside states, [tokens, L, P].

        Returns:
            The call, what must live as long as it, and the memory [num_tokens, H] that its results will be in.

        Raises:
            ValueError: the caches, the angles or the inputs do not fit.
        """
        sizes = [(num_tokens, cos.shape[1]) for cos, _ in tables]
        angles = [
            (cos.new_empty(size), sin.new_empty(size)) for size, (cos, sin) in zip(sizes, tables, strict=True)
        ]
        held = self._take_angles(angles, num_tokens)
        self._take_inputs(inputs, num_tokens)
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

    def _take_inputs(self, inputs: Tensor | None, num_tokens: int) -> None:
        """Point the call to what layers get of each token beside states, [T, L, P]."""
        call = self._call
        if inputs is None:
            if self.input_sizes:
                raise ValueError("layers with an input gate get inputs")
            return
        rows, count, width = inputs.shape
        if (
            rows != num_tokens
            or inputs.dtype != self.dtype
            or not inputs.is_contiguous()
            or any(number >= count or size != width for number, size in self.input_sizes)
        ):
            raise ValueError(f"inputs {tuple(inputs.shape)} of {inputs.dtype} for {num_tokens} tokens")
        call.inputs, call.input_stride = inputs.data_ptr(), count * width

    def _take_angles(self, angles: Sequence[Angles], num_tokens: int) -> object:
        """Point the call to tables of cosines and sines; returns what must live until it is over."""
        if len(angles) < len(self._tables):
            raise ValueError(f"{len(angles)} tables of angles for layers that use {len(self._tables)}")
        held = []
        for table, most, (cos, sin) in zip(self._tables, self._rotated, angles, strict=False):
            size = cos.shape[-1]
            too_wide = most is not None and size > most
            if cos.shape != (num_tokens, size) or sin.shape != cos.shape or too_wide or size % 2:
                raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for {num_tokens} tokens")
            if not cos.dtype == sin.dtype == self.dtype:
                raise ValueError(f"angles of {self.dtype} expected")
            cos, sin = cos.contiguous(), sin.contiguous()
            table.cos, table.sin, table.half = cos.data_ptr(), sin.data_ptr(), size // 2
            held += [cos, sin]
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
        first = cache_fields(self.library, caches[0])
        common = {name: value for name, value in first.items() if name not in OF_LAYERS}
        if caches[0].k.dtype not in (self.dtype, *CODES):
            raise ValueError(f"caches of {caches[0].k.dtype} for layers of {self.dtype}")
        for layer, sizes, struct, cache in zip(
            self._layers, self._sizes, self._structs, of_layers, strict=True
        ):
            if cache is None:
                continue
            check_scales(cache)
            k, v, fields = cache.k, cache.v, cache_fields(self.library, cache)
            heads = sizes.num_kv_heads or k.shape[1]
            found = k.shape[1], head_size(k), head_size(v), cache.values_in_keys
            if k.shape[:3] != v.shape[:3] or found != (
                heads,
                sizes.head_dim,
                sizes.cached_values,
                sizes.rank > 0,
            ):
                raise ValueError(f"caches {tuple(k.shape)} and {tuple(v.shape)} do not fit the layer")
            struct.k_cache, struct.v_cache = fields.pop("k_cache"), fields.pop("v_cache")
            own = {name: fields.pop(name) for name in OF_LAYERS if name in fields}
            if fields.items() - common.items():
                raise ValueError(f"the layers' caches differ: {tuple(k.shape)} of {k.dtype}")
            struct.sizes = SizesParameters(num_heads=sizes.num_heads, head_dim=sizes.head_dim, **own)
            struct.index_cache = index_address(cache, layer.latents, self.dtype)
        for name, value in common.items():
            setattr(self._call.attention, name, value)
        self._known_caches = [weakref.ref(cache) for cache in caches]
