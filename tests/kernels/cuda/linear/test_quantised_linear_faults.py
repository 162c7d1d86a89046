"""Faults planted in products of rows in 8 bits: each must change a result or be reported by the emulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from pagewire.kernels.cuda.quantised_linear import SOURCE
from pagewire.kernels.cuda.source import read_source
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher
from tests.kernels.cuda.linear import test_quantised_linear as checks
from tests.kernels.cuda.linear.test_quantised_linear import (
    ADA,
    BF16,
    FP16,
    check,
    floats,
    integers,
)

pytestmark = pytest.mark.usefixtures("many_from_65_rows_on")

FEW, MANY, ROWS, NAN = 21, 70, "rows", "nan"
"""Numbers of rows, of which the last tile of no kernel is full, or what else finds a fault."""
LINEAR, OF_ROWS = "linear.cuh", "quantised_rows.cu"
WEIGHTS = {
    "integers": integers(41, 2112, BF16),
    "floats": floats(None, 41, 2112, FP16),
    "groups": floats(128, 40, 2176, BF16),
}
"""Some slices have more steps than stages, and two weights have an odd number of steps."""
FAULTS = [
    # Rounding.
    (
        "integers",
        ROWS,
        OF_ROWS,
        "largest = max(largest, largest_of<T>(x[chunk]));",
        "largest = largest_of<T>(x[chunk]);",
    ),
    ("integers", ROWS, OF_ROWS, "    x = max_lanes(x);\n", ""),
    ("integers", FEW, OF_ROWS, "    __syncthreads();\n", ""),
    ("integers", FEW, OF_ROWS, "warp < ROW_THREADS / 32; warp++", "warp < ROW_THREADS / 64; warp++"),
    (
        "integers",
        ROWS,
        OF_ROWS,
        "__float_as_uint(pair.y) & 0x7fffffffu",
        "__float_as_uint(pair.x) & 0x7fffffffu",
    ),
    ("integers", FEW, OF_ROWS, "__float_as_uint(pair.x) & 0x7fffffffu", "__float_as_uint(pair.x)"),
    (
        "integers",
        ROWS,
        OF_ROWS,
        "fminf(__fdiv_rn(MOST, largest), 3.4028234663852886e38f)",
        "__fdiv_rn(MOST, largest)",
    ),
    ("integers", ROWS, OF_ROWS, "bits < 0x7f800000u", "bits <= 0x7f800000u"),
    (
        "integers",
        ROWS,
        OF_ROWS,
        "finite ? __fdiv_rn(largest, MOST) : __uint_as_float(0x7fffffffu)",
        "largest / MOST",
    ),
    (
        "floats",
        NAN,
        OF_ROWS,
        "finite ? __fdiv_rn(largest, MOST) : __uint_as_float(0x7fffffffu)",
        "__fdiv_rn(1.0f, MOST)",
    ),
    ("integers", ROWS, OF_ROWS, "127.0f : 448.0f", "128.0f : 448.0f"),
    ("floats", ROWS, OF_ROWS, "127.0f : 448.0f", "127.0f : 240.0f"),
    ("integers", ROWS, OF_ROWS, "return __float2int_rn(x) & 0xff;", "return int(x) & 0xff;"),
    ("integers", ROWS, OF_ROWS, "return __float2int_rn(x) & 0xff;", "return __float2int_rn(x);"),
    ("integers", ROWS, OF_ROWS, "pair.y, factor)) << 8", "pair.y, factor)) << 7"),
    ("floats", ROWS, OF_ROWS, "two << 16 * (i % 2)", "two << 16 * (i / 2)"),
    ("integers", FEW, OF_ROWS, "i64(row) * p.chunks", "i64(row)"),
    ("integers", FEW, OF_ROWS, "+ row * p.x_stride", ""),
    ("integers", ROWS, OF_ROWS, "if (threadIdx.x == 0) scales[0] = rounding.scale;", "scales[0] = 0;"),
    ("floats", ROWS, OF_ROWS, "max_lanes<GROUP_LANES>", "max_lanes<32>"),
    ("floats", ROWS, OF_ROWS, "max_lanes<GROUP_LANES>", "max_lanes<8>"),
    ("floats", ROWS, OF_ROWS, "chunk < p.chunks ? x[chunk] :", "true ? x[chunk] :"),
    ("floats", ROWS, OF_ROWS, "            if (chunk >= p.chunks) continue;\n", ""),
    ("floats", ROWS, OF_ROWS, "scales[i64(chunk / GROUP_LANES) * p.m]", "scales[chunk / GROUP_LANES]"),
    ("floats", ROWS, OF_ROWS, "if (chunk % GROUP_LANES == 0) scales", "if (chunk % 32 == 0) scales"),
    # Fragments, and what tensor cores make of them.
    ("integers", FEW, LINEAR, "b[0] = words[2 * half][j], b[1]", "b[0] = words[half][j], b[1]"),
    ("floats", MANY, LINEAR, "b[1] = words[2 * half + 1][j];", "b[1] = words[2 * half][j];"),
    ("integers", FEW, LINEAR, "DENSE || PAIRS ? 4", "DENSE ? 4"),
    # Scales of rows.
    ("integers", FEW, LINEAR, "(p.x_scales)[row]", "(p.x_scales)[0]"),
    (
        "integers",
        MANY,
        LINEAR,
        "__fadd_rn(__fmul_rn(float(total), both), bias)",
        "__fmaf_rn(float(total), both, bias)",
    ),
    (
        "floats",
        FEW,
        LINEAR,
        "of_rows[16 * m + 8 * i + threadIdx.x % 32 / 4]",
        "of_rows[16 * m + threadIdx.x % 32 / 4]",
    ),
    ("floats", MANY, LINEAR, "of_rows[16 * m + 8 * i", "of_rows[8 * m + 8 * i"),
    ("floats", FEW, LINEAR, "rows[m][i >> 1], i & 1", "rows[m][i & 1], i & 1"),
    ("groups", FEW, LINEAR, "i & 1 ? both.y : both.x", "both.x"),
    ("groups", MANY, LINEAR, "if constexpr (K::GROUPED) both =", "if constexpr (false) both ="),
    ("floats", FEW, LINEAR, "tile + 16 * TILES * ROW_BYTES", "tile + 8 * TILES * ROW_BYTES"),
    ("floats", FEW, LINEAR, "lane < Few<K>::ROWS && first + lane < p.m", "lane < Few<K>::ROWS"),
    ("floats", FEW, LINEAR, "lane < Few<K>::ROWS && first + lane < p.m", "lane < 8 && first + lane < p.m"),
    ("floats", FEW, LINEAR, "scales + i64(step / ROW_GROUP_STEPS) * p.m", "scales + i64(step) * p.m"),
    (
        "floats",
        FEW,
        LINEAR,
        "static_cast<const float*>(p.x_scales) + first + lane;",
        "static_cast<const float*>(p.x_scales) + lane;",
    ),
    ("floats", MANY, LINEAR, "i64(step / ROW_GROUP_STEPS) * p.m + min", "i64(step) * p.m + min"),
    ("floats", MANY, LINEAR, "min(first + int(threadIdx.x), p.m - 1)", "(first + int(threadIdx.x))"),
    ("floats", MANY, LINEAR, "if (threadIdx.x < Many::ROWS) {", "if (threadIdx.x < Many::ROWS / 2) {"),
    ("floats", MANY, LINEAR, "ROW_SCALED ? int(sizeof(float)) : 0", "0"),
    # Copies and barriers.
    ("groups", FEW, LINEAR, "        __syncwarp();  // the step is there", "        // the step is there"),
    ("groups", FEW, LINEAR, "K::PAIRS ? 3 :", "K::PAIRS ? 4 :"),
    (
        "floats",
        MANY,
        LINEAR,
        "        __syncthreads();  // the step is there",
        "        // the step is there",
    ),
    ("floats", MANY, LINEAR, "== step + 1) totals.take", "== step) totals.take"),
    ("floats", MANY, LINEAR, "== step + 1) totals", "== step + 1 && slice % 2) totals"),
]


def run(kind: str, count: int | str, launcher: EmulatedLauncher) -> None:
    launcher = replace(launcher, capability=ADA)
    if isinstance(count, int):
        check(WEIGHTS[kind], count, launcher)
    elif count == ROWS:
        for dtype in (BF16, FP16):
            checks.test_rows_are_rounded_as_the_reference_does(launcher, dtype)
    else:
        checks.test_what_is_not_finite_stays_in_its_row(launcher)


@pytest.fixture(scope="module")
def right() -> None:
    """Without a fault every check passes, in every order of threads."""
    for order in ORDERS:
        for kind in WEIGHTS:
            for count in (FEW, MANY):
                run(kind, count, EmulatedLauncher(order))
        for what in (ROWS, NAN):
            run("", what, EmulatedLauncher(order))


@pytest.mark.planted_faults
@pytest.mark.parametrize(
    ("kind", "count", "file", "old", "new"),
    FAULTS,
    ids=lambda value: str(value).strip()[:40] if value else "nothing",
)
def test_faults_are_caught(
    right: None, catch: Callable[..., None], kind: str, count: int | str, file: str, old: str, new: str
) -> None:
    catch(functools.partial(run, kind, count), Edit(file, old, new))


def test_every_fault_is_in_the_source() -> None:
    """Once: what a change of the source moved is noticed before the faults are planted."""
    texts = dict(read_source(OF_ROWS)) | dict(read_source(SOURCE))
    assert [old for _, _, file, old, _ in FAULTS if texts[file].count(old) != 1] == []
