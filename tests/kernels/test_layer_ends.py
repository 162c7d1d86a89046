"""Layers that read the keys of another one, whose values are keys or normed, whose heads have sizes of their own,
whose sums are changed at their end, or taken by experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.layer import Activation, Angles, InputGate, Layer, Norm, SumTaker
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.experts import GroupedExperts
from pagewire.kernels.linear import dense_weight, pack
from pagewire.kernels.ops import activate_and_mul, rms_norm, route
from pagewire.kernels.stack import Stack
from tests.kernels.batches import allocate_kv
from tests.kernels.test_decoder import (
    BLOCKS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    make_caches,
    make_stack,
    make_step,
    with_adapters,
)

GENERATOR = torch.Generator().manual_seed(3)
INPUT = 8
"""Numbers that a token gives a layer beside states."""
QKV = torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, generator=GENERATOR) / HIDDEN**0.5
QUERIES, KEYS, _ = QKV.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
HEAD_NORM = Norm(1 + torch.randn(HEAD_DIM, generator=GENERATOR) / 8, 1e-5, 0.0)


def layer_of(rows: Tensor, **fields: Any) -> Layer:
    """A layer whose first product has these rows."""
    return dataclasses.replace(make_stack(torch.float32).layers[0], qkv=pack(dense_weight(rows)), **fields)


def results(layer: Layer, caches: list[Cache], inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What a layer alone makes, and its sum."""
    stack = Stack(None, [layer])
    states, angles, batch = make_step(torch.float32)
    return stack(states, batch, caches[:1], [angles], inputs=inputs), states


@pytest.mark.parametrize("norms", [None, (HEAD_NORM, HEAD_NORM)], ids=["", "norms"])
def test_a_layer_without_keys_reads_those_in_its_cache(norms: tuple[Norm, Norm] | None) -> None:
    caches = make_caches(torch.float32)
    stored = results(layer_of(QKV, head_norms=norms), caches)
    before = caches[0].k.clone()
    reading = layer_of(QUERIES, head_norms=norms, num_kv_heads=0)
    read = results(reading, caches)
    # One has its queries turned by the kernel that stores, the other by one that only turns.
    for ours, theirs in zip(read, stored, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(caches[0].k, before)


def test_values_that_are_keys_are_taken_before_these_are_turned() -> None:
    own, twice = make_caches(torch.float32), make_caches(torch.float32)
    fields = {"head_norms": (HEAD_NORM, HEAD_NORM)}
    found = results(layer_of(torch.cat([QUERIES, KEYS]), values_are_keys=True, **fields), own)
    wanted = results(layer_of(torch.cat([QUERIES, KEYS, KEYS]), **fields), twice)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.equal(own[0].k, own[0].v)


def test_values_are_normed() -> None:
    plain, normed = make_caches(torch.float32), make_caches(torch.float32)
    results(layer_of(QKV), plain)
    results(layer_of(QKV, value_norm=HEAD_NORM), normed)
    used = plain[0].v.abs().sum(-1) > 0
    wanted = rms_norm(plain[0].v[used], HEAD_NORM.weight, HEAD_NORM.eps)
    torch.testing.assert_close(normed[0].v[used], wanted)
    assert torch.equal(normed[0].k, plain[0].k)


def test_values_of_another_size_than_keys_are_scaled() -> None:
    """As values of the same size are of which the last product takes no more."""
    size, fields = HEAD_DIM // 2, {"head_norms": (HEAD_NORM, HEAD_NORM)}
    out = torch.randn(HIDDEN, HEADS, HEAD_DIM, generator=GENERATOR) / HIDDEN**0.5
    out[:, :, size:] = 0
    values = QKV[len(QUERIES) + len(KEYS) :].view(KV_HEADS, HEAD_DIM, HIDDEN)
    rows = torch.cat([QUERIES, KEYS, values[:, :size].flatten(0, 1)])
    narrow = {"out": pack(dense_weight(out[:, :, :size].flatten(1))), "value_dim": size, "value_scale": 0.5}
    layer = layer_of(rows, **fields, **narrow)
    assert Stack(None, [layer]).compiled is None
    found = results(layer, [allocate_kv(BLOCKS, KV_HEADS, 8, HEAD_DIM, size, torch.float32)])
    halved = torch.cat([QUERIES, KEYS, 0.5 * values.flatten(0, 1)])
    wide = layer_of(halved, out=pack(dense_weight(out.flatten(1))), **fields)
    for ours, theirs in zip(found, results(wide, make_caches(torch.float32)), strict=True):
        torch.testing.assert_close(ours, theirs)


def gate_rows(number: int) -> dict[str, Tensor]:
    """The products of a gate."""
    generator = torch.Generator().manual_seed(number)
    sizes = {"gate": (INPUT, HIDDEN), "out": (HIDDEN, INPUT)}
    return {name: torch.randn(size, generator=generator) / 4 for name, size in sizes.items()}


def gate_of(number: int) -> InputGate:
    norm = Norm(1 + torch.randn(HIDDEN, generator=torch.Generator().manual_seed(number)) / 8, 1e-5, 0.0)
    linears = {name: linear_of(rows, torch.float32) for name, rows in gate_rows(number).items()}
    return InputGate(**linears, norm=norm, number=number)


def test_a_layer_adds_what_its_gate_lets_through_and_scales_the_sum() -> None:
    plain, gate = layer_of(QKV), gate_of(1)
    _, total = results(plain, make_caches(torch.float32))
    inputs = torch.randn(len(total), 2, INPUT, generator=GENERATOR)
    ending = dataclasses.replace(plain, input_gate=gate, output_scale=0.5)
    normed, found = results(ending, make_caches(torch.float32), inputs)
    let = functional.silu(gate.gate(total)) * inputs[:, 1]
    wanted = (total + rms_norm(gate.out(let), gate.norm.weight, gate.norm.eps)) * 0.5
    torch.testing.assert_close(found, wanted)
    norm = plain.output_norm
    assert isinstance(norm, Norm)
    torch.testing.assert_close(normed, rms_norm(wanted, norm.weight, norm.eps))
    assert ending.num_bytes == plain.num_bytes + sum(
        part.num_bytes for part in (gate.gate, gate.out, gate.norm)
    )


def test_a_gates_products_may_have_adapters() -> None:
    stack = Stack(None, [layer_of(QKV, input_gate=gate_of(0))])
    (layer,) = with_adapters(stack, torch.float32).layers
    assert layer.input_gate is not None and stack.layers[0].input_gate is not None
    assert layer.input_gate.gate is not stack.layers[0].input_gate.gate


def with_experts_of_sums(plain: Layer, dtype: torch.dtype) -> Layer:
    """A layer with experts, which take the sum and not what its norm gives."""
    assert plain.mixture is not None
    generator = torch.Generator().manual_seed(4)
    norms = [Norm(1 + torch.randn(HIDDEN, generator=generator) / 8, 1e-5, 0.0) for _ in range(4)]
    scale, scales = torch.randn(HIDDEN, generator=generator), 1 + torch.rand(5, generator=generator)
    own = of_dtype(SumTaker(norms[0], scale, 0.5, scales, *norms[1:]), dtype)
    return dataclasses.replace(
        plain, mixture=dataclasses.replace(plain.mixture, shared_gate=None, of_sum=own)
    )


def test_experts_that_take_the_sum_stand_beside_a_dense_half() -> None:
    plain = make_stack(torch.float32, experts=True).layers[0]
    layer = with_experts_of_sums(plain, torch.float32)
    mixture = layer.mixture
    assert mixture is not None and plain.up is not None and plain.down is not None
    own = mixture.of_sum
    assert own is not None
    _, found = results(layer, make_caches(torch.float32))
    alone = dataclasses.replace(plain, mixture=None, up=None, down=None, attention_norm=None)
    _, total = results(alone, make_caches(torch.float32))

    def normed(norm: Any, x: Tensor) -> Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    logits = mixture.router.linear(normed(own.router_norm, total) * own.router_scale * own.router_factor)
    ids, weights = route(logits, mixture.router)
    experts = GroupedExperts(mixture.experts, torch.device("cpu"))
    given = experts(normed(own.norm, total), ids, weights * own.expert_scales[ids])
    dense = plain.down(activate_and_mul(plain.up(normed(plain.attention_norm, total)), Activation.SILU))
    wanted = total + normed(own.dense_norm, dense) + normed(own.given_norm, given)
    torch.testing.assert_close(found, wanted)
    assert layer.num_bytes == alone.num_bytes + plain.attention_norm.num_bytes + sum(
        part.num_bytes for part in (plain.up, plain.down, mixture)
    )
    (adapted,) = with_adapters(Stack(None, [layer]), torch.float32).layers
    assert adapted.mixture is not None and adapted.mixture.of_sum is own


def of_dtype(part: Any, dtype: torch.dtype) -> Any:
    """A norm, a scale or an own part of experts in a dtype."""
    if isinstance(part, Norm):
        return dataclasses.replace(part, weight=part.weight.to(dtype))
    names = ("router_norm", "router_scale", "norm", "given_norm", "dense_norm")
    if isinstance(part, SumTaker):
        return dataclasses.replace(part, **{name: of_dtype(getattr(part, name), dtype) for name in names})
    return part.to(dtype) if isinstance(part, Tensor) else part


def linear_of(rows: Tensor, dtype: torch.dtype) -> Any:
    return pack(dense_weight(rows.to(dtype)))


WIDE = 2 * HEAD_DIM
"""Elements of a head in layers whose heads are larger."""
ENDS = (
    *("reads others", "values are keys", "values are normed", "larger heads"),
    *("gates", "gates alone", "experts of sums"),
)


def layers_of(form: str, dtype: torch.dtype) -> list[Layer]:
    """Two layers of a form; the first one is plain where the second one reads its keys, or has larger heads."""
    experts = form == "experts of sums"
    first, second = make_stack(dtype, experts=experts).layers
    norms = of_dtype(HEAD_NORM, dtype), of_dtype(HEAD_NORM, dtype)

    def changed(layer: Layer, number: int) -> Layer:
        if form in ("gates", "gates alone"):
            gate = gate_of(number)
            parts = {name: linear_of(rows, dtype) for name, rows in gate_rows(number).items()}
            gate = dataclasses.replace(gate, **parts, norm=of_dtype(gate.norm, dtype))
            scale = 0.7 if form == "gates" else 1.0
            return dataclasses.replace(layer, input_gate=gate, output_scale=scale)
        if form == "values are keys":
            qkv = linear_of(torch.cat([QUERIES, KEYS]), dtype)
            own = norms[0] if number else None
            return dataclasses.replace(layer, qkv=qkv, values_are_keys=True, head_norms=norms, value_norm=own)
        if form == "values are normed":
            return dataclasses.replace(layer, value_norm=norms[0])
        return layer

    if form == "reads others":
        second = dataclasses.replace(
            second, qkv=linear_of(QUERIES, dtype), num_kv_heads=0, head_norms=norms, interleaved=True
        )
    elif form == "larger heads":
        rows = (
            torch.randn((HEADS + 2) * WIDE, HIDDEN, generator=torch.Generator().manual_seed(7)) / HIDDEN**0.5
        )
        out = torch.randn(HIDDEN, HEADS * WIDE, generator=torch.Generator().manual_seed(8)) / HIDDEN**0.5
        sizes = {"num_kv_heads": 1, "head_dim": WIDE, "angles": 1, "values_are_keys": False}
        second = dataclasses.replace(second, qkv=linear_of(rows, dtype), out=linear_of(out, dtype), **sizes)
    elif experts:
        first, second = (with_experts_of_sums(first, dtype), first)
    return [changed(layer, number) for number, layer in enumerate((first, second))]


@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ENDS)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_is_all_the_kernels(form: str, dtype: torch.dtype, adapted: bool) -> None:
    stack = Stack(of_dtype(Norm(torch.ones(HIDDEN), 1e-5, 0.0), dtype), layers_of(form, dtype))
    stack = with_adapters(stack, dtype) if adapted else stack
    assert stack.compiled is not None
    inputs = torch.randn(22, 3, INPUT, generator=torch.Generator().manual_seed(9)).to(dtype)
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for results in (found, wanted):
        states, angles, batch = make_step(dtype)
        own, other = make_caches(dtype)
        if form == "reads others":
            other = own
        elif form == "larger heads":
            other = allocate_kv(BLOCKS, 1, 8, WIDE, WIDE, dtype)
        taps = {2: torch.empty_like(states)}
        results += [
            stack(states, batch, [own, other], [angles, wide_angles(dtype)], taps=taps, inputs=inputs)
        ]
        results += [states, taps[2], own.k, own.v, other.k, other.v]
        stack.compiled = None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1 and found[-1].any()


def wide_angles(dtype: torch.dtype) -> Angles:
    """Angles that turn three quarters of a larger head."""
    angles = torch.rand(22, 3 * WIDE // 8, generator=torch.Generator().manual_seed(10)).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def test_inputs_that_do_not_fit_are_refused(served_kernels: CpuKernels) -> None:
    stack = Stack(None, layers_of("gates", torch.float32))
    assert stack.compiled is not None
    states, angles, batch = make_step(torch.float32)
    for inputs in (None, torch.zeros(22, 1, INPUT), torch.zeros(22, 2, INPUT + 1), torch.zeros(21, 2, INPUT)):
        with pytest.raises(ValueError, match="inputs"):
            stack(states, batch, make_caches(torch.float32), [angles], inputs=inputs)


def test_sums_are_changed_only_in_layers_that_begin_with_a_norm() -> None:
    with pytest.raises(ValueError, match="begin with a norm"):
        Stack(None, [layer_of(QKV, output_scale=0.5)], norm_first=False)
