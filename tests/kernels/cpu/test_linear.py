"""Linear layers, on every instruction set of this CPU, with emulated matrix tiles, and by the reference."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.weight import dense_weight
from pagewire.kernels.reference.kernels import reference

SIZES = [(64, 64), (33, 7), (257, 100), (1, 1), (160, 2816), (7, 8192)]
ALL_ROWS = 400
ROWS = (1, 2, 3, 5, 6, 7, 12, 31, 64, 65)


def make(size: tuple[int, int], dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """A weight, a bias, and ALL_ROWS rows."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, size[1], generator=generator).to(dtype) for n in (size[0], ALL_ROWS))
    return weight, torch.randn(size[0], generator=generator).to(dtype) if bias else None, x


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_row_is_right_and_the_same_among_any_others(
    kernels: CpuKernels, size: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    weight, b, x = make(size, dtype, bias)
    linear = kernels.pack(dense_weight(weight), b)
    whole = linear(x)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    scale = wanted.abs().max()
    assert whole.shape == wanted.shape and whole.dtype == dtype
    assert (whole.double() - wanted).abs().max() <= scale * (1e-5 if dtype == torch.float32 else 1e-2)
    for n in ROWS:
        assert torch.equal(linear(x[:n]), whole[:n]), n
        assert torch.equal(linear(x[-n:]), whole[-n:]), n
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(linear(x), whole)
    finally:
        torch.set_num_threads(before)


def test_any_strides_and_dimensions(best_kernels: CpuKernels) -> None:
    weight, bias, x = make((100, 48), torch.float32, True)
    linear = best_kernels.pack(dense_weight(weight.T.contiguous().T), bias)
    wanted = linear(x)
    wide = torch.full((len(x), 60), 7.0)
    wide[:, 5:53] = x
    assert torch.equal(linear(wide[:, 5:53]), wanted)
    assert torch.equal(linear(x.T.contiguous().T), wanted)
    assert torch.equal(linear(x.view(4, 100, 48)), wanted.view(4, 100, 100))
    assert torch.equal(linear(x[3]), wanted[3])
    assert linear(x[:0]).shape == (0, 100)


def test_what_does_not_fit_is_refused(best_kernels: CpuKernels) -> None:
    weight, _, x = make((8, 48), torch.float32, False)
    linear = best_kernels.pack(dense_weight(weight))
    for wrong in (x[:, :47], x.double(), x.bfloat16()):
        with pytest.raises(ValueError, match="expected"):
            linear(wrong)
    with pytest.raises(ValueError, match="weight of shape"):
        best_kernels.pack(dense_weight(weight), torch.zeros(7))


def test_several_threads_may_call_at_once(best_kernels: CpuKernels) -> None:
    weight, _, x = make((512, 2816), torch.float32, False)
    linear = best_kernels.pack(dense_weight(weight))
    wanted = linear(x)
    wrong = []

    def work() -> None:
        for _ in range(20):
            if not torch.equal(linear(x), wanted):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_as_invariant(dtype: torch.dtype) -> None:
    weight, bias, x = make((33, 7), dtype, True)
    linear = reference.pack(dense_weight(weight), bias)
    whole = linear(x)
    for n in ROWS:
        assert torch.equal(linear(x[:n]), whole[:n]), n
    assert linear(x[:0]).shape == (0, 33)


@st.composite
def products(draw: st.DrawFn) -> tuple[int, int, int]:
    """(rows, n, k), whose product emulated tiles compute in well under a second."""
    k = draw(st.integers(1, 200) | st.integers(1, 10_000) | st.sampled_from([1024, 1025, 2048, 2816]))
    n = draw(st.integers(1, 200))
    rows = draw(st.integers(1, 40) | st.integers(1, 600))
    return min(rows, max(1, 20_000_000 // (n * k))), n, k


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(size=products(), data=st.data())
def test_any_product_in_any_company(
    kernels: CpuKernels, size: tuple[int, int, int], data: st.DataObject
) -> None:
    """Some rows' bits are the same among others, at another place, on more threads, with the weight not packed."""
    rows, n, k = size
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    weight, x = (torch.randn(count, k, generator=generator).to(dtype) for count in (n, rows))
    bias = torch.randn(n, generator=generator).to(dtype) if data.draw(st.booleans()) else None
    linear = kernels.pack(dense_weight(weight), bias)
    whole = linear(x)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = functional.linear(x.double().abs(), weight.double().abs())  # what may cancel
    rounding = 0 if dtype == torch.float32 else 1e-2  # of the result
    assert ((whole.double() - exact).abs() <= 1e-6 * (terms + 1) + rounding * exact.abs()).all()

    picked = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=70)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.integers(1, 4)))
        assert torch.equal(linear(x[picked]), whole[picked])
        assert torch.equal(kernels.linear(x, weight, bias), whole)
    finally:
        torch.set_num_threads(before)


def test_what_lies_behind_a_row_is_not_read(kernels: CpuKernels) -> None:
    """Rows that end before a whole step of k, with NaNs behind them."""
    for dtype in DTYPES:
        weight, _, x = make((70, 50), dtype, False)
        wide = torch.full((40, 64), torch.nan, dtype=dtype)
        wide[:, :50] = x[:40]
        found = kernels.pack(dense_weight(weight))(wide[:, :50])
        assert torch.equal(found, kernels.pack(dense_weight(weight))(x[:40]))


def test_nothing_beyond_the_arguments_is_touched(kernels: CpuKernels) -> None:
    """By dense and quantised products; in a process of its own, which a mistake ends."""
    command = [sys.executable, "-m", "tests.kernels.guarded", kernels.isa.name]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr
