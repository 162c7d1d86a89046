"""The compiled kernels of layers with states: against the reference, and a token's bits in any batch."""

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.reference.kernels import reference
from tests.kernels.state_layers import StateLayer, state_batch, state_layers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Values of about unit size. A sum on the edge between two roundings may fall to either side.
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}
TOKENS = 21


def slots(layer: StateLayer, count: int) -> Tensor:
    """State slots that hold NaN, each followed by memory of others."""
    apart = torch.full((count, 2, *layer.state), torch.nan)
    return apart[:, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_to_the_reference(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Two rows, one of several spans, one that continues from a slot; tokens that are views; padding."""
    batch = state_batch([[(0, 2, -1, 3), (2, 3, 3, 0), (3, 12, 0, 4)], [(12, 19, 1, 1)]])
    for layer in state_layers(TOKENS, dtype):
        inputs = [torch.cat([x, x], 1)[:, : x.shape[1]] for x in layer.inputs]
        found, expected = slots(layer, 5), slots(layer, 5)
        found[1] = expected[1] = torch.randn(layer.state)
        out = layer.run(kernels.states, inputs, found, batch)
        truth = layer.run(reference.states, layer.inputs, expected, batch)
        torch.testing.assert_close(
            out, truth, **CLOSE[dtype], msg=lambda text, name=layer.name: f"{name}: {text}"
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert (out[19:] == 0).all(), layer.name
        assert found[2].isnan().all(), layer.name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_the_tokens_before_alone(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """A prompt as a whole; cut into spans; one token at a time; beside another row, with more threads."""
    whole = state_batch([[(0, TOKENS, -1, 0)]])
    cut = state_batch([[(0, 7, -1, 1), (7, 8, 1, 2), (8, TOKENS, 2, 0)]])
    for layer in state_layers(TOKENS, dtype):
        state = slots(layer, 3)
        out = layer.run(kernels.states, layer.inputs, state, whole)
        final = state[0].clone()

        state = slots(layer, 3)
        assert torch.equal(layer.run(kernels.states, layer.inputs, state, cut), out), layer.name
        assert torch.equal(state[0], final), layer.name
        after_seven = state[1].clone()

        state = slots(layer, 2)
        for token in range(TOKENS):
            one = [x[token : token + 1] for x in layer.inputs]
            read, written = (-1 if token == 0 else token % 2, (token + 1) % 2)
            row = layer.run(kernels.states, one, state, state_batch([[(0, 1, read, written)]]))
            assert torch.equal(row[0], out[token]), (layer.name, token)
        assert torch.equal(state[TOKENS % 2], final), layer.name

        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            state = slots(layer, 3)
            state[2] = after_seven
            both = [torch.cat([x[:9], x[7:]]) for x in layer.inputs]
            batch = state_batch([[(0, 9, -1, 1)], [(9, 9 + TOKENS - 7, 2, 2)]])
            rows = layer.run(kernels.states, both, state, batch)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(rows, torch.cat([out[:9], out[7:]])), layer.name
        assert torch.equal(state[2], final), layer.name


def test_extreme_inputs_stay_finite_or_nan(best_kernels: CpuKernels) -> None:
    """Decays down to nothing forget the state; NaN is not lost."""
    batch = state_batch([[(0, 2, 0, 0)]])
    for layer in state_layers(2, torch.float32):
        if "delta" not in layer.name:
            continue
        q, k, v, decay, beta = layer.inputs
        state = torch.full((1, *layer.state), 1e4)
        inputs = [q, k, v, torch.full_like(decay, -1e9), beta]
        expected = torch.zeros(1, *layer.state)
        out = layer.run(best_kernels.states, inputs, state, batch)
        assert torch.equal(out, layer.run(best_kernels.states, inputs, expected, batch))
        assert torch.equal(state, expected)
        v[1, 0] = torch.nan
        assert layer.run(best_kernels.states, inputs, state, batch)[1, 0].isnan().all()


@pytest.mark.parametrize(
    "rows",
    [
        [[(0, 5, -1, 3)]],  # a slot that is not there
        [[(0, 5, 3, 0)]],
        [[(0, 5, -2, 0)]],
        [[(0, 22, -1, 0)]],  # tokens that are not there
        [[(1, 5, -1, 0)]],  # a gap
        [[(0, 5, -1, 0)], [(6, 7, -1, 1)]],
        [[(0, 5, -1, 0)], [(4, 7, -1, 1)]],  # tokens twice
        [[(0, 5, -1, 0), (5, 7, 1, 2)]],  # a row that loses its state
        [[(0, 5, -1, 0), (5, 5, 0, 2)]],  # a span without tokens
    ],
)
def test_a_batch_that_points_outside_is_refused(
    best_kernels: CpuKernels, rows: list[list[tuple[int, int, int, int]]]
) -> None:
    for layer in state_layers(TOKENS, torch.float32)[-6:]:
        with pytest.raises(ValueError, match="spans"):
            layer.run(best_kernels.states, layer.inputs, slots(layer, 3), state_batch(rows))


def test_wrong_shapes_are_refused(best_kernels: CpuKernels) -> None:
    batch = state_batch([[(0, TOKENS, -1, 0)]])
    for layer in state_layers(TOKENS, torch.float32):
        for number, x in enumerate(layer.inputs):
            if number == 0 and len(layer.inputs) == 1:
                continue  # its size is the layer's
            inputs = list(layer.inputs)
            inputs[number] = x[:-1]
            with pytest.raises(ValueError, match="expected"):
                layer.run(best_kernels.states, inputs, slots(layer, 1), batch)
        with pytest.raises(ValueError, match="states float32"):
            layer.run(best_kernels.states, layer.inputs, slots(layer, 1)[..., :-1], batch)
        with pytest.raises(ValueError, match="states float32"):
            layer.run(best_kernels.states, layer.inputs, slots(layer, 1).double(), batch)
