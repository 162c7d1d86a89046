"""Faults planted in products with integers: every fault must change a result or be reported by the emulation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from pagewire.kernels.cuda.linear import _kind, _launches, variant
from pagewire.kernels.cuda.source import read_source
from pagewire.kernels.data.integers import Integers
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher
from tests.kernels.cuda.emulate.library import load_all
from tests.kernels.cuda.linear.test_linear import (
    BF16,
    FP16,
    FP32,
    TABLE,
    check,
    check_unpacked,
    make_bias,
    make_floats,
    make_linear,
    make_rows_of_x,
    make_weight,
    multiply,
)

pytestmark = pytest.mark.usefixtures("many_from_65_rows_on")

FEW, MANY, UNPACKED = 21, 85, 192
"""Rows: the last tile of no kernel for packed weights is full."""
WEIGHTS = {
    "halves": make_weight(Integers(4, 64, 0), 150, 2624, BF16, FP16, True),
    "fine": make_weight(Integers(4, 16, 8), 74, 1088, FP16, BF16, True),
    "table": make_weight(Integers(4, 32, 130, TABLE), 75, 640, BF16, FP16, False),
    "bytes": make_weight(Integers(8, None, 128), 75, 1056, FP16, FP32, False),
    "floats": make_floats(None, 75, 1088, FP16),
    "float groups": make_floats(64, 75, 1856, BF16),
    "wide": make_weight(Integers(8, 32, 100), 75, 1856, BF16, BF16, True),
}
"""Of every way in which codes become numbers and scales are applied. Some slices have more steps than stages, and
one weight has an odd number of steps."""


def check_all(kind: str, count: int, launcher: EmulatedLauncher) -> None:
    weight = WEIGHTS[kind]
    if count == UNPACKED:
        check_unpacked(make_linear(launcher, weight), weight)
        return
    x, bias = make_rows_of_x(count, weight.shape[1], weight.dtype), make_bias(weight)
    layer = make_linear(launcher, weight, bias)
    result = multiply(layer, x)
    check(weight, x, result, bias)
    if count == FEW:
        layer.few = layer.many
    assert torch.equal(multiply(layer, x[:FEW]), result[:FEW])  # by the other kernel


LINEAR, WAIT = "linear.cuh", "wait_for_copies<STAGES - %d>();\n        "
UNPACKING = "linear.cu"
FAULTS = [
    # Copies and barriers.
    ("halves", FEW, "        wait_for_copies<STAGES - 2>();\n        __syncwarp();", "        __syncwarp();"),
    ("halves", FEW, f"{WAIT % 2}__syncwarp", f"{WAIT % 1}__syncwarp"),
    ("halves", FEW, "        __syncwarp();  // the step is there", "        // the step is there"),
    ("halves", FEW, "    __syncthreads();  // the stages are read", "    // the stages are read"),
    ("halves", FEW, "        }\n    __syncthreads();\n    for (int row", "        }\n    for (int row"),
    (
        "halves",
        FEW,
        "        copy(step + STAGES - 1);\n        Rows<1>",
        "        copy(step + STAGES);\n        Rows<1>",
    ),
    ("wide", FEW, "stage == STAGES - 1 ?", "stage == STAGES - 2 ?"),
    ("halves", MANY, f"{WAIT % 2}__syncthreads", f"{WAIT % 1}__syncthreads"),
    ("halves", MANY, "        __syncthreads();  // the step is there", "        // the step is there"),
    (
        "wide",
        MANY,
        "        copy(step + STAGES - 1);\n        Rows<TILES>",
        "        copy(step + STAGES);\n        Rows<TILES>",
    ),
    ("halves", MANY, "CHUNK_BYTES, row, chunk)", "CHUNK_BYTES, row, chunk & 2)"),
    # Codes.
    ("halves", FEW, "and_or(word >> 4 * pair,", "and_or(word >> 4 * (pair ^ 1),"),
    ("fine", FEW, "and_or(word >> 4 * pair,", "and_or(word >> 4 * (pair ^ 2),"),
    ("halves", FEW, "0x43004300u : 0x64006400u;", "0x43804380u : 0x64006400u;"),
    ("fine", FEW, "(BASE | 0x80008000u) + zero * 0x10001u", "(BASE | 0x80008000u) + zero"),
    ("bytes", FEW, "0xe400e400u + zero * 0x10001u", "0xe400e400u + zero"),
    ("bytes", FEW, "permute_bytes(bytes, 0x64646464u, 0x4342)", "permute_bytes(bytes, 0x64646464u, 0x4243)"),
    ("wide", FEW, "8388608.0f + float(zero)", "8388608.0f"),
    ("wide", FEW, "permute_bytes(bits[2], bits[3], 0x7632)", "permute_bytes(bits[2], bits[3], 0x3276)"),
    ("bytes", FEW, "words[half][j], p.zero", "words[0][j], p.zero"),
    ("table", FEW, "words[0][j] >> 16 * half", "words[0][j] >> 8 * half"),
    (
        "table",
        FEW,
        "u32(p.high_values), u32(p.high_values >> 32)",
        "u32(p.low_values), u32(p.high_values >> 32)",
    ),
    ("table", FEW, "codes & 0x8888u) >> 1", "codes & 0x8880u) >> 1"),
    ("floats", FEW, "? 0x7b80 : 0x5c00", "? 0x7b80 : 0x5800"),
    ("float groups", FEW, "? 0x7b80 : 0x5c00", "? 0x7b00 : 0x5c00"),
    ("floats", FEW, "(word << 8 & SIGNS)", "(word & SIGNS)"),
    ("floats", FEW, "word >> (8 - UP) & MAGNITUDES", "word >> UP & MAGNITUDES"),
    ("floats", FEW, "(0x7fu << UP)", "(0x7eu << UP)"),
    (
        "float groups",
        MANY,
        "widen_floats<typename K::T>(words[half][j]",
        "widen_floats<typename K::T>(words[0][j]",
    ),
    # Scales and offsets.
    ("float groups", FEW, "j % 2 ? two.w : two.y", "j % 2 ? two.y : two.w"),
    ("float groups", FEW, "chunks[j / 2]", "chunks[j % 2]"),
    ("float groups", MANY, "[CHUNKS * (threadIdx.x % 4) + i]", "[threadIdx.x % 4 + i]"),
    ("halves", FEW, "step >> p.group_shift", "step"),
    ("halves", FEW, "i64(block) * p.groups * K::GROUP_BYTES + ", ""),
    ("fine", FEW, "* K::SCALE_BYTES, true);", "* K::GROUP_BYTES, true);"),
    ("fine", FEW, "scales + K::SCALE_BYTES / 2, codes", "scales, codes"),
    ("fine", FEW, "add_span<K, 1, 2, TILES>", "add_span<K, 0, 1, TILES>"),
    ("halves", FEW, "16 * (lane % CHUNKS);", "16 * lane;"),
    ("halves", FEW, "lane < CHUNKS ? p.scales : p.offsets", "lane <= CHUNKS ? p.scales : p.offsets"),
    ("halves", FEW, "offsets(scales + K::SCALE_BYTES)", "offsets(scales)"),
    ("halves", FEW, "if (!p.offsets) return;", "return;"),
    ("halves", FEW, "i & 1 ? factors.y : factors.x", "i & 2 ? factors.y : factors.x"),
    ("fine", FEW, "0x3f803f80u : 0x3c003c00u", "0x3f803f80u : 0x3c000000u"),
    (
        "bytes",
        FEW,
        "const float*>(p.scales)[output]",
        "const float*>(p.scales)[0]",
    ),
    # Orders of sums.
    ("halves", FEW, "(slice * Few<K>::ROWS + row)", "((SLICES - 1 - slice) * Few<K>::ROWS + row)"),
    ("bytes", FEW, "(slice * Few<K>::ROWS + row)", "((slice ^ 1) * Few<K>::ROWS + row)"),
    ("fine", MANY, "== step + 1) totals", "== step + 1 && slice % 2) totals"),
    ("bytes", MANY, "slice_begin(p, slice + 1) == step + 1", "step % 8 == 7 || step + 1 == p.steps"),
    # Rows, outputs and slices.
    ("halves", FEW, "first + lane / 4 + 8 * i;", "first + lane / 4 + 4 * i;"),
    ("halves", FEW, "from[i] + 32 * step,", "from[i] + 16 * step,"),
    ("halves", FEW, "8 * (lane % 4) : nullptr;", "4 * (lane % 4) : nullptr;"),
    ("halves", FEW, "if (row >= p.m || output >= p.n) return;", "if (row >= p.m) return;"),
    ("halves", FEW, "tile + place + 8 * i * ROW_BYTES", "tile + place + 4 * i * ROW_BYTES"),
    ("halves", FEW, "return slice * p.steps / SLICES;", "return slice * (p.steps / SLICES);"),
    (
        "halves",
        FEW,
        "int slice = 0; slice < SLICES; slice++",
        "int slice = 1; slice < SLICES; slice++",
    ),
    ("halves", FEW, "8 * (i >> 1);\n", "8 * (i & 1);\n"),
    ("halves", FEW, "row += SLICES) {", "row += 2 * SLICES) {"),
    ("halves", FEW, "p.bias ? to_float", "false ? to_float"),
    ("halves", MANY, "source(min(first + row, p.m - 1))", "source(first + row)"),
    ("halves", MANY, "i * APART * ROW_BYTES", "i * APART / 2 * ROW_BYTES"),
    ("bytes", MANY, "rows[i] + 32 * step", "rows[i] + 16 * step"),
    ("wide", MANY, "threadIdx.x / CHUNKS + i * APART;", "threadIdx.x / CHUNKS + i;"),
    ("halves", MANY, "min(block, (p.n - 1) / OUTPUTS)", "block"),
    ("halves", MANY, "} else if (row < p.m && output < p.n) {", "} else if (output < p.n) {"),
    ("halves", MANY, "} else if (row < p.m && output < p.n) {", "} else if (row < p.m) {"),
    ("bytes", MANY, "if (row >= p.m || output >= p.n) return;", "if (output >= p.n) return;"),
    ("bytes", MANY, "store<K>(p, row, output + 1, second);", ""),
    ("fine", MANY, "finished<K>(p, row, output + 1, second));", "finished<K>(p, row, output, second));"),
    ("halves", MANY, "== step + 1) totals.take", "== step) totals.take"),
    ("halves", MANY, "sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;", ""),
    ("wide", MANY, "16 * m + lane % 16, 2 * half", "16 * m + lane % 8, 2 * half"),
    ("wide", MANY, "2 * half + lane / 16", "2 * half + lane / 8 % 2"),
    ("halves", UNPACKED, "words[q] : words[q + bit]", "words[q + bit] : words[q]"),
    ("halves", UNPACKED, "bit < 4; bit *= 2", "bit < 2; bit *= 2"),
    ("halves", UNPACKED, "if (q & bit) continue;", ""),
    ("halves", UNPACKED, "if (step >= p.steps) return;", ""),
    ("halves", UNPACKED, "(step >> p.group_shift) * K::SPANS", "step * K::SPANS"),
    ("fine", UNPACKED, "(step >> p.group_shift) * K::SPANS", "(step >> p.group_shift)"),
    ("fine", UNPACKED, "K::SPANS == 2 ? OUTPUTS * half : 0", "0"),
    ("halves", UNPACKED, "8 * (g / 2) + g % 2", "8 * (g % 2) + g / 2"),
    ("halves", UNPACKED, "+ 2 * j;", "+ j;"),
    ("halves", UNPACKED, "if (p.offsets) offset =", "if (false) offset ="),
    (
        "bytes",
        UNPACKED,
        "static_cast<const float*>(p.scales)[output]",
        "static_cast<const float*>(p.scales)[0]",
    ),
    ("table", UNPACKED, "words[2 * half + i]", "words[half + 2 * i]"),
    ("floats", UNPACKED, "        if (output < p.n)\n", ""),
    ("float groups", UNPACKED, "__fmaf_rn(two.x, scale, offset)", "two.x"),
]


def file_of(count: int) -> str:
    """The file in which faults are planted that checks with this number of rows find."""
    return UNPACKING if count == UNPACKED else LINEAR


@pytest.fixture(scope="module")
def right() -> None:
    """Without a fault every check passes, in every order of threads."""
    for kind in WEIGHTS:
        for count in (FEW, MANY, UNPACKED):
            for order in ORDERS:
                check_all(kind, count, EmulatedLauncher(order))


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels with their faults, compiled several at a time: the compiler is a process of its own."""
    faulty = []
    for kind, count, old, new in FAULTS:
        few, many = _launches(WEIGHTS[kind])
        unpacked = variant("unpacked", *_kind(WEIGHTS[kind])[0])
        kernel = {FEW: few.kernel, MANY: many.kernel, UNPACKED: unpacked}[count]
        faulty.append((kernel, Edit(file_of(count), old, new)))
    load_all(faulty)


@pytest.mark.planted_faults
@pytest.mark.parametrize(
    ("kind", "count", "old", "new"), FAULTS, ids=lambda value: str(value).strip()[:40] if value else "nothing"
)
def test_faults_are_caught(
    right: None, compiled: None, catch: Callable[..., None], kind: str, count: int, old: str, new: str
) -> None:
    catch(functools.partial(check_all, kind, count), Edit(file_of(count), old, new))


def test_every_fault_is_in_the_source() -> None:
    """Once: what a change of the source moved is noticed before the faults are planted."""
    texts = dict(read_source(UNPACKING))
    assert [old for _, count, old, _ in FAULTS if texts[file_of(count)].count(old) != 1] == []
