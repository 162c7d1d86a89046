"""Experts of transformers' modules: which activation they have, and the proof of their products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cpu import library
from pagewire.kernels.cpu.experts import CompiledExperts
from pagewire.kernels.data.layer import Activation, LimitedGate
from pagewire.workers.errors import LoadError
from pagewire.workers.families import structures
from pagewire.workers.module.experts import activation_of, limited_gate
from pagewire.workers.network.network import Network
from tests.workers.architectures import EXPERTS, GROUPED, SERVED, Architecture
from tests.workers.driver import load_runner

SHARED = {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}


@pytest.fixture
def compiled() -> None:
    """Experts run in one call where there are compiled kernels."""
    if library.choose() is None:
        pytest.skip("there are no compiled kernels here")


def gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def clamped(limit: float) -> Callable[[Tensor], Tensor]:
    def activation(x: Tensor) -> Tensor:
        gate, up = x[:, ::2].clamp(max=limit), x[:, 1::2].clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    return activation


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (gated(functional.silu), Activation.SILU),
        (gated(lambda x: functional.gelu(x, approximate="tanh")), Activation.GELU_TANH),
        (clamped(7.0), Activation.CLAMPED_SWIGLU),
        (gated(functional.gelu), Activation.GELU),
        (gated(lambda x: functional.silu(x.clamp(max=50.0))), None),
        (clamped(8.0), None),
    ],
    ids=["silu", "gelu tanh", "gpt-oss", "gelu", "limited silu", "another limit"],
)
def test_activations_are_found(function: Callable[[Tensor], Tensor], expected: Activation | None) -> None:
    assert activation_of(function, 72, gated=True) is expected


def cut(limit: float, slope: float | None = None) -> Callable[[Tensor], Tensor]:
    """A gate with limits, as Step 3.7 has it, or with a slope MiniMax M3."""

    def activation(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        up = up.clamp(-limit, limit)
        if slope is None:
            return functional.silu(gate).clamp(max=limit) * up
        gate = gate.clamp(max=limit)
        return (up + 1.0) * (gate * torch.sigmoid(gate * slope))

    return activation


@pytest.mark.parametrize(
    ("limits", "slopes"),
    [((7.0, 7.0), (1.702, 1.702)), ((7.0, 7.0), (None, None)), ((7.0, 8.0), (None, None))]
    + [((7.0, 7.0), (1.702, 1.5)), ((7.0, 7.0), (None, 1.702))],
    ids=["MiniMax M3", "Step 3.7", "another limit", "another slope", "another form"],
)
def test_gates_with_limits_are_those_that_modules_name(
    limits: tuple[float, float], slopes: tuple[float | None, float | None]
) -> None:
    """limits, slopes: of the function, and of what the module's attributes say."""
    named = SimpleNamespace(limit=limits[1], swiglu_alpha=slopes[1])
    limited = limited_gate(named)
    is_same = limits[0] == limits[1] and slopes[0] == slopes[1]
    assert limited == LimitedGate(limits[1], slopes[1])
    assert activation_of(cut(limits[0], slopes[0]), 72, gated=True, limited=limited) == (
        limited if is_same else None
    )


def test_no_limit_is_none() -> None:
    for limit in (None, 0.0, float("inf"), torch.tensor(7.0)):
        assert limited_gate(SimpleNamespace(limit=limit)) is None
    assert limited_gate(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (functional.silu, Activation.SILU),
        (functional.relu, Activation.RELU),
        (lambda x: functional.relu(x).square(), Activation.RELU_SQUARED),
        (functional.leaky_relu, None),
    ],
    ids=["silu", "relu", "squared", "leaky"],
)
def test_activations_of_each_element_are_found(
    function: Callable[[Tensor], Tensor], expected: Activation | None
) -> None:
    assert activation_of(function, 72, gated=False) is expected


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
        ("qwen2_moe", EXPERTS | SHARED),
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1]}),
    ],
)
@pytest.mark.usefixtures("compiled")
def test_layers_of_experts_run_in_one_call(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    runner, _ = load_runner(Architecture(name, GROUPED | fields).write(tmp_path))
    base = runner.model.model.base
    assert isinstance(base, Network) and base.stack.compiled is not None
    first, second = base.stack.layers
    assert first.mixture is not None and (first.mixture.shared_gate is None) == (name != "qwen2_moe")
    assert (second.mixture is None) == (name == "qwen3_moe")


@pytest.mark.usefixtures("compiled")
def test_modules_call_all_experts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "OTHER_ARITHMETIC", {"afmoe"})  # so that it is no stack
    runner, _ = load_runner(SERVED["afmoe"].write(tmp_path, dtype="bfloat16"))
    experts = runner.model.model.base.module.layers[-1].mlp.experts.grouped
    assert experts.compiled is not None and experts.experts.activation is Activation.SILU
    assert runner.model.weight_bytes > experts.num_bytes > 0


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
def test_a_wrong_grouped_product_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gives the last expert's rows to the first."""
    right = CompiledExperts.__call__

    def wrong(self: CompiledExperts, x: Tensor, ids: Tensor, *others: Any) -> Tensor:
        return right(self, x, ids % 3, *others)

    monkeypatch.setattr(CompiledExperts, "__call__", wrong)
    with pytest.raises(LoadError, match="grouped product of 4 experts"):
        load_runner(Architecture(name, GROUPED | EXPERTS).write(tmp_path))
