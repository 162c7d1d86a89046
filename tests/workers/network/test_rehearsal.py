"""What a model's own code may do while it is loaded, without ending the worker by an error of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaModel

from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError, LostRankError
from pagewire.workers.module.invariant import Invariant
from pagewire.workers.module.refusals import refusals
from pagewire.workers.network import loading
from tests.workers.architectures import GROUPED, Architecture
from tests.workers.driver import load_runner


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Architecture("llama", GROUPED).write(tmp_path_factory.mktemp("llama"))


def failing(*_: Any) -> Any:
    raise KeyError("full_attention")


@pytest.mark.parametrize(
    ("owner", "fault", "reason"),
    [
        (LlamaModel, failing, r"its forward pass fails \(KeyError: 'full_attention'\)"),
        (
            LlamaForCausalLM,
            lambda self: self.model.layers,
            r"output layers need more .* \(AttributeError: .*layers",
        ),
        (
            LlamaMLP,
            lambda self: F.linear(self.up_proj.weight, self.gate_proj.weight.double()),
            "it multiplies by the weight of a linear layer itself",
        ),
    ],
)
def test_a_model_is_refused_before_its_weights_are_read(
    owner: Any, fault: Callable[[Any], Any], reason: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = owner.forward

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        fault(self)
        return result

    monkeypatch.setattr(owner, "forward", faulty)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(LoadError, match=f"LlamaForCausalLM is not supported: .*{reason}"):
        load_runner(llama)


def test_what_depends_on_numbers_is_left_to_the_proof(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaMLP.forward

    def twice_if_large(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * (2 if bool(x.abs().max() > 1e6) else 1)

    monkeypatch.setattr(LlamaMLP, "forward", twice_if_large)
    load_runner(llama)


def test_errors_of_a_models_code_are_refusals(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nobody expects them; the log has the traceback."""
    monkeypatch.setattr(loading, "end_of_sequence", failing)
    with (
        caplog.at_level(logging.WARNING, "pagewire.worker"),
        pytest.raises(
            LoadError, match=r"not supported: its code fails .*KeyError: 'full_attention'"
        ) as raised,
    ):
        load_runner(llama)
    assert isinstance(raised.value.__cause__, KeyError)
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    "error", [OSError("disk"), MemoryError(), LostRankError("gone"), RuntimeError("CUDA")]
)
def test_errors_of_the_machine_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, refusals("model", alone=False):
        raise error
    assert raised.value is error


def test_a_weight_without_numbers_is_no_crash() -> None:
    layer = nn.Linear(4, 4, device="meta")
    with pytest.raises(LoadError, match="multiplies by the weight"), Invariant():
        F.linear(torch.ones(1, 4), layer.weight)
