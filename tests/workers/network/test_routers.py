"""The numbers of routers, as trials of transformers' modules and of ones with other arithmetic find them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewire.kernels.data.routing import ExpertGroups, Routing
from pagewire.kernels.ops import route
from pagewire.workers.families.routers import router_parts
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.network import Network
from tests.workers.architectures import EXPERTS, GROUPED, LATER_EXPERTS, MLA, SERVED, Architecture
from tests.workers.driver import load_runner

CPU = torch.device("cpu")
Shares = Callable[[Tensor], Tensor]


class Gate(nn.Module):
    """A router of 8 experts, 3 of them chosen."""

    def __init__(self, shares: Shares, normalised: bool, rounded: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16())
        self.shares, self.normalised, self.rounded = shares, normalised, rounded

    def forward(self, x: Tensor) -> Any:
        logits = functional.linear(x, self.weight)
        scores, ids = self.shares(logits.float()).topk(3)
        if self.normalised:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores.to(x.dtype) if self.rounded else scores, ids


class Half(nn.Module):
    """A half of experts; `factor`: of what they give."""

    def __init__(self, gate: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.gate, self.experts, self.factor = gate, nn.Linear(32, 32), factor

    def get_input_embeddings(self) -> None:
        """None: it is no whole model."""

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(-1, hidden.shape[-1])
        _, weights, ids = self.gate(x)
        return (self.factor * self.experts(x, ids, weights)).view(hidden.shape)


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("shares", [softmax, torch.sigmoid], ids=["softmax", "sigmoid"])
def test_routers_are_found(shares: Shares, normalised: bool, rounded: bool) -> None:
    half = Half(Gate(shares, normalised, rounded))
    parts = router_parts(half)
    assert parts is not None and parts.bias is None
    router = parts.packed(Weights(half), CPU, torch.bfloat16)
    dtype = torch.bfloat16 if rounded else torch.float32
    assert router.routing == Routing(3, normalised, dtype, sigmoid=shares is torch.sigmoid)
    assert router.linear.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "half",
    [
        Half(Gate(lambda logits: logits.softmax(-1) ** 2, False, False)),
        Half(Gate(lambda logits: logits.tanh(), True, False)),
        Half(Gate(softmax, False, False), factor=2.0),
    ],
    ids=["squares", "tanh", "a factor behind the experts"],
)
def test_other_arithmetic_is_none_of_theirs(half: Half) -> None:
    assert router_parts(half) is None


def test_a_weight_that_nothing_is_known_of() -> None:
    half = Half(Gate(softmax, False, False))
    half.gate.scale = nn.Parameter(torch.ones(32))
    assert router_parts(half) is None


def half_of(name: str, fields: dict[str, Any], number: int = -1) -> tuple[Any, Any]:
    """A family's module on the meta device, and the feed-forward half of a layer of its base."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(Architecture(name, fields).config()).eval()
    layer = causal.model.layers[number]
    names = ("mlp", "block_sparse_moe", "feed_forward")
    return causal, next(half for n in names if (half := getattr(layer, n, None)) is not None)


DEEPSEEK = LATER_EXPERTS | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
NUMBERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "afmoe": ("afmoe", SERVED["afmoe"].fields, {"sigmoid": True, "factor": 1.7, "epsilon": 1e-20}),
    "deepseek_v2": (
        "deepseek_v2",
        MLA
        | DEEPSEEK
        | {"topk_method": "group_limited_greedy", "topk_group": 1, "routed_scaling_factor": 16.0},
        {"normalised": False, "groups": ExpertGroups(4, 1, 1), "factor": 16.0},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        MLA | DEEPSEEK | {"routed_scaling_factor": 2.5},
        {"sigmoid": True, "groups": ExpertGroups(4, 2, 2), "factor": 2.5, "epsilon": 1e-20},
    ),
    "glm4_moe": (
        "glm4_moe",
        GROUPED | LATER_EXPERTS | {"routed_scaling_factor": 1.5},
        {"sigmoid": True, "factor": 1.5, "epsilon": 1e-20},
    ),
    "granitemoe": ("granitemoe", GROUPED | {"num_local_experts": 4}, {}),
    "lfm2_moe": (
        "lfm2_moe",
        SERVED["lfm2_moe"].fields | {"use_expert_bias": True},
        {"sigmoid": True, "epsilon": 1e-6},
    ),
    "llama4_text": (
        "llama4_text",
        SERVED["llama4_text"].fields,
        {"num_chosen": 1, "sigmoid": True, "normalised": False},
    ),
    "minimax_m2": ("minimax_m2", SERVED["minimax_m2"].fields, {"sigmoid": True}),
    "minimax_m3_vl_text": (  # whose half multiplies what its experts give
        "minimax_m3_vl_text",
        SERVED["minimax_m3_vl_text"].fields | {"mlp_layer_types": ["sparse"] * 2},
        {"sigmoid": True, "factor": 2.0},
    ),
    "phimoe": (
        "phimoe",
        GROUPED | {"num_local_experts": 4, "router_jitter_noise": 0.01},
        {"normalised": False, "margin": 0.02},
    ),
    "qwen3_moe": ("qwen3_moe", GROUPED | EXPERTS | {"norm_topk_prob": False}, {"normalised": False}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_families(name: str) -> None:
    """Of modules without any weights."""
    model_type, fields, expected = NUMBERS[name]
    _, half = half_of(model_type, fields)
    parts = router_parts(half)
    assert parts is not None
    assert parts.routing == Routing(
        **({"num_chosen": 2, "normalised": True, "dtype": torch.float32} | expected)
    )
    assert parts.weighs_inputs == (name == "llama4_text")
    biased = {"afmoe", "deepseek_v3", "glm4_moe", "lfm2_moe", "minimax_m2", "minimax_m3_vl_text"}
    assert (parts.bias is not None) == (name in biased)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("glm4_moe", torch.float32),
        ("hunyuan_v1_moe", torch.float32),
        ("granitemoe", torch.bfloat16),
        ("qwen3_moe", torch.bfloat16),
    ],
)
def test_logits_are_of_the_dtype_in_which_a_family_computes_them(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """And choose as its module does, in a model of 16 bits."""
    runner, _ = load_runner(SERVED[name].write(tmp_path, dtype="bfloat16"))
    base = runner.model.model.base
    assert isinstance(base, Network) and base.stack.compiled is not None
    mixture = base.stack.layers[-1].mixture
    assert mixture is not None and mixture.router.linear.dtype is dtype
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids, weights = route(mixture.router.linear(x), mixture.router)
    assert ids.shape == weights.shape == (8, 2)
