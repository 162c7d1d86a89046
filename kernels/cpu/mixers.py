"""Mixers of states as mixers.cpp takes them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cpu.experts import matrix
from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.states import (
    CausalConvCall,
    DeltaRuleCall,
    SelectiveScanCall,
    States,
    StateSpaceCall,
    gate_struct,
)
from pagewire.kernels.data.mixers import (
    GatedDelta,
    SelectiveScan,
    ShortConv,
    StateMixer,
    StateSpace,
)
from pagewire.kernels.data.states import MixerStates, check_spans, check_state

MixerStruct = structure("Mixer")
KIND_CODES: dict[type[StateMixer], int] = {ShortConv: 1, GatedDelta: 2, StateSpace: 3, SelectiveScan: 4}
"""The kinds of mixers in kernels.h."""
SECOND_STATES: dict[type[StateMixer], str] = {GatedDelta: "delta", StateSpace: "space", SelectiveScan: "scan"}
"""The field of a mixer's struct with the states beside those of its convolution."""


def mixer_struct(mixer: StateMixer, dtype: torch.dtype) -> ctypes.Structure:
    """A mixer between products of this dtype, which must live as long as the struct.

    Raises:
        ValueError: a part has another shape or dtype than the rest.
    """
    conv = mixer.conv
    vectors = [(conv.taps, conv.taps.shape, dtype), (conv.bias, (conv.channels,), dtype)]
    found: dict[str, Any] = {
        "kind": KIND_CODES[type(mixer)],
        "least": 0.0,
        "most": float("inf"),
        "conv": CausalConvCall(
            weight=conv.taps.data_ptr(),
            bias=_address(conv.bias),
            channels=conv.channels,
            taps=len(conv.taps),
            silu=conv.silu,
        ),
        **{name: matrix(linear) for name, linear in mixer.linears.items()},
    }
    if not isinstance(mixer, ShortConv):
        found["gate"] = gate_struct(mixer.gate, mixer.sizes[1], dtype)  # type: ignore[attr-defined]
    if isinstance(mixer, GatedDelta):
        size, values = len(mixer.bias), mixer.sizes[1]
        vectors += [(mixer.bias, (size,), torch.float32), (mixer.decay, (size,), torch.float32)]
        _check_sizes(
            size in (mixer.value_heads, mixer.value_heads * mixer.key_dim)
            and mixer.factors.out_features == sum(mixer.factor_sizes)
            and conv.channels == 2 * mixer.key_heads * mixer.key_dim + values
            and (mixer.steps is None or mixer.steps.out_features == size == values)
            and (mixer.gates is None or mixer.gates.out_features == values)
        )
        found |= {"bias": mixer.bias.data_ptr(), "decay": mixer.decay.data_ptr(), "delta": _delta(mixer)}
        found["rate"] = mixer.rate
    elif isinstance(mixer, StateSpace):
        heads = (mixer.num_heads,)
        vectors += [(x, heads, torch.float32) for x in (mixer.bias, mixer.decay, mixer.skip)]
        _check_sizes(
            conv.channels == mixer.num_heads * mixer.head_dim + 2 * mixer.num_groups * mixer.state_dim
        )
        found |= {"bias": mixer.bias.data_ptr(), "space": _space(mixer)}
        found["least"], found["most"] = mixer.limits
    elif isinstance(mixer, SelectiveScan):
        channels, rank = conv.channels, mixer.steps.in_features
        vectors += [(mixer.decay, mixer.decay.shape, torch.float32), (mixer.skip, (channels,), torch.float32)]
        wanted = (channels, rank + 2 * mixer.state_dim), (rank, channels)
        _check_sizes(
            wanted == tuple((own.in_features, own.out_features) for own in (mixer.factors, mixer.steps))
            and mixer.decay.shape[1] == channels
        )
        for name, weight, size in zip(
            ("step_norm", "write_norm", "read_norm"),
            mixer.norms or (),
            (rank, mixer.state_dim, mixer.state_dim),
            strict=False,
        ):
            vectors.append((weight, (size,), dtype))
            found[name] = weight.data_ptr()
        found |= {"eps": mixer.eps, "scan": _scan(mixer)}
    for tensor, shape, own in vectors:
        if tensor is not None and not (
            tensor.shape == shape and tensor.dtype == own and tensor.is_contiguous()
        ):
            raise ValueError(f"{own} {list(shape)} expected, not {tensor.dtype} {tuple(tensor.shape)}")
    return MixerStruct(**found)


def _check_sizes(fit: bool) -> None:
    if not fit:
        raise ValueError("the parts of a mixer of states do not fit each other")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _delta(mixer: GatedDelta) -> ctypes.Structure:
    return DeltaRuleCall(
        key_heads=mixer.key_heads,
        key_dim=mixer.key_dim,
        value_heads=mixer.value_heads,
        value_dim=mixer.value_dim,
        decays=len(mixer.bias) // mixer.value_heads,
        scale=mixer.key_dim**-0.5,
        norm_eps=mixer.norm_eps,
        normed=True,
    )


def _space(mixer: StateSpace) -> ctypes.Structure:
    return StateSpaceCall(
        a=mixer.decay.data_ptr(),
        d=mixer.skip.data_ptr(),
        heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        groups=mixer.num_groups,
        state_dim=mixer.state_dim,
    )


def _scan(mixer: SelectiveScan) -> ctypes.Structure:
    return SelectiveScanCall(
        a=mixer.decay.data_ptr(),
        d=mixer.skip.data_ptr(),
        channels=mixer.conv.channels,
        state_dim=mixer.state_dim,
    )


def scratch_widths(mixers: Iterable[StateMixer]) -> tuple[int, int, int]:
    """Elements of a token in the scratch of `MixerCall`: `convolved` and `factors`, and float32 `numbers`."""
    convolved = factored = numbers = 0
    for mixer in mixers:
        convolved = max(convolved, mixer.conv.channels)
        if "factors" in mixer.linears:
            factored = max(factored, mixer.linears["factors"].out_features)
        if isinstance(mixer, GatedDelta):
            numbers = max(numbers, len(mixer.bias) + mixer.value_heads)
        elif isinstance(mixer, StateSpace):
            numbers = max(numbers, mixer.num_heads)
        elif isinstance(mixer, SelectiveScan):
            numbers = max(numbers, mixer.conv.channels)
    return convolved, factored, numbers


class CompiledStates:
    """Points the structs of a stack's mixers to their states, and a call to the spans of a step."""

    def __init__(self, mixers: Sequence[object], structs: ctypes.Array[Any]) -> None:
        """mixers: of all layers; those of states count. structs: `Layer` of kernels.h."""
        self._of = [(number, mixer) for number, mixer in enumerate(mixers) if isinstance(mixer, StateMixer)]
        self._structs = structs
        self._known: list[weakref.ref[Tensor]] = []

    def take(self, call: ctypes.Structure, states: MixerStates | None) -> object:
        """Point them to a step's states; returns what must live until it is over.

        Raises:
            ValueError: there are none, or they do not fit.
        """
        if not self._of:
            return None
        if states is None:
            raise ValueError("the layers keep states, and get none")
        self.point_to(states.of_layers)
        check_spans(states.batch)
        starts, spans = states.batch.row_starts.contiguous(), states.batch.spans.contiguous()
        call.row_starts, call.num_rows = starts.data_ptr(), starts.shape[0] - 1
        call.spans, call.num_spans = spans.data_ptr(), spans.shape[0]
        return starts, spans

    def point_to(self, of_layers: Sequence[Sequence[Tensor]]) -> None:
        """Point the structs to the memory of states, see `MixerStates`: it is the same from step to step.

        Raises:
            ValueError: it does not fit.
        """
        given = [own for number, _ in self._of for own in of_layers[number]]
        if len(given) == len(self._known) and all(
            known() is own for known, own in zip(self._known, given, strict=True)
        ):
            return
        self._known = []
        for number, mixer in self._of:
            memory, struct = of_layers[number], self._structs[number].mixer
            for own, shape in zip(memory, mixer.states, strict=True):
                check_state(own, shape)
            fields = ("conv", SECOND_STATES.get(type(mixer), ""))
            for name, own in zip(fields, memory, strict=False):
                getattr(struct, name).states = States(
                    state=own.data_ptr(), num_slots=len(own), slot_stride=own.stride(0)
                )
        self._known = [weakref.ref(own) for own in given]
