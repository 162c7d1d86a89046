"""Layers with mixers of states, and gates of attention: one call, and kernel by kernel, to the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.integers import Integers, quantise
from pagewire.kernels.data.layer import Layer
from pagewire.kernels.data.mixers import (
    Beside,
    Convolution,
    GatedDelta,
    OutputGate,
    SelectiveScan,
    ShortConv,
    StateMixer,
    StateSpace,
)
from pagewire.kernels.data.states import MixerStates, StateBatch
from pagewire.kernels.linear import Linear, dense_weight, pack
from pagewire.kernels.reference.kernels import reference
from pagewire.kernels.stack import Stack
from tests.kernels.state_layers import state_batch
from tests.kernels.test_decoder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    make_caches,
    make_stack,
    make_step,
    with_adapters,
)

NUM_STATES = 5
SPANS = [[(0, 7, -1, 2), (7, 20, 2, 3)], [(20, 21, 1, 1)]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def linear(num_out: int, num_in: int, dtype: torch.dtype, scheme: Integers | None = None) -> Linear:
    weight = dense_weight((random(num_out, num_in) / num_in**0.5).to(dtype))
    return pack(weight if scheme is None else quantise(weight, scheme))


def convolution(channels: int, dtype: torch.dtype, bias: bool, silu: bool = True) -> Convolution:
    return Convolution(random(3, channels).to(dtype), random(channels).to(dtype) if bias else None, silu)


def short_conv(dtype: torch.dtype) -> StateMixer:
    return ShortConv(convolution(40, dtype, bias=True, silu=False))


def gated_delta(dtype: torch.dtype) -> StateMixer:
    return GatedDelta(
        conv=convolution(2 * 2 * 8 + 4 * 20, dtype, bias=False),
        factors=linear(8, HIDDEN, dtype, Integers(8, 16, 0)),
        bias=random(4),
        decay=-torch.rand(4),
        gate=OutputGate(20, (1 + random(20) / 8).to(dtype), 1e-5),
        key_heads=2,
        key_dim=8,
        value_heads=4,
        value_dim=20,
        norm_eps=1e-6,
    )


def delta_by_row(dtype: torch.dtype) -> StateMixer:
    """Kimi's: a step for each row of a state, and fewer numbers of which steps and gates are made."""
    return GatedDelta(
        conv=convolution(3 * 4 * 16, dtype, bias=False),
        factors=linear(4 + 2 * 10, HIDDEN, dtype),
        bias=random(64),
        decay=-torch.rand(64),
        gate=OutputGate(16, (1 + random(16) / 8).to(dtype), 1e-5, sigmoid=True),
        key_heads=4,
        key_dim=16,
        value_heads=4,
        value_dim=16,
        norm_eps=1e-6,
        rate=2.0,
        steps=linear(64, 10, dtype),
        gates=linear(64, 10, dtype),
    )


def state_space(dtype: torch.dtype) -> StateMixer:
    return StateSpace(
        conv=convolution(4 * 18 + 2 * 2 * 8, dtype, bias=True),
        bias=random(4),
        decay=-torch.rand(4),
        skip=random(4),
        limits=(0.1, 1.5),
        gate=OutputGate(36, (1 + random(72) / 8).to(dtype), 1e-5, first=True),
        num_heads=4,
        head_dim=18,
        num_groups=2,
        state_dim=8,
    )


def selective_scan(dtype: torch.dtype, normed: bool = False) -> StateMixer:
    first, second, third = ((1 + random(size) / 8).to(dtype) for size in (12, 6, 6))
    return SelectiveScan(
        conv=convolution(72, dtype, bias=True),
        factors=linear(12 + 2 * 6, 72, dtype),
        steps=linear(72, 12, dtype),
        decay=-4 * torch.rand(6, 72),
        skip=random(72),
        gate=OutputGate(72),
        norms=(first, second, third) if normed else None,
        eps=1e-5,
    )


MIXERS: dict[str, Callable[[torch.dtype], StateMixer]] = {
    "short convolution": short_conv,
    "gated delta rule": gated_delta,
    "delta rule by row": delta_by_row,
    "state space": state_space,
    "selective scan": selective_scan,
    "selective scan with norms": lambda dtype: selective_scan(dtype, normed=True),
}


def stack_of(mixer: StateMixer, dtype: torch.dtype) -> Stack:
    """A layer with a mixer, and one whose queries have gates."""
    plain = make_stack(dtype, head_norms=True)
    num_in, num_out = mixer.sizes
    first = dataclasses.replace(
        plain.layers[0],
        qkv=linear(num_in, HIDDEN, dtype),
        out=linear(HIDDEN, num_out, dtype),
        mixer=mixer,
        head_norms=None,
        angles=None,
    )
    return Stack(plain.input_norm, [first, gated(plain.layers[1], dtype)])


def gated(layer: Layer, dtype: torch.dtype) -> Layer:
    width = (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM
    return dataclasses.replace(layer, qkv=linear(width, HIDDEN, dtype), gated_queries=True)


def beside_of(mixer: StateMixer, dtype: torch.dtype) -> Stack:
    """A layer with a mixer beside its attention, and one without; in both each head has one gate."""
    plain = make_stack(dtype, head_norms=True)
    num_in, num_out = mixer.sizes
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS
    first, second = (
        dataclasses.replace(layer, qkv=linear(width, HIDDEN, dtype), head_gates=True)
        for layer in plain.layers
    )
    beside = Beside(linear(num_in, HIDDEN, dtype), mixer, linear(HIDDEN, num_out, dtype))
    return Stack(plain.input_norm, [dataclasses.replace(first, beside=beside), second])


PLACES = {"in place": stack_of, "beside": beside_of}


def states_of(stack: Stack, batch: StateBatch) -> MixerStates:
    """Random states of each layer."""
    generator = torch.Generator().manual_seed(4)
    return MixerStates(
        batch,
        [[torch.randn(NUM_STATES, *shape, generator=generator) for shape in own] for own in stack.states],
    )


@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_is_all_the_kernels(place: str, name: str, dtype: torch.dtype, adapted: bool) -> None:
    torch.manual_seed(3)
    stack = PLACES[place](MIXERS[name](dtype), dtype)
    stack = with_adapters(stack, dtype) if adapted else stack
    assert stack.compiled is not None
    found, wanted = [], []
    for results in (found, wanted):
        states, angles, batch = make_step(dtype)
        first, second = make_caches(dtype)
        caches, taps = [None if place == "in place" else first, second], {1: torch.empty_like(states)}
        memory = states_of(stack, state_batch(SPANS))
        results += [stack(states, batch, caches, [angles], taps=taps, memory=memory), states, taps[1]]
        results += [own for layer in memory.of_layers for own in layer]
        results += [first.k, first.v, second.k, second.v]
        stack.compiled = None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1
    before = states_of(stack, state_batch(SPANS)).of_layers[0][-1]
    after = found[3 + len(stack.states[0]) - 1]
    assert torch.equal(before[[0, 4]], after[[0, 4]])
    assert all(not torch.equal(before[slot], after[slot]) for slot in (1, 2, 3))


@pytest.mark.parametrize("name", MIXERS)
def test_tokens_that_come_one_by_one_get_the_same_bits(name: str) -> None:
    torch.manual_seed(3)
    dtype = torch.bfloat16
    stack = stack_of(MIXERS[name](dtype), dtype)
    states, angles, batch = make_step(dtype)
    memory = states_of(stack, state_batch([[(0, 20, -1, 2)], [(20, 21, 1, 1)]]))
    whole = stack(states, batch, [None, make_caches(dtype)[1]], [angles], memory=memory)
    caches, parts = [None, make_caches(dtype)[1]], []
    own = states_of(stack, state_batch([])).of_layers
    cos, sin = angles
    for place in range(20):
        states, _, batch = make_step(dtype)
        step = dataclasses.replace(
            batch,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([place + 1], dtype=torch.int32),
            slot_mapping=batch.slot_mapping[place : place + 1],
            max_query_len=1,
            max_seq_len=place + 1,
        )
        spans = state_batch([[(0, 1, 2 if place else -1, 2)]])
        row = states[place : place + 1].clone()
        one = cos[place : place + 1], sin[place : place + 1]
        parts.append(stack(row, step, caches, [one], memory=MixerStates(spans, own)))
    assert torch.equal(torch.cat(parts), whole[:20])
    assert all(torch.equal(a[2], b[2]) for a, b in zip(own[0], memory.of_layers[0], strict=True))


@pytest.mark.parametrize("name", MIXERS)
def test_states_that_do_not_fit_are_refused(name: str) -> None:
    stack = stack_of(MIXERS[name](torch.float32), torch.float32)
    states, angles, batch = make_step(torch.float32)
    caches = [None, make_caches(torch.float32)[1]]
    with pytest.raises(ValueError, match="keep states"):
        stack(states, batch, caches, [angles])
    memory = states_of(stack, state_batch(SPANS))
    narrow = MixerStates(memory.batch, [[own[..., 1:] for own in memory.of_layers[0]], []])
    with pytest.raises(ValueError, match="states float32"):
        stack(states, batch, caches, [angles], memory=narrow)
    beyond = states_of(stack, state_batch([[(0, 20, -1, 2)], [(20, 21, 1, NUM_STATES)]]))
    with pytest.raises(ValueError, match="do not fit"):
        stack(states, batch, caches, [angles], memory=beyond)


HALVES = {
    "attention alone": {"up": None, "down": None},
    "feed-forward alone": {
        "qkv": None,
        "out": None,
        "angles": None,
        "num_heads": 0,
        "num_kv_heads": 0,
        "head_dim": 0,
    },
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.usefixtures("served_kernels")
def test_layers_of_one_half(half: str, number: int) -> None:
    torch.manual_seed(3)
    dtype = torch.bfloat16
    stack = stack_of(state_space(dtype), dtype)
    layers = list(stack.layers)
    fields: dict[str, Any] = HALVES[half]
    keeps = half == "attention alone"
    layers[number] = dataclasses.replace(
        layers[number],
        attention_norm=None,
        **fields,
        **({} if keeps else {"mixer": None, "head_norms": None}),
    )
    stack = Stack(stack.input_norm, layers)
    assert stack.compiled is not None
    found, wanted = [], []
    for results in (found, wanted):
        states, angles, batch = make_step(dtype)
        caches, taps = [None, make_caches(dtype)[1]], {n: torch.empty_like(states) for n in (1, 2)}
        if number == 1 and not keeps:
            caches[1] = None
        memory = states_of(stack, state_batch(SPANS))
        results += [stack(states, batch, caches, [angles], taps=taps, memory=memory), states]
        results += [taps[1], taps[2]]
        stack.compiled = None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1
    assert torch.equal(found[1], found[3]) and not torch.equal(found[1], found[2])


def test_a_mixer_beside_attention_adds_to_it() -> None:
    torch.manual_seed(3)
    stack = beside_of(state_space(torch.float32), torch.float32)
    alone = Stack(stack.input_norm, [dataclasses.replace(stack.layers[0], beside=None), stack.layers[1]])
    outputs = []
    for own, memory in ((stack, states_of(stack, state_batch(SPANS))), (alone, None)):
        states, angles, batch = make_step(torch.float32)
        outputs.append(own(states, batch, make_caches(torch.float32), [angles], memory=memory))
    assert not torch.allclose(*outputs)
    wrong: list[dict[str, Any]] = [{"parallel": True}, {"mixer": state_space(torch.float32)}]
    for fields in wrong:
        layers = [dataclasses.replace(stack.layers[0], **fields), stack.layers[1]]
        with pytest.raises(ValueError, match="beside attention"):
            Stack(stack.input_norm, layers)


def test_gates_of_heads_open_them() -> None:
    """A gate of each number, all the same for a head, does what one gate of the head does."""
    torch.manual_seed(3)
    plain, dtype = make_stack(torch.float32, head_norms=True), torch.float32
    queries, made, gates = (
        random(size, HIDDEN) / HIDDEN**0.5 for size in (HEADS * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM, HEADS)
    )
    each = gates.repeat_interleave(HEAD_DIM, 0).view(HEADS, HEAD_DIM, HIDDEN)
    outputs = []
    for rows, single in (([queries, made, gates], True), ([queries, each.view(-1, HIDDEN), made], False)):
        layer = dataclasses.replace(
            plain.layers[0],
            qkv=pack(dense_weight(torch.cat(rows).to(dtype))),
            head_gates=single,
            gated_queries=not single,
        )
        states, angles, batch = make_step(dtype)
        stack = Stack(plain.input_norm, [layer])
        outputs.append(stack(states, batch, make_caches(dtype)[:1], [angles]))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_gates_are_those_of_the_reference(dtype: torch.dtype, served_kernels: CpuKernels) -> None:
    torch.manual_seed(5)
    x, gates = (3 * random(6, 60)).to(dtype), (4 * random(6, 90)).to(dtype)[:, 10:70]
    weight = (1 + random(20) / 8).to(dtype)
    forms = [OutputGate(60), OutputGate(20, sigmoid=True), OutputGate(20, weight, 1e-5)]
    forms += [OutputGate(20, weight, 1e-5, first=True), OutputGate(30, (1 + random(60) / 8).to(dtype), 1e-5)]
    cases = [(form, gates) for form in forms]
    cases += [(OutputGate(20, sigmoid=True, single=True), gates[:, 5:8])]
    for form, own in cases:
        found, wanted = (kernels.states.open_by(x, own, form) for kernels in (served_kernels, reference))
        torch.testing.assert_close(found, wanted, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="groups of 20"):
        served_kernels.states.open_by(x, gates, OutputGate(20, single=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_steps_and_rates_are_those_of_the_reference(
    dtype: torch.dtype, served_kernels: CpuKernels
) -> None:
    x = torch.linspace(-60, 60, 1203).to(dtype).view(3, -1)
    bias, factor = torch.linspace(-0.5, 0.5, 401), torch.linspace(-3, 1, 401)
    for arguments in ((bias, factor, 0.0, float("inf")), (None, None, 0.01, 30.0)):
        found, wanted = (own.states.step_sizes(x, *arguments) for own in (served_kernels, reference))
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-30)
    torch.testing.assert_close(
        served_kernels.states.rates(x[:, 5:300], 2.0),
        reference.states.rates(x[:, 5:300], 2.0),
        rtol=2e-6,
        atol=1e-30,
    )
    with pytest.raises(ValueError, match="groups"):
        served_kernels.states.open_by(x, x, OutputGate(7))
