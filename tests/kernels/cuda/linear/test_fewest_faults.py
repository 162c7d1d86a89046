"""Faults planted in the kernel for the fewest rows: the tests of its results must catch each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from pagewire.kernels.cuda.linear import FEWEST_SOURCE, _kind, variant
from pagewire.kernels.cuda.source import read_source
from pagewire.kernels.data.integers import Integers
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, guarded
from tests.kernels.cuda.emulate.library import load_all
from tests.kernels.cuda.linear.test_linear import (
    BF16,
    FP16,
    FP32,
    TABLE,
    check,
    make_bias,
    make_floats,
    make_linear,
    make_rows_of_x,
    make_weight,
    multiply,
)

WEIGHTS = {
    "halves": make_weight(Integers(4, 128, 0), 300, 2688, BF16, FP16, True),
    "plain": make_weight(Integers(4, 64, 8), 75, 640, BF16, BF16, False),
    "wide": make_weight(Integers(8, 128, 100), 300, 2688, BF16, FP16, True),
    "fine": make_weight(Integers(4, 16, 8), 74, 640, FP16, BF16, True),
    "table": make_weight(Integers(4, 32, 130, TABLE), 75, 640, BF16, FP16, False),
    "bytes": make_weight(Integers(8, None, 128), 550, 1152, FP16, FP32, False),
    "floats": make_floats(128, 75, 1152, BF16),
}
"""Of every way in which codes become numbers and scales are applied. Some warps have no steps, and some have more
than are on their way."""
FAULTS = [
    ("halves", "    __syncthreads();\n    // The first", "    // The first"),
    ("halves", "    wait_for_copies<0>();\n", ""),
    ("bytes", "        __syncthreads();  // the sums of", "        // the sums of"),
    ("halves", "        __syncthreads();  // these sums", "        // these sums"),
    ("bytes", "        start(block + gridDim.x);\n", ""),
    ("halves", "x_of_step += AHEAD", "x_of_step += 0 * AHEAD"),
    ("halves", "ring[i] = Codes<K>(next + i * K::CODE_BYTES);", "continue;"),
    ("halves", "x_of_step + i * ROW_BYTES", "x_of_step"),
    ("halves", "upper[0], lower[0], upper[1], lower[1]", "upper[0], upper[1], lower[0], lower[1]"),
    ("halves", "2 * q + 1, lower", "2 * q, lower"),
    ("halves", "const bool second = threadIdx.x & 4;", "const bool second = threadIdx.x & 8;"),
    ("halves", "threadIdx.x % 32 / 8", "threadIdx.x % 32 / 4 % 4"),
    ("halves", "if (offsets) mma", "if (false) mma"),
    ("halves", "of_rows[i % 2]", "of_rows[0]"),
    ("halves", "                products[q][i] = 0.0f;\n", ""),
    (
        "halves",
        "        for (int i = 0; i < 4; i++) of_rows[i] = 0.0f;\n",
        "        for (int i = 0; i < 0; i++) {}\n",
    ),
    ("halves", "if (!last) read(group + 1);", ""),
    ("wide", "if (last || (u32", "if ((u32"),
    ("plain", "1u << p.group_shift) - 1", "2u << p.group_shift) - 1"),
    ("plain", "read((step >> p.group_shift) * K::SPANS)", "read(step * K::SPANS)"),
    ("fine", "end(2 * step + half", "end(2 * step"),
    ("fine", "x[2 * half], x[2 * half + 1]};\n#pragma", "x[half], x[half + 2]};\n#pragma"),
    ("table", "j == 0 ? four.x : j == 1 ? four.y", "j == 0 ? four.y : j == 1 ? four.x"),
    ("bytes", "multiply_half<K>(p, codes, half, x, sums)", "multiply_half<K>(p, codes, 0, x, sums)"),
    ("bytes", "const int row = 2 * (lane % 4) + i % 2", "const int row = 2 * (lane % 4)"),
    ("bytes", "16 * q + lane / 4 + 8 * (i / 2)", "16 * q + lane / 4"),
    ("bytes", "(lane % 8 < p.m ? lane % 8 : 0)", "(lane % 8 < 4 ? lane % 8 : 0)"),
    ("halves", "own + begin * ROW_BYTES;", "own;"),
    ("bytes", "row < p.m; row += warps", "row < p.m; row += warps + 1"),
    ("floats", "j % 2 ? (second ? two.w : two.z)", "j % 2 ? (second ? two.z : two.w)"),
    ("floats", "p.x_stride + 8 * chunk", "p.x_stride + 4 * chunk"),
]
NUM_ROWS = 7


def check_all(kind: str, launcher: EmulatedLauncher) -> None:
    weight = WEIGHTS[kind]
    x, bias = make_rows_of_x(NUM_ROWS, weight.shape[1], weight.dtype), make_bias(weight)
    layer = make_linear(launcher, weight, bias, fewest=True)
    assert layer.fewest
    check(weight, guarded(x), multiply(layer, guarded(x)), bias)


@pytest.fixture(scope="module")
def right() -> None:
    """Without a fault every check passes, in every order of threads."""
    for kind in WEIGHTS:
        for order in ORDERS:
            check_all(kind, EmulatedLauncher(order))


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels with their faults, compiled several at a time: the compiler is a process of its own."""
    faulty = [
        (variant("fewest", *_kind(WEIGHTS[kind])[0]), Edit(FEWEST_SOURCE, old, new))
        for kind, old, new in FAULTS
    ]
    load_all(faulty)


@pytest.mark.planted_faults
@pytest.mark.parametrize(
    ("kind", "old", "new"), FAULTS, ids=lambda value: str(value).strip()[:40] if value else "nothing"
)
def test_faults_are_caught(
    right: None, compiled: None, catch: Callable[..., None], kind: str, old: str, new: str
) -> None:
    catch(functools.partial(check_all, kind), Edit(FEWEST_SOURCE, old, new))


def test_every_fault_is_in_the_source() -> None:
    """Once: what a change of the source moved is noticed before the faults are planted."""
    text = dict(read_source(FEWEST_SOURCE))[FEWEST_SOURCE]
    assert [old for _, old, _ in FAULTS if text.count(old) != 1] == []
