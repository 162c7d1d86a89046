"""Layers with norms elsewhere, parallel halves, scales and other rotations: one call, and kernel by kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.layer import Activation, HeadNormForm, Layer, LayerNorm, Norm, Xielu
from pagewire.kernels.linear import Linear, dense_weight, pack
from pagewire.kernels.stack import Stack, by_halves
from tests.kernels.test_decoder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    make_caches,
    make_stack,
    make_step,
    with_adapters,
)

GENERATOR = torch.Generator().manual_seed(5)


def norm(size: int = HIDDEN, offset: float = 0.0) -> Norm:
    return Norm(1 - offset + torch.randn(size, generator=GENERATOR) / 8, 1e-5, offset)


def layer_norm(size: int = HIDDEN) -> LayerNorm:
    return LayerNorm(*(torch.randn(2, size, generator=GENERATOR) / 8 + torch.tensor([[1.0], [0.0]])), 1e-5)


SCALE = 1.5
"""Of the second table of angles, which scales what it turns."""
FORMS: dict[str, dict[str, Any]] = {
    "layer norms of heads": {"head_norms": (layer_norm(HEAD_DIM), layer_norm(HEAD_DIM))},
    "interleaved with layer norms": {
        "interleaved": True,
        "head_norms": (layer_norm(HEAD_DIM), layer_norm(HEAD_DIM)),
    },
    "scaled queries": {"query_angles": 1},
    "scaled queries with norms": {"query_angles": 1, "head_norms": (norm(HEAD_DIM), norm(HEAD_DIM))},
    "scaled queries that are turned before": {
        "query_angles": 1,
        "head_norms": (norm(HEAD_DIM), norm(HEAD_DIM)),
        "head_norm_form": HeadNormForm.ROTATED,
    },
    "scaled queries, keys that are not turned": {"angles": None, "query_angles": 1},
    "cut": {"qkv_limit": 0.25},
    "norms before products": {"out_norm": norm(HEADS * HEAD_DIM), "down_norm": norm(INTERMEDIATE)},
    "squared gates": {"activation": Activation.RELU_SQUARED},
    "no gates": {"gated": False, "activation": Activation.RELU, "down_norm": norm(INTERMEDIATE)},
    "a curve": {"gated": False, "activation": Xielu(0.9, 0.7, 0.5, -1e-6)},
    "norms around": {"attended_norm": norm(offset=1.0), "fed_norm": norm(offset=1.0)},
    "norms after alone": {
        "attended_norm": norm(),
        "fed_norm": layer_norm(),
        "attention_norm": None,
        "output_norm": None,
    },
    "no norm of the sum": {"attention_norm": None},
    "centred": {"attention_norm": layer_norm(), "output_norm": layer_norm()},
    "scaled": {"residual_scale": 0.22},
    "scaled and centred": {"residual_scale": 0.22, "attention_norm": layer_norm(), "fed_norm": norm()},
    "parallel": {"parallel": True, "attention_norm": None},
    "parallel with two norms": {"parallel": True, "attention_norm": layer_norm(), "residual_scale": 0.5},
    "interleaved": {"interleaved": True},
    "queries turned alone": {"angles": None, "query_angles": 0, "interleaved": True},
    "interleaved with norms": {"interleaved": True, "head_norms": (norm(HEAD_DIM), norm(HEAD_DIM))},
    "norm of all heads": {
        "head_norms": (norm(HEADS * HEAD_DIM), norm(KV_HEADS * HEAD_DIM)),
        "head_norm_form": HeadNormForm.TOGETHER,
    },
    "gates behind queries": {"gated_queries": True},
    "gates behind queries with layer norms": {
        "gated_queries": True,
        "interleaved": True,
        "head_norms": (layer_norm(HEAD_DIM), layer_norm(HEAD_DIM)),
    },
    "gates behind queries with a norm of all heads": {
        "gated_queries": True,
        "head_norms": (norm(HEADS * HEAD_DIM), norm(KV_HEADS * HEAD_DIM)),
        "head_norm_form": HeadNormForm.TOGETHER,
    },
    "norm of heads that are turned": {
        "head_norms": (norm(HEAD_DIM), norm(HEAD_DIM)),
        "head_norm_form": HeadNormForm.ROTATED,
    },
}


def of_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A field with its norms in a dtype."""
    if isinstance(value, tuple):
        return tuple(of_dtype(each, dtype) for each in value)
    if isinstance(value, Norm):
        return dataclasses.replace(value, weight=value.weight.to(dtype))
    if isinstance(value, LayerNorm):
        assert value.bias is not None
        return dataclasses.replace(value, weight=value.weight.to(dtype), bias=value.bias.to(dtype))
    return value


def stack_of(form: str, dtype: torch.dtype) -> Stack:
    """Two layers of a form; the last one ends with a norm of the sum."""
    plain = make_stack(dtype)
    fields = {name: of_dtype(value, dtype) for name, value in FORMS[form].items()}

    def linear(size: int) -> Linear:
        rows = torch.randn(size, HIDDEN, generator=torch.Generator().manual_seed(6)) / HIDDEN**0.5
        return pack(dense_weight(rows.to(dtype)))

    if not fields.get("gated", True):
        fields["up"] = linear(INTERMEDIATE)
    if fields.get("gated_queries"):
        fields["qkv"] = linear(2 * (HEADS + KV_HEADS) * HEAD_DIM)
    layers: list[Layer] = [dataclasses.replace(layer, **fields) for layer in plain.layers]
    if layers[-1].output_norm is None:
        layers[-1] = dataclasses.replace(layers[-1], output_norm=plain.layers[-1].output_norm)
    return Stack(None if form == "norms after alone" else plain.input_norm, layers)


@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_is_all_the_kernels(form: str, dtype: torch.dtype, adapted: bool) -> None:
    stack, plain = stack_of(form, dtype), make_stack(dtype)
    stack = with_adapters(stack, dtype) if adapted else stack
    assert stack.compiled is not None
    found, wanted = [], []
    for results in (found, wanted):
        states, angles, batch = make_step(dtype)
        caches, taps = make_caches(dtype), {1: torch.empty_like(states)}
        tables = [angles, (angles[0] * SCALE, angles[1] * SCALE)]
        results += [stack(states, batch, caches, tables, taps=taps), states, taps[1]]
        results += [x for cache in caches for x in (cache.k, cache.v)]
        stack.compiled = None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1
    states, angles, batch = make_step(dtype)
    assert not torch.equal(plain(states, batch, make_caches(dtype), [angles]), found[0]), (
        "the form changes nothing"
    )


def test_neighbours_that_are_laid_apart_are_turned_as_neighbours() -> None:
    heads = torch.randn(3, 2, HEAD_DIM, generator=GENERATOR)
    cos, sin = (f(torch.rand(3, HEAD_DIM // 4, generator=GENERATOR)) for f in (torch.cos, torch.sin))
    pairs = heads[..., : HEAD_DIM // 2].unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack(
        [even * cos[:, None] - odd * sin[:, None], odd * cos[:, None] + even * sin[:, None]], -1
    )
    wanted = torch.cat([turned.flatten(-2), heads[..., HEAD_DIM // 2 :]], -1)

    laid: Tensor = by_halves(heads, HEAD_DIM // 2)
    first, second = laid[..., : HEAD_DIM // 4], laid[..., HEAD_DIM // 4 : HEAD_DIM // 2]
    result = torch.cat(
        [first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]], -1
    )
    assert torch.equal(result, by_halves(wanted, HEAD_DIM // 2)[..., : HEAD_DIM // 2])


def test_what_has_no_norm_at_its_end_runs_kernel_by_kernel(served_kernels: CpuKernels) -> None:
    plain = make_stack(torch.float32)
    last = dataclasses.replace(plain.layers[-1], output_norm=None)
    assert served_kernels.stack(plain.input_norm, [plain.layers[0], last], norm_first=True) is None


def test_parallel_halves_are_both_computed_by_layers_whose_norms_come_first() -> None:
    layer = dataclasses.replace(make_stack(torch.float32).layers[0], parallel=True)
    with pytest.raises(ValueError, match="parallel"):
        Stack(
            None,
            [dataclasses.replace(layer, attention_norm=layer_norm(), output_norm=layer_norm())],
            norm_first=False,
        )
    with pytest.raises(ValueError, match="parallel"):
        Stack(None, [dataclasses.replace(layer, feed_forward=lambda x: x)])
