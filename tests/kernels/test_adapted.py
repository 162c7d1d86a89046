"""LoRA adapters in products: equal to plain PyTorch, and to the bit the same alone and among other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagewire.kernels.adapted import Adapted, adapt
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights, Delta, panels
from pagewire.kernels.dispatch import Kernels
from pagewire.kernels.linear import dense_weight, pack
from pagewire.kernels.reference.kernels import reference
from tests.kernels.adapter_rows import make_rows

NUM_OUT, NUM_IN = 330, 133
SHAPES = ((7, 5), (NUM_OUT, NUM_IN))
PRODUCT = 1
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make_delta(
    rank: int,
    dtype: torch.dtype,
    seed: int,
    *,
    first: int = 0,
    num_out: int = NUM_OUT,
    dora: bool = False,
    whole: bool = False,
) -> Delta:
    """A random change of some outputs."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    a = (randn(num_out if whole else rank, NUM_IN) / NUM_IN**0.5).to(dtype)
    b = None if whole else panels(randn(num_out, rank).to(dtype))
    gain = 1 + randn(num_out) / 8 if dora else None
    return Delta(a, b, first, num_out, 0.75, gain, randn(num_out) if dora or whole else None)


def make_adapters(dtype: torch.dtype, of: torch.dtype) -> list[AdapterWeights]:
    """Adapters of all kinds; `of`: the dtype of their matrices."""
    kinds: list[list[Delta]] = [
        [make_delta(1, of, 1)],
        [make_delta(8, of, 2, first=16, num_out=101), make_delta(3, of, 3, first=200, num_out=130)],
        [make_delta(64, of, 4, dora=True)],
        [make_delta(0, of, 5, whole=True, num_out=90, first=40)],
        [],
        [make_delta(0, of, 6, dora=True)],
    ]
    return [AdapterWeights([[], deltas], SHAPES, dtype) for deltas in kinds]


def make_tensors(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, NUM_IN, generator=generator).to(dtype)
    return x, torch.randn(num_rows, NUM_OUT, generator=generator).to(dtype)


def run(kernels: Kernels, x: Tensor, out: Tensor, rows: AdapterRows) -> Tensor:
    result = out.clone()
    kernels.adapt(x, result, rows, PRODUCT)
    return result


MIXED = [2, -1, 0, 1, 5, 3, 2, -1, 4, 1, 2, 2, 3, 0, 2, 2, 1, 5]


@pytest.mark.parametrize("of", [torch.float32, None], ids=["float32 matrices", "own dtype"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_compiled_kernel_equals_plain_pytorch(
    kernels: CpuKernels, dtype: torch.dtype, of: torch.dtype | None
) -> None:
    adapters = make_adapters(dtype, of or dtype)
    x, out = make_tensors(len(MIXED), dtype)
    rows = make_rows(adapters, MIXED)
    expected = run(reference, x, out, rows).float()  # type: ignore[arg-type]
    actual = run(kernels, x, out, rows).float()
    scale = expected.abs().amax(1, keepdim=True)
    assert ((actual - expected).abs() <= TOLERANCE[dtype] * scale).all()
    assert torch.equal(actual[[1, 7, 8]], out[[1, 7, 8]].float())  # those without an adapter, or an empty one
    assert (actual[[0, 2, 3, 4, 5]] != out[[0, 2, 3, 4, 5]].float()).any(1).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_rows_bits_do_not_depend_on_other_rows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    adapters = make_adapters(dtype, dtype)
    many = MIXED * 12
    x, out = make_tensors(len(many), dtype)
    together = run(kernels, x, out, make_rows(adapters, many))
    for row in (0, 2, 3, 4, 5, 9, len(MIXED) * 12 - 1):
        alone = run(kernels, x[row : row + 1], out[row : row + 1], make_rows(adapters, [many[row]]))
        assert torch.equal(alone[0], together[row]), many[row]


def test_the_product_is_any_linear_layer(best_kernels: CpuKernels) -> None:
    """Also one whose input has more axes, or strides."""
    adapters = make_adapters(torch.float32, torch.float32)
    x, _ = make_tensors(6, torch.float32)
    weight = torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(9))
    rows = make_rows(adapters, [0, 2, -1, 1, 1, 0])
    current: list[AdapterRows | None] = [None]
    linear = Adapted(pack(dense_weight(weight)), PRODUCT, lambda: current[0])
    plain = linear(x)
    current[0] = rows
    expected = plain.clone()
    adapt(x, expected, rows, PRODUCT)
    assert torch.equal(linear(x[None])[0], expected) and not torch.equal(plain, expected)
    assert torch.equal(linear(torch.cat((x, x), 1)[:, :NUM_IN]), expected)
    with pytest.raises(ValueError, match="adapters of 6 rows"):
        linear(x[:5])


def wrong_rows(change: Callable[[AdapterRows], None]) -> AdapterRows:
    rows = make_rows(make_adapters(torch.float32, torch.float32), [0, 1])
    change(rows)
    return rows


def test_what_does_not_fit_is_refused(best_kernels: CpuKernels) -> None:
    x, out = make_tensors(2, torch.float32)
    for change in (
        lambda rows: setattr(rows, "rows", torch.tensor([0, 2])),
        lambda rows: setattr(rows, "rows", torch.tensor([0, -1])),
        lambda rows: setattr(rows, "starts", torch.tensor([0, 1])),
        lambda rows: setattr(rows, "rows", rows.rows.int()),
        lambda rows: setattr(rows, "adapters", [*rows.adapters[:1], AdapterWeights([], (), torch.float32)]),
    ):
        with pytest.raises(ValueError, match=r"rows outside|beginnings|several models"):
            best_kernels.adapt(x, out, wrong_rows(change), PRODUCT)
    for delta in (
        make_delta(4, torch.float32, 0, first=1),
        make_delta(4, torch.float16, 0),
        Delta(torch.zeros(4, NUM_IN), panels(torch.zeros(NUM_OUT, 3)), 0, NUM_OUT),
        Delta(torch.zeros(4, NUM_IN + 1), panels(torch.zeros(NUM_OUT, 4)), 0, NUM_OUT),
        Delta(torch.zeros(4, NUM_IN), panels(torch.zeros(NUM_OUT, 4)), 0, NUM_OUT, gain=torch.zeros(5)),
        Delta(torch.zeros(4, NUM_IN), panels(torch.zeros(64, 4)), 0, NUM_OUT),
        Delta(torch.zeros(4, NUM_IN), None, 0, 5),
        Delta(torch.zeros(NUM_IN, 4).T, panels(torch.zeros(NUM_OUT, 4)), 0, NUM_OUT),
    ):
        with pytest.raises(ValueError, match="does not fit a product"):
            AdapterWeights([[], [delta]], SHAPES, torch.float32)
