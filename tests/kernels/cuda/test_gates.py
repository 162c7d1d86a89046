"""Gated activations on the emulated device."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pagewire.kernels.cuda.gates import ACTIVATIONS, activate_and_mul
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.data.layer import Activation
from pagewire.kernels.reference.kernels import reference
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, guarded


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate) * up


def expected(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    return exact_gelu(x) if activation is Activation.GELU else reference.activate_and_mul(x, activation)


# The activation and the product are rounded; a difference in float32's last place may change both roundings.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
LOST = 2**-23
"""Of gate * up: far below zero, GELU is what two functions of float32 leave of one less nearly one."""


def check(
    launcher: EmulatedLauncher,
    activation: Activation,
    rows: int = 3,
    size: int = 72,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    generator = torch.Generator().manual_seed(rows * size)
    x = guarded((torch.randn(rows, 2 * size, generator=generator) * 3).to(dtype))
    out = activate_and_mul(launcher, x, activation)
    assert out.shape == (rows, size) and out.dtype == dtype
    gate, up = x.float().chunk(2, dim=-1)
    right = expected(x, activation).float()
    permitted = TOLERANCE[dtype] * right.abs() + LOST * (gate * up).abs() + 2e-6
    assert ((out.float() - right).abs() <= permitted).all()


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(ACTIVATIONS), st.integers(1, 5), st.integers(1, 200), st.sampled_from(list(DTYPES)),
    st.sampled_from(ORDERS),
)  # fmt: skip
def test_gates_equal_the_reference(
    activation: Activation, rows: int, chunks: int, dtype: torch.dtype, order: tuple[int, int]
) -> None:
    check(EmulatedLauncher(order, multiprocessors=1), activation, rows, 8 * chunks, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extremes(activation: Activation) -> None:
    gate = torch.tensor([0.0, -0.0, 1e4, -1e4, 100, -100, 2**-14, -(2**-14)])
    x = torch.cat([gate, torch.ones(8)])[None].half()
    out = activate_and_mul(EmulatedLauncher(), x, activation)
    torch.testing.assert_close(out, expected(x, activation), rtol=2**-9, atol=1e-7)


def test_a_grid_smaller_than_the_work() -> None:
    check(EmulatedLauncher(multiprocessors=1), Activation.SILU, rows=40, size=1000)


def test_rows_of_a_wider_tensor(launcher: EmulatedLauncher) -> None:
    x = torch.randn(4, 64).bfloat16()[:, 16:48]
    torch.testing.assert_close(
        activate_and_mul(launcher, x, Activation.SILU),
        reference.activate_and_mul(x, Activation.SILU),
        rtol=2**-6,
        atol=1e-6,
    )


def test_more_axes_and_no_rows() -> None:
    x = torch.randn(2, 3, 32).bfloat16()
    assert activate_and_mul(EmulatedLauncher(), x, Activation.GELU).shape == (2, 3, 16)
    assert activate_and_mul(EmulatedLauncher(), x[:0], Activation.GELU).shape == (0, 3, 16)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.zeros(2, 32), TypeError),
        (torch.zeros(2, 24).half(), ValueError),
        (torch.zeros(2, 36).half()[:, :32], ValueError),
        (torch.zeros(65).half()[1:].view(2, 32), ValueError),
    ],
)
def test_unsupported_arguments_are_refused(x: torch.Tensor, error: type) -> None:
    with pytest.raises(error):
        activate_and_mul(EmulatedLauncher(), x, Activation.SILU)


FAULTS = [
    (Activation.SILU, Edit("gates.cu", "row[chunks + chunk]", "row[chunk]")),
    (Activation.SILU, Edit("gates.cu", "expf(-x)", "expf(x)")),
    (Activation.SILU, Edit("gates.cu", "int(i % chunks)", "int(i % (chunks - 1))")),
    (Activation.SILU, Edit("gates.cu", "i += step", "i += 2 * step")),
    (Activation.SILU, Edit("gates.cu", "i < end; i", "i <= end; i")),
    (Activation.GELU, Edit("gates.cu", "erff(", "tanhf(")),
    (Activation.GELU_TANH, Edit("gates.cu", "0.044715f * x * x * x", "0.044715f * x * x")),
]


@pytest.mark.parametrize(("activation", "edit"), FAULTS, ids=lambda value: getattr(value, "old", value))
def test_faults_are_caught(catch: Callable[..., None], activation: Activation, edit: Edit) -> None:
    def check_both(launcher: EmulatedLauncher) -> None:
        launcher.multiprocessors = 1
        check(launcher, activation, rows=7, size=136)
        check(launcher, activation, rows=9, size=2048)

    check_both(EmulatedLauncher())
    catch(check_both, edit)
