"""The context of a step reaches attention and linear layers, whatever the model's forward hands down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.kernels.linear import Linear
from pagewire.workers.module import attention
from pagewire.workers.module.transforms import LinearModule
from pagewire.workers.network.network import Network
from pagewire.workers.run.runner import Runner
from pagewire.workers.step.context import StepContext, current_step
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parity import make_prompts

PROMPTS = make_prompts(VOCAB_SIZE)


class Watching:
    """A linear layer that records the positions of the steps in which it is called."""

    def __init__(self, linear: Linear, positions: list[Tensor]) -> None:
        self._linear, self._positions = linear, positions
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.num_bytes = linear.dtype, linear.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        step = current_step()
        assert len(step.positions) == x.shape[-2] == len(step.batch.slot_mapping)
        self._positions.append(step.positions)
        return self._linear(x)


def watch_stack(runner: Runner, positions: list[Tensor]) -> None:
    base = runner.model.model.base
    assert isinstance(base, Network)
    layers = [replace(layer, down=Watching(layer.down, positions)) for layer in base.stack.layers]
    base.stack = type(base.stack)(base.stack.input_norm, layers)
    runner.decoding.forget()
    assert base.stack.compiled is None, "what has a linear layer of another kind runs in Python"


def watch_module(runner: Runner, positions: list[Tensor]) -> None:
    for module in runner.model.model.base.module.modules():
        if isinstance(module, LinearModule):
            module.product = Watching(module.product, positions)


@pytest.mark.parametrize(("name", "watch"), [("llama", watch_stack), ("diffllama", watch_module)])
def test_linears_know_the_step(
    name: str, watch: Callable[[Runner, list[Tensor]], None], tmp_path: Path
) -> None:
    runner, _ = load_runner(Architecture(name, GROUPED).write(tmp_path))
    expected = Driver(runner).generate(PROMPTS, 4)
    positions: list[Tensor] = []
    watch(runner, positions)
    assert Driver(runner).generate(PROMPTS, 4) == expected
    assert {int(p) for step in positions for p in step} == set(range(max(map(len, PROMPTS)) + 3))


def test_outside_of_a_step_there_is_no_context() -> None:
    with pytest.raises(RuntimeError, match="outside of a step"):
        current_step()
    heads = torch.zeros(1, 1, 2, 8)
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="outside of a step"):
        attention.attend(module, heads, heads, heads)


def test_a_step_that_fails_leaves_no_context(runner: Runner) -> None:
    step = StepContext(None, torch.zeros(1).long(), [])  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        runner.model.model.hidden_states(torch.zeros(1).long(), step)
    with pytest.raises(RuntimeError, match="outside of a step"):
        current_step()
