"""RMS norm on the emulated device."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.cuda.norms import DTYPES, rms_norm
from pagewire.kernels.reference.kernels import reference
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, guarded

dtypes = st.sampled_from(list(DTYPES))
sizes = st.sampled_from([8, 64, 248, 256, 264, 512, 1032, 1600, 2048])
# The order of the sum and the last place of the square root may differ. That may move the normalised number by one
# place when it is rounded, and so its product with the weight by another one.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return guarded(torch.randn(shape, generator=generator).to(dtype))


def check(
    launcher: EmulatedLauncher,
    rows: int = 3,
    size: int = 1032,
    dtype: torch.dtype = torch.bfloat16,
    offset: float = 0.0,
    add: bool = True,
    seed: int = 0,
) -> None:
    x = numbers(rows, size, dtype=dtype, seed=seed)
    weight = numbers(size, dtype=dtype, seed=seed + 1)
    residual = numbers(rows, size, dtype=dtype, seed=seed + 2) if add else None
    out = guarded(torch.full((rows, size), torch.nan, dtype=dtype))
    if residual is None:
        expected = reference.rms_norm(x, weight, 1e-5, offset=offset)
        rms_norm(launcher, x, weight, 1e-5, offset=offset, out=out)
    else:
        kept = residual.clone()
        expected = reference.add_rms_norm(x, kept, weight, 1e-5, offset=offset)
        rms_norm(launcher, x, weight, 1e-5, offset=offset, residual=residual, out=out)
        assert torch.equal(residual, kept)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), sizes, dtypes, st.sampled_from([0.0, 1.0]), st.booleans(), st.integers(0, 2**31))
def test_norms_equal_the_reference(
    rows: int, size: int, dtype: torch.dtype, offset: float, add: bool, seed: int
) -> None:
    check(EmulatedLauncher(ORDERS[seed % 4]), rows, size, dtype, offset, add, seed)


@pytest.mark.parametrize("size", [1000, 4096, 5120, 8192, 16384, 32768])
def test_long_rows(size: int) -> None:
    check(EmulatedLauncher(), 2, size)


def test_a_row_does_not_depend_on_the_batch(launcher: EmulatedLauncher) -> None:
    x = numbers(5, 512, dtype=torch.bfloat16, seed=0)
    weight = numbers(512, dtype=torch.bfloat16, seed=1)
    together = rms_norm(launcher, x, weight, 1e-6)
    assert torch.equal(rms_norm(launcher, x[3:4], weight, 1e-6), together[3:4])


def test_heads_inside_a_wider_row(launcher: EmulatedLauncher) -> None:
    qkv = numbers(3, 7, 64, dtype=torch.float16, seed=0)
    heads, weight = qkv[:, 2:5], numbers(64, dtype=torch.float16, seed=1)
    torch.testing.assert_close(
        rms_norm(launcher, heads, weight, 1e-6),
        reference.rms_norm(heads, weight, 1e-6),
        rtol=2**-10,
        atol=1e-6,
    )


def test_in_place() -> None:
    x, weight = numbers(2, 256, dtype=torch.bfloat16, seed=0), torch.ones(256, dtype=torch.bfloat16)
    expected = reference.rms_norm(x.clone(), weight, 1e-6)
    assert rms_norm(EmulatedLauncher(), x, weight, 1e-6, out=x) is x
    torch.testing.assert_close(x, expected, rtol=2**-7, atol=1e-6)


def test_no_rows() -> None:
    empty = torch.empty(0, 64, dtype=torch.bfloat16)
    assert rms_norm(EmulatedLauncher(), empty, empty.new_ones(64), 1e-6).shape == (0, 64)


@pytest.mark.parametrize(
    ("x", "weight", "error"),
    [
        (torch.zeros(2, 64), torch.zeros(64), TypeError),
        (torch.zeros(2, 64).half(), torch.zeros(64).bfloat16(), TypeError),
        (torch.zeros(2, 60).half(), torch.zeros(60).half(), ValueError),
        (torch.zeros(2, 64).half(), torch.zeros(32).half(), ValueError),
        (torch.zeros(1, 40000).half(), torch.zeros(40000).half(), ValueError),
        (torch.zeros(1, 2, 68).half()[..., :64], torch.zeros(64).half(), ValueError),
        (torch.zeros(130).half()[1:129].view(2, 64), torch.zeros(64).half(), ValueError),
    ],
)
def test_unsupported_arguments_are_refused(x: torch.Tensor, weight: torch.Tensor, error: type) -> None:
    with pytest.raises(error):
        rms_norm(EmulatedLauncher(), x, weight, 1e-6)


FAULTS = [
    Edit("norms.cu", "        __syncthreads();\n", ""),
    Edit("norms.cu", "if (chunk >= chunks) continue;\n        held[i] = ", "held[i] = "),
    Edit("norms.cu", "/ float(p.size) + p.eps", "/ float(p.size)"),
    Edit("norms.cu", "for (int warp = 0;", "for (int warp = 1;"),
    Edit("norms.cu", "row / p.inner * p.outer_stride + row % p.inner", "row % p.inner"),
    Edit("norms.cu", "held[i] = add<T>", "add<T>"),
    Edit("chunk.cuh", "sum += x.y * x.y;", ""),
    Edit("chunk.cuh", "y * (weight + offset)", "rounded<T>(y) * weight"),
    Edit("chunk.cuh", "sum += x.x * x.x;", "sum += x.x;"),
    Edit("ptx.cuh", "x += __shfl_xor_sync(ALL_LANES, x, bits);", "x += __shfl_xor_sync(0xffff, x, bits);"),
]


@pytest.mark.parametrize("edit", FAULTS, ids=lambda edit: edit.old.strip()[:40])
def test_faults_are_caught(catch: Callable[..., None], edit: Edit) -> None:
    def all_checks(launcher: EmulatedLauncher) -> None:
        check(launcher)
        check(launcher, offset=1.0, add=False)
        x = numbers(4, 6, 64, dtype=torch.float16, seed=0)[:, 1:3] * 1e-3
        weight = numbers(64, dtype=torch.float16, seed=1)
        expected = reference.rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(rms_norm(launcher, x, weight, 1e-6), expected, rtol=2**-9, atol=1e-6)

    all_checks(EmulatedLauncher())
    catch(all_checks, edit)
