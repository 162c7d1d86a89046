"""Layers that read the keys of another one, whose values are keys, whose sums are changed at their end, or taken by
experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.layer import Activation, InputGate, Layer, Norm, SumTaker
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
    assert Stack(None, [reading]).compiled is None
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


def gate_of(number: int) -> InputGate:
    generator = torch.Generator().manual_seed(number)
    gate, out = (torch.randn(size, generator=generator) / 4 for size in ((INPUT, HIDDEN), (HIDDEN, INPUT)))
    norm = Norm(1 + torch.randn(HIDDEN, generator=generator) / 8, 1e-5, 0.0)
    return InputGate(pack(dense_weight(gate)), pack(dense_weight(out)), norm, number)


def test_a_layer_adds_what_its_gate_lets_through_and_scales_the_sum() -> None:
    plain, gate = layer_of(QKV), gate_of(1)
    _, total = results(plain, make_caches(torch.float32))
    inputs = torch.randn(len(total), 2, INPUT, generator=GENERATOR)
    ending = dataclasses.replace(plain, input_gate=gate, output_scale=0.5)
    assert Stack(None, [ending]).compiled is None
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


def test_experts_that_take_the_sum_stand_beside_a_dense_half() -> None:
    plain = make_stack(torch.float32, experts=True).layers[0]
    assert plain.mixture is not None and plain.up is not None and plain.down is not None
    norms = [Norm(1 + torch.randn(HIDDEN, generator=GENERATOR) / 8, 1e-5, 0.0) for _ in range(4)]
    scale, scales = torch.randn(HIDDEN, generator=GENERATOR), 1 + torch.rand(5, generator=GENERATOR)
    own = SumTaker(norms[0], scale, 0.5, scales, *norms[1:])
    mixture = dataclasses.replace(plain.mixture, shared_gate=None, of_sum=own)
    layer = dataclasses.replace(plain, mixture=mixture)
    assert Stack(None, [layer]).compiled is None
    _, found = results(layer, make_caches(torch.float32))
    alone = dataclasses.replace(plain, mixture=None, up=None, down=None, attention_norm=None)
    _, total = results(alone, make_caches(torch.float32))

    def normed(norm: Any, x: Tensor) -> Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    logits = mixture.router.linear(normed(norms[0], total) * scale * 0.5)
    ids, weights = route(logits, mixture.router)
    experts = GroupedExperts(mixture.experts, torch.device("cpu"))
    given = experts(normed(norms[1], total), ids, weights * scales[ids])
    dense = plain.down(activate_and_mul(plain.up(normed(plain.attention_norm, total)), Activation.SILU))
    wanted = total + normed(norms[3], dense) + normed(norms[2], given)
    torch.testing.assert_close(found, wanted)
    assert layer.num_bytes == alone.num_bytes + plain.attention_norm.num_bytes + sum(
        part.num_bytes for part in (plain.up, plain.down, mixture)
    )
    (adapted,) = with_adapters(Stack(None, [layer]), torch.float32).layers
    assert adapted.mixture is not None and adapted.mixture.of_sum is own


def test_sums_are_changed_only_in_layers_that_begin_with_a_norm() -> None:
    with pytest.raises(ValueError, match="begin with a norm"):
        Stack(None, [layer_of(QKV, output_scale=0.5)], norm_first=False)
