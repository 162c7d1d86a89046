"""LoRA adapters in products on the emulated device: equal to PyTorch, and the same bits alone and in a crowd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from pagewire.kernels.adapted import adapt
from pagewire.kernels.cuda import lora
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.lora import DeviceRows, RowTiles
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.data.deltas import AdapterRows, AdapterWeights, Delta, panels
from pagewire.kernels.reference.kernels import reference
from tests.kernels.adapter_rows import make_rows
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, guarded
from tests.kernels.cuda.emulate.worker import emulated

NUM_OUT, NUM_IN, PRODUCT = 330, 1160, 1
"""More than a block's columns, of which the last panel is not full; more inputs than a block reads at a time."""
SHAPES = ((7, 16), (NUM_OUT, NUM_IN))
# The sums differ in their order, and the result is rounded once.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
CPU = torch.device("cpu")


def make_delta(
    rank: int, of: torch.dtype, seed: int, first: int = 0, num_out: int = NUM_OUT, dora: bool = False
) -> Delta:
    """A random change of some outputs; of: the dtype of its matrices."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    a, b = (randn(rank, NUM_IN) / NUM_IN**0.5).to(of), panels(randn(num_out, rank).to(of))
    gain, shift = (guarded(1 + randn(num_out) / 8), guarded(randn(num_out))) if dora else (None, None)
    return Delta(guarded(a) if rank else a, guarded(b) if rank else b, first, num_out, 0.75, gain, shift)


def make_adapters(dtype: torch.dtype, of: torch.dtype) -> list[AdapterWeights]:
    """Adapters of many ranks; one changes two modules of the product, and one changes nothing."""
    kinds: list[list[Delta]] = [
        [make_delta(1, of, 1)],
        [make_delta(8, of, 2, first=17, num_out=101), make_delta(3, of, 3, first=200, num_out=130)],
        [make_delta(64, of, 4)],
        [make_delta(37, of, 5, num_out=329, dora=True)],
        [],
        [make_delta(0, of, 6, dora=True)],
    ]
    return [AdapterWeights([[], deltas], SHAPES, dtype) for deltas in kinds]


def make_tensors(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, NUM_IN, generator=generator).to(dtype)
    return guarded(x), torch.randn(num_rows, NUM_OUT, generator=generator).to(dtype)


def run(launcher: EmulatedLauncher, x: Tensor, out: Tensor, rows: AdapterRows) -> Tensor:
    result = guarded(out)
    assert lora.adapt(launcher, x, result, rows, PRODUCT) is None
    return result


MIXED = [2, -1, 0, 1, 5, 3, 2, -1, 4, 1, 2, 2, 3, 0, 2, 2, 2, 1, 5, 2, 2]
"""Nine rows have adapter 2: more than a tile has."""


def check(
    launcher: EmulatedLauncher,
    dtype: torch.dtype = torch.bfloat16,
    of: torch.dtype | None = None,
    of_rows: Sequence[int] = MIXED,
) -> None:
    x, out = make_tensors(len(of_rows), dtype)
    rows = make_rows(make_adapters(dtype, of or dtype), of_rows)
    expected = out.clone()
    reference.adapt(x, expected, rows, PRODUCT)
    actual = run(launcher, x, out, rows)
    scale = expected.float().abs().amax(1, keepdim=True)
    assert ((actual.float() - expected.float()).abs() <= TOLERANCE[dtype] * scale).all()
    changed = torch.tensor([index not in (-1, 4) for index in of_rows])
    assert torch.equal(actual[~changed], out[~changed])  # without an adapter, or with an empty one
    assert (actual != out).any(1)[changed].all()


@pytest.mark.parametrize("of", [torch.float32, None], ids=["float32 matrices", "own dtype"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_equal_plain_pytorch(dtype: torch.dtype, of: torch.dtype | None) -> None:
    check(EmulatedLauncher(ORDERS[1]), dtype, of)


def test_a_rows_bits_do_not_depend_on_other_rows(launcher: EmulatedLauncher) -> None:
    adapters = make_adapters(torch.bfloat16, torch.bfloat16)
    x, out = make_tensors(len(MIXED), torch.bfloat16)
    together = run(launcher, x, out, make_rows(adapters, MIXED))
    for row in (0, 2, 3, 4, 5, len(MIXED) - 1):
        alone = run(launcher, x[row : row + 1], out[row : row + 1], make_rows(adapters, [MIXED[row]]))
        assert torch.equal(alone[0], together[row]), MIXED[row]
    small = EmulatedLauncher(launcher.order, multiprocessors=1)  # a smaller grid than the work
    assert torch.equal(run(small, x, out, make_rows(adapters, MIXED)), together)


def test_one_launch_for_rows_that_come_later() -> None:
    """As a recorded one: its parameters stay the same, and what lies in the memory of the tiles counts."""
    launcher, capacity = EmulatedLauncher(), len(MIXED) + 3
    adapters = make_adapters(torch.bfloat16, torch.bfloat16)
    x, out = make_tensors(capacity, torch.bfloat16)
    tiles = RowTiles.reserve(capacity, CPU)
    none = AdapterWeights([[], []], SHAPES, torch.bfloat16)
    static = AdapterRows(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]), [none], capacity)
    static.native = DeviceRows.recorded(tiles.first(capacity), width=64)
    assert torch.equal(run(launcher, x, out, static), out)  # there are no rows yet
    for of_rows in (MIXED, [3, 1], [-1, 0] * 12):
        rows = make_rows(adapters, of_rows)
        tiles.fill(rows)
        expected = run(launcher, x[: len(of_rows)], out[: len(of_rows)], rows)
        actual = run(launcher, x, out, static)
        assert torch.equal(actual[: len(of_rows)], expected)
        assert torch.equal(actual[len(of_rows) :], out[len(of_rows) :])
    with pytest.raises(ValueError, match="25 rows with adapters, and memory for 24"):
        tiles.fill(make_rows(adapters, [0] * 25))


def test_products_that_no_adapter_changes_are_not_launched() -> None:
    rows = make_rows(make_adapters(torch.bfloat16, torch.bfloat16), MIXED)
    x, out = torch.zeros(len(MIXED), 16).bfloat16(), torch.zeros(len(MIXED), 7).bfloat16()
    launcher = EmulatedLauncher()
    launcher.launch = lambda *_, **__: pytest.fail("a kernel was launched")  # type: ignore[method-assign]
    assert lora.adapt(launcher, x, out, rows, 0) is None
    assert rows.native.tiles is None and not out.any()


def whole_weight() -> Delta:
    """A weight in the place of some of the model's."""
    return Delta(torch.randn(90, NUM_IN).bfloat16() / 34, None, 40, 90, shift=torch.randn(90))


def overlapping() -> list[Delta]:
    """Two changes of the same outputs, which two blocks would make at a time."""
    return [make_delta(2, torch.bfloat16, seed, first=seed) for seed in (0, 0)]


@pytest.mark.parametrize("deltas", [[whole_weight()], overlapping()], ids=["a whole weight", "overlapping"])
def test_what_the_kernels_do_not_have_is_left_to_pytorch(deltas: list[Delta]) -> None:
    """Of these rows alone."""
    adapters = make_adapters(torch.bfloat16, torch.bfloat16)
    adapters[3] = AdapterWeights([[], deltas], SHAPES, torch.bfloat16)
    x, out = make_tensors(len(MIXED), torch.bfloat16)
    rows = make_rows(adapters, MIXED)
    expected, actual = out.clone(), out.clone()
    reference.adapt(x, expected, rows, PRODUCT)
    CudaKernels(EmulatedLauncher(), "cpu").adapt(x, actual, rows, PRODUCT)
    assert torch.equal(actual[[5, 12]], expected[[5, 12]]) and not torch.equal(actual[5], out[5])
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=0.1)
    left = lora.adapt(EmulatedLauncher(), x, out, rows, PRODUCT)
    assert left is not None and left.rows.tolist() == [5, 12] and left.adapters == [adapters[3]]


def test_inputs_of_another_size_are_left_to_pytorch() -> None:
    delta = Delta(torch.randn(2, 12).bfloat16(), panels(torch.randn(7, 2).bfloat16()), 0, 7)
    rows = make_rows([AdapterWeights([[delta]], ((7, 12),), torch.bfloat16)], [0])
    x, out = torch.zeros(1, 12).bfloat16(), torch.zeros(1, 7).bfloat16()
    left = lora.adapt(EmulatedLauncher(), x, out, rows, 0)
    assert left is not None and left.rows.tolist() == [0]


def test_the_public_function_with_strided_rows() -> None:
    adapters = make_adapters(torch.float16, torch.float16)
    x, out = make_tensors(3, torch.float16)
    rows, launcher = make_rows(adapters, [2, -1, 1]), EmulatedLauncher()
    expected = run(launcher, x, out, rows)
    wide = torch.cat([x[:, :4], x], 1)[:, 4:]  # rows that are not aligned
    with emulated(launcher):
        adapt(wide, out, rows, PRODUCT)
    assert torch.equal(out, expected)


def test_unsupported_arguments_are_refused() -> None:
    adapters = make_adapters(torch.bfloat16, torch.bfloat16)
    x, out = make_tensors(2, torch.bfloat16)
    with pytest.raises(TypeError, match=r"bfloat16 or float16, not torch\.float32"):
        lora.adapt(EmulatedLauncher(), x.float(), out.float(), make_rows(adapters, [0, 1]), PRODUCT)
    grouped = make_rows(adapters, [0, 1]).grouped(torch.tensor([0, 1]), [1, 1])
    with pytest.raises(ValueError, match="no kernel for grouped products"):
        lora.adapt(EmulatedLauncher(), x, out, grouped, 0)
    outside = make_rows(adapters, [0, 1])
    outside.rows = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="rows outside of a batch of 2"):
        lora.adapt(EmulatedLauncher(), x, out, outside, PRODUCT)


FAULTS = [
    Edit("lora.cu", "int item = blockIdx.y", "int item = 0"),
    Edit("lora.cu", "item -= items;", ""),
    Edit("lora.cu", "column += delta.rank;", ""),
    Edit("lora.cu", "p.rows[tile.begin + min(r, tile.count - 1)]", "p.rows[min(r, tile.count - 1)]"),
    Edit("lora.cu", "i64(min(j, ranks - 1)) * p.k", "i64(j) * p.k"),
    Edit("lora.cu", "i < p.k; i += 8 * THREADS", "i < p.k; i += p.k"),
    Edit("lora.cu", "        for (int warp = 0; warp < WARPS", "        for (int warp = 1; warp < WARPS"),
    Edit("lora.cu", "    __syncthreads();\n    const int r =", "    const int r ="),
    Edit("lora.cu", "delta.scale * sum;", "sum;"),
    Edit("lora.cu", "if (r < tile.count && j < ranks)", "if (r < tile.count)"),
    Edit("lora.cu", "        __syncthreads();  // all threads are done with the numbers before these\n", ""),
    Edit("lora.cu", "b + i64(first + rank) * PANEL", "b + i64(rank) * PANEL"),
    Edit("lora.cu", "i64(output / PANEL) * PANEL * delta.rank", "i64(output / PANEL) * PANEL"),
    Edit("lora.cu", "if (output + i >= delta.num_out) continue;", ""),
    Edit("lora.cu", "if (delta.gain) value *=", "if (false) value *="),
    Edit("lora.cu", "row * p.n + delta.first", "row * p.n"),
]


@pytest.mark.planted_faults
@pytest.mark.parametrize("edit", FAULTS, ids=lambda edit: edit.old.strip()[:40])
def test_faults_are_caught(catch: Callable[..., None], edit: Edit) -> None:
    def all_checks(launcher: EmulatedLauncher) -> None:
        launcher.multiprocessors = 1
        check(launcher)
        check(
            launcher, of_rows=[3, 3, 3]
        )  # the largest rank is no multiple of those that a block computes at a time

    all_checks(EmulatedLauncher())
    catch(all_checks, edit)
