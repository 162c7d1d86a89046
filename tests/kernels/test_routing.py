"""Routers of all forms: the compiled choice and the one of the reference, and stacks whose layers have them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.layer import Layer, Router
from pagewire.kernels.data.routing import ExpertGroups, Routing
from pagewire.kernels.linear import dense_weight, pack
from pagewire.kernels.ops import route
from pagewire.kernels.reference.kernels import reference
from pagewire.kernels.stack import Stack
from tests.kernels.test_decoder import HIDDEN, make_caches, make_stack, make_step, with_adapters

GENERATOR = torch.Generator().manual_seed(6)
FORMS: dict[str, dict[str, Any]] = {
    "softmax": {"normalised": False},
    "normalised": {},
    "sigmoid": {"sigmoid": True, "normalised": False},
    "biased": {"sigmoid": True, "bias": 0.5},
    "softmax, biased": {"bias": 0.1},
    "best groups": {"sigmoid": True, "bias": 0.5, "groups": (1, 1e-20)},
    "groups by two": {"sigmoid": True, "bias": 0.5, "groups": (2, 1e-20), "factor": 2.5},
    "softmax in groups": {"normalised": False, "groups": (1, 0.0), "factor": 16.0},
    "epsilon": {"sigmoid": True, "epsilon": 0.5},
    "scaled": {"factor": 2.5},
    "margin": {"normalised": False, "margin": 0.25},
}


def router_of(form: str, num_experts: int, num_chosen: int, dtype: torch.dtype, groups: int) -> Router:
    """A router of a form. dtype: of weights. groups: how many there are, of which half are kept."""
    fields = {"normalised": True, **FORMS[form]}
    spread, generator = fields.pop("bias", 0.0), torch.Generator().manual_seed(num_experts)
    bias = spread * torch.randn(num_experts, generator=generator) if spread else None
    if "groups" in fields:
        best, fields["epsilon"] = fields["groups"]
        best = min(best, num_experts // groups)
        fields["groups"] = ExpertGroups(groups, -(-groups // 2), best)
    linear = pack(dense_weight(torch.zeros(num_experts, 4, dtype=dtype)))
    return Router(linear, Routing(num_chosen, dtype=dtype, **fields), bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("served_kernels")
def test_choices_are_those_of_the_reference(form: str, dtype: torch.dtype) -> None:
    for num_experts, num_chosen, groups in ((4, 1, 2), (16, 2, 4), (60, 4, 6), (128, 8, 8), (3, 3, 1)):
        # No two are equal, in any dtype: which of equal ones PyTorch takes is its own choice.
        order = torch.stack([torch.randperm(num_experts, generator=GENERATOR) for _ in range(40)])
        logits = (order / 16 - 1).to(dtype)
        for weight_dtype in {dtype, torch.float32}:
            router = router_of(form, num_experts, num_chosen, weight_dtype, groups)
            ids, weights = route(logits, router)
            expected = reference.route(logits, router)
            assert torch.equal(ids, expected[0])
            rtol = 1e-5 if weight_dtype is torch.float32 else 2**-7
            torch.testing.assert_close(weights, expected[1], rtol=rtol, atol=1e-7)
            assert torch.equal(weights, weights.to(weight_dtype).float())
            alone = [route(row[None], router) for row in logits[:5]]
            assert torch.equal(torch.cat([a[0] for a in alone]), ids[:5])
            assert torch.equal(torch.cat([a[1] for a in alone]), weights[:5])


def test_weights_are_without_the_bias_that_decides() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    router = Router(
        pack(dense_weight(torch.zeros(4, 4))),
        Routing(2, False, torch.float32, sigmoid=True),
        torch.tensor([0.0, -1.0, 0.0, 1.0]),
    )
    for ids, weights in (route(logits, router), reference.route(logits, router)):
        assert ids.tolist() == [[3, 0]]
        torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


def test_only_kept_groups_are_chosen_from() -> None:
    """The best expert is in the group that is worst by two."""
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.5, 0.0, 0.5]])
    linear = pack(dense_weight(torch.zeros(6, 4)))
    for best, chosen in ((1, [0, 3]), (2, [3, 2])):
        routing = Routing(2, False, torch.float32, sigmoid=True, groups=ExpertGroups(3, 3 - best, best))
        for ids, _ in (
            route(logits, Router(linear, routing)),
            reference.route(logits, Router(linear, routing)),
        ):
            assert ids.tolist() == [chosen]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("served_kernels")
def test_choices_of_equal_and_of_broken_logits(form: str) -> None:
    router = router_of(form, 20, 4, torch.float32, 4)
    logits = torch.zeros(4, 20)
    logits[1, 7] = torch.nan
    logits[2] = torch.inf
    logits[3, 5:] = -torch.inf
    ids, weights = route(logits, router)
    assert ids.min() >= 0 and ids.max() < 20
    if router.bias is None and router.routing.groups is None:
        assert ids[0].tolist() == ids[3].tolist() == [0, 1, 2, 3]
        assert len({*weights[0].tolist()}) == 1 or form == "margin"
    if not router.routing.sigmoid:
        assert weights[1:3].isnan().all()


def test_what_cannot_be_chosen_is_refused(served_kernels: CpuKernels) -> None:
    logits = torch.zeros(2, 6)
    linear = pack(dense_weight(logits.T.contiguous()))
    for routing in (
        Routing(0, True, torch.float32),
        Routing(7, True, torch.float32),
        Routing(4, True, torch.float32, groups=ExpertGroups(2, 1)),
        Routing(1, True, torch.float32, groups=ExpertGroups(4, 1)),
        Routing(1, True, torch.float32, groups=ExpertGroups(2, 3)),
    ):
        for kernels in (served_kernels, reference):
            with pytest.raises(ValueError, match="cannot be chosen"):
                kernels.route(logits, Router(linear, routing))
    for bias in (torch.zeros(5), torch.zeros(6, dtype=torch.float64)):
        with pytest.raises(ValueError, match="a bias float32"):
            served_kernels.route(logits, Router(linear, Routing(1, True, torch.float32), bias))


def stack_of(form: str, dtype: torch.dtype, wide: bool) -> Stack:
    """Two layers with routers of a form, the first with an expert that is added as it is.

    wide: the routers are of float32.
    """
    plain = make_stack(dtype, experts=True)
    layers: list[Layer] = []
    for layer in plain.layers:
        assert layer.mixture is not None
        router = router_of(form, 5, 2, dtype, 5)
        matrix: Tensor = 4 * torch.randn(5, HIDDEN, generator=GENERATOR) / HIDDEN**0.5
        linear = pack(dense_weight(matrix if wide else matrix.to(dtype)))
        mixture = dataclasses.replace(
            layer.mixture, router=dataclasses.replace(router, linear=linear), shared_gate=None
        )
        layers.append(dataclasses.replace(layer, mixture=mixture))
    return Stack(plain.input_norm, layers)


@pytest.mark.parametrize("wide", [False, True], ids=["", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("served_kernels")
def test_one_call_is_all_the_kernels(form: str, dtype: torch.dtype, wide: bool) -> None:
    stack = stack_of(form, dtype, wide)
    stack = stack if wide else with_adapters(stack, dtype)
    assert stack.compiled is not None
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for results in (found, wanted):
        states, angles, batch = make_step(dtype)
        caches, taps = make_caches(dtype), {1: torch.empty_like(states)}
        results += [stack(states, batch, caches, [angles], taps=taps), states, taps[1]]
        stack.compiled = None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].isfinite().all() and found[0].std() > 0.1


@pytest.mark.usefixtures("served_kernels")
def test_a_shared_expert_without_a_gate_is_added() -> None:
    stack = stack_of("softmax", torch.float32, wide=False)
    first = stack.layers[0]
    assert first.down is not None
    nothing = pack(dense_weight(torch.zeros(first.down.out_features, first.down.in_features)))
    layers = {
        "both": first,
        "experts": dataclasses.replace(first, up=None, down=None),
        "shared": dataclasses.replace(first, mixture=None),
        "none": dataclasses.replace(first, mixture=None, down=nothing),
    }
    sums = {}
    for name, layer in layers.items():
        states, angles, batch = make_step(torch.float32)
        Stack(stack.input_norm, [layer])(states, batch, make_caches(torch.float32)[:1], [angles])
        sums[name] = states
    added = sums["experts"] + sums["shared"] - sums["none"]
    torch.testing.assert_close(sums["both"], added, rtol=1e-5, atol=1e-5)
    assert (sums["shared"] - sums["none"]).abs().mean() > 0.05


def test_a_router_of_float32_that_adapters_may_change_runs_kernel_by_kernel(
    served_kernels: CpuKernels,
) -> None:
    stack = with_adapters(stack_of("softmax", torch.bfloat16, wide=True), torch.bfloat16)
    assert served_kernels.stack(stack.input_norm, stack.layers, norm_first=True) is None
