"""Layers with states on the emulated device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cuda.states import CudaStateKernels
from pagewire.kernels.reference.kernels import reference
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, guarded
from tests.kernels.state_layers import StateLayer, state_batch, state_layers

CLOSE = {
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}
TOKENS = 9
SPANS = [[(0, 2, -1, 3), (2, 7, 3, 0)], [], [(7, 8, 1, 1)]]
"""Two rows, and one without tokens; a token of padding."""


def small_layers(dtype: torch.dtype) -> list[StateLayer]:
    """Few variants, which are compiled for the test: matrices of up to 16 and 64 rows; of float16 one.

    In float32 only state spaces and convolutions have kernels.
    """
    layers = [layer for layer in state_layers(TOKENS, dtype) if "128" not in layer.name]
    if dtype == torch.float32:
        return [layer for layer in layers if layer.name.startswith(("state space", "conv"))]
    return layers if dtype == torch.bfloat16 else layers[:3]


def slots(layer: StateLayer) -> Tensor:
    return guarded(torch.full((4, *layer.state), torch.nan))


def check(launcher: EmulatedLauncher, layer: StateLayer) -> None:
    ours, dtype = CudaStateKernels(launcher), layer.inputs[0].dtype
    found, expected = slots(layer), slots(layer)
    found[1] = expected[1] = torch.randn(layer.state, generator=torch.Generator().manual_seed(0))
    out = layer.run(ours, [*map(guarded, layer.inputs)], found, state_batch(SPANS))
    truth = layer.run(reference.states, layer.inputs, expected, state_batch(SPANS))
    torch.testing.assert_close(out, truth, **CLOSE[dtype])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert (out[-1] == 0).all()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_equal_to_the_reference(dtype: torch.dtype) -> None:
    for number, layer in enumerate(small_layers(dtype)):
        check(EmulatedLauncher(ORDERS[number % 4]), layer)


def test_bits_depend_on_the_tokens_before_alone() -> None:
    """A prompt as a whole, and one token at a time beside another row."""
    ours = CudaStateKernels(EmulatedLauncher(ORDERS[2]))
    for layer in small_layers(torch.bfloat16):
        state = slots(layer)
        out = layer.run(ours, layer.inputs, state, state_batch([[(0, TOKENS, -1, 0)]]))
        final = state[0].clone()
        for token in range(TOKENS):
            twice = [x[[0, token]] for x in layer.inputs]
            batch = state_batch([[(0, 1, -1, 3)], [(1, 2, 1 if token else -1, 1)]])
            rows = layer.run(ours, twice, state, batch)
            assert torch.equal(rows, out[[0, token]]), (layer.name, token)
        assert torch.equal(state[1], final), layer.name


def test_sizes_without_a_kernel_are_left_to_pytorch() -> None:
    ours = CudaStateKernels(EmulatedLauncher())
    x, weight, state = torch.randn(3, 8).half(), torch.randn(9, 8).half(), torch.zeros(1, 8, 8)
    batch = state_batch([[(0, 3, -1, 0)]])
    expected = reference.states.causal_conv(x, weight, None, state.clone(), batch, silu=True)
    assert torch.equal(ours.causal_conv(x, weight, None, state, batch, silu=True), expected)
    for layer in state_layers(3, torch.float32):
        state = torch.zeros(1, *layer.state)
        expected = layer.run(reference.states, layer.inputs, state.clone(), batch)
        torch.testing.assert_close(layer.run(ours, layer.inputs, state, batch), expected)


def test_wrong_shapes_are_refused() -> None:
    ours, batch = CudaStateKernels(EmulatedLauncher()), state_batch([[(0, TOKENS, -1, 0)]])
    for layer in small_layers(torch.bfloat16):
        for number in range(1, len(layer.inputs)):
            inputs = list(layer.inputs)
            inputs[number] = inputs[number][:-1]
            with pytest.raises(ValueError, match="expected"):
                layer.run(ours, inputs, slots(layer), batch)
        with pytest.raises(ValueError, match="states float32"):
            layer.run(ours, layer.inputs, slots(layer)[..., :-1], batch)


FAULTS = {
    "delta rule of 2": [
        ("__syncthreads();  // the token is there\n            float query", "float query"),
        ("__syncthreads();  // the token is read", "// the token is read"),
        ("+ product * change", ""),
        ("(change * key_scale)", "change"),
        ("* p.beta[at]", ""),
        ("if (row < rows && column < columns) state", "if (row < rows) state"),
    ],
    "state space of 2": [
        ("__syncthreads();  // the token is there, and", "// the token is there, and"),
        ("(p.d ? p.d[head] : 0.0f) * x", "0.0f"),
        ("threadIdx.x / 32 * ROWS + i;\n            if (row", "threadIdx.x / 32 + i;\n            if (row"),
    ],
    "scan of 100": [("if (n >= p.state_dim) continue;", ""), ("expf(dt * a[n])", "expf(a[n])")],
    "convolution of 300": [
        ("window[tap + 1]", "window[tap]"),
        ("to[i64(tap - 1) * p.channels]", "to[0]"),
    ],
    "recurrence of 300": [("if (channel >= p.channels) return;\n    float state = 0", "float state = 0")],
}  # fmt: skip


@pytest.mark.planted_faults
@pytest.mark.parametrize(("name", "old", "new"), [(name, *edit) for name in FAULTS for edit in FAULTS[name]])
def test_faults_are_caught(catch: Callable[..., None], name: str, old: str, new: str) -> None:
    layer = next(layer for layer in small_layers(torch.bfloat16) if layer.name.startswith(name))
    check(EmulatedLauncher(), layer)
    catch(lambda launcher: check(launcher, layer), Edit("states.cu", old, new))
