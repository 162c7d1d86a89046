"""What mixers of states compute, kernel by kernel; `cpu/mixers.cpp` is the same compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.data.mixers import GatedDelta, SelectiveScan, ShortConv, StateMixer, StateSpace
from pagewire.kernels.data.states import StateBatch
from pagewire.kernels.ops import (
    causal_conv,
    gated_delta_rule,
    open_by,
    rates,
    rms_norm,
    selective_scan,
    state_space,
    step_sizes,
)


def mixed(mixer: StateMixer, x: Tensor, given: Tensor, states: Sequence[Tensor], batch: StateBatch) -> Tensor:
    """What a mixer gives, [T, M].

    x: normed states [T, H]. given: what the layer's first product makes of them, [T, N]. states: float32
    [S, *shape] for each of the mixer's, which are changed.
    """
    return KINDS[type(mixer)](mixer, x, given, states, batch)


def _convolved(mixer: StateMixer, x: Tensor, states: Sequence[Tensor], batch: StateBatch) -> Tensor:
    conv = mixer.conv
    return causal_conv(x, conv.taps, conv.bias, states[0], batch, silu=conv.silu)


def _short_conv(
    mixer: ShortConv, x: Tensor, given: Tensor, states: Sequence[Tensor], batch: StateBatch
) -> Tensor:
    before, after, values = given.chunk(3, -1)
    return after * _convolved(mixer, before * values, states, batch)


def _gated_delta(
    mixer: GatedDelta, x: Tensor, given: Tensor, states: Sequence[Tensor], batch: StateBatch
) -> Tensor:
    sizes = [mixer.key_heads * mixer.key_dim] * 2 + [mixer.value_heads * mixer.value_dim]
    joined, gates = given.tensor_split([mixer.conv.channels], -1)
    new, steps, of_gates = torch.split(mixer.factors(x), mixer.factor_sizes, -1)
    steps = step_sizes(steps if mixer.steps is None else mixer.steps(steps), mixer.bias, mixer.decay)
    query, key, value = torch.split(_convolved(mixer, joined, states, batch), sizes, -1)
    values = gated_delta_rule(
        torch.unflatten(query, -1, (-1, mixer.key_dim)),
        torch.unflatten(key, -1, (-1, mixer.key_dim)),
        torch.unflatten(value, -1, (-1, mixer.value_dim)),
        steps if len(mixer.bias) == mixer.value_heads else torch.unflatten(steps, -1, (-1, mixer.key_dim)),
        rates(new, mixer.rate),
        states[1],
        batch,
        scale=mixer.key_dim**-0.5,
        norm_eps=mixer.norm_eps,
    )
    return open_by(values.flatten(1), gates if mixer.gates is None else mixer.gates(of_gates), mixer.gate)


def _state_space(
    mixer: StateSpace, x: Tensor, given: Tensor, states: Sequence[Tensor], batch: StateBatch
) -> Tensor:
    size, of_groups = mixer.num_heads * mixer.head_dim, mixer.num_groups * mixer.state_dim
    gates, joined, steps = torch.split(given, [size, mixer.conv.channels, mixer.num_heads], -1)
    values, b, c = torch.split(_convolved(mixer, joined, states, batch), [size, of_groups, of_groups], -1)
    found = state_space(
        torch.unflatten(values, -1, (-1, mixer.head_dim)),
        step_sizes(steps, mixer.bias, None, *mixer.limits),
        mixer.decay,
        torch.unflatten(b, -1, (-1, mixer.state_dim)),
        torch.unflatten(c, -1, (-1, mixer.state_dim)),
        mixer.skip,
        states[1],
        batch,
    )
    return open_by(found.flatten(1), gates, mixer.gate)


def _selective_scan(
    mixer: SelectiveScan, x: Tensor, given: Tensor, states: Sequence[Tensor], batch: StateBatch
) -> Tensor:
    values, gates = given.chunk(2, -1)
    values = _convolved(mixer, values, states, batch)
    factors = torch.split(mixer.factors(values), [mixer.steps.in_features, *[mixer.state_dim] * 2], -1)
    if mixer.norms is not None:
        factors = tuple(
            rms_norm(part, weight, mixer.eps) for part, weight in zip(factors, mixer.norms, strict=True)
        )
    steps, b, c = factors
    steps = step_sizes(mixer.steps(steps), None, None)
    found = selective_scan(values, steps, mixer.decay, b, c, mixer.skip, states[1], batch)
    return open_by(found, gates, mixer.gate)


KINDS: dict[type[StateMixer], Callable[[Any, Tensor, Tensor, Sequence[Tensor], StateBatch], Tensor]] = {
    ShortConv: _short_conv,
    GatedDelta: _gated_delta,
    StateSpace: _state_space,
    SelectiveScan: _selective_scan,
}
