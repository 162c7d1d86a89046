"""The probes pass on the emulated device, and name what is wrong with another one."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.cuda.probes import PROBES
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PROBES)
def test_the_emulation_passes(name: str) -> None:
    for order in ORDERS:
        assert PROBES[name](EmulatedLauncher(order), CPU) == ""


FRAGMENTS, ARITHMETIC, FLOATS = "fragments of tensor cores", "arithmetic", "8-bit floats"
OTHER_PLACES = "has elements in other places, with ldmatrix"
DEVICES = [
    # Another place of elements in a fragment: of the result, of the factors, of matrices in shared memory.
    (
        FRAGMENTS,
        Edit(
            "ptx.cuh",
            "column = 2 * t + (i & 1);\n        for (int k = 0; k < 16; k++)",
            "column = t + 4 * (i & 1);\n        for (int k = 0; k < 16; k++)",
        ),
        OTHER_PLACES,
    ),
    (
        FRAGMENTS,
        Edit("ptx.cuh", "(row >> 3) + 2 * (k >> 3), k & 1)", "2 * (row >> 3) + (k >> 3), k & 1)"),
        OTHER_PLACES,
    ),
    (FRAGMENTS, Edit("ptx.cuh", "4 + (k >> 3), k & 1)", "5 - (k >> 3), k & 1)"), OTHER_PLACES),
    (
        FRAGMENTS,
        Edit("ptx.cuh", "r = TRANSPOSED ? 2 * t + j : group", "r = TRANSPOSED ? t + 4 * j : group"),
        OTHER_PLACES,
    ),
    (FRAGMENTS, Edit("ptx.cuh", "memset(copy.target, 0, copy.bytes);", ""), OTHER_PLACES),
    # Subnormal numbers become zeros; a product is fused with a sum.
    (
        ARITHMETIC,
        Edit(
            "exact.cuh",
            "float b) { return a + b; }",
            "float b) { return std::fabs(a + b) < 1.2e-38f ? 0.0f : a + b; }",
        ),
        "a sum differs",
    ),
    (
        ARITHMETIC,
        Edit(
            "exact.cuh",
            "float b) { return a * b; }",
            "float b) { return std::fabs(a * b) < 1.2e-38f ? 0.0f : a * b; }",
        ),
        "a product differs",
    ),
    (
        ARITHMETIC,
        Edit("probes.cu", "add_exact(multiply_exact(x, y), x)", "__fmaf_rn(x, y, x)"),
        "a product and then a sum (they were fused) differs",
    ),
    (ARITHMETIC, Edit("exact.cuh", "std::ceil(a)", "std::nearbyint(a)"), "a float64 rounded up differs"),
    (ARITHMETIC, Edit("exact.cuh", "a * b >> 64", "a * b >> 63"), "the high half"),
    (
        FLOATS,
        Edit(
            "ptx.cuh",
            "return pack<T>(a.x * b.x, a.y * b.y);",
            "return pack<T>(std::fabs(a.x) < 1.2e-38f ? 0.0f : a.x * b.x, a.y * b.y);",
        ),
        "e4m3 are not widened exactly",
    ),
    (FLOATS, Edit("ptx.cuh", "- 1 + (magnitude >> CUT & 1);", ";"), "not rounded to e4m3 to nearest even"),
    (
        "shared memory",
        Edit("probes.cu", "words[i] = i;", "words[i % 12288] = i;"),
        "98304 bytes of shared memory do not keep",
    ),
]


@pytest.mark.planted_faults
@pytest.mark.parametrize(("name", "edit", "message"), DEVICES)
def test_another_device_is_named(name: str, edit: Edit, message: str) -> None:
    """Faults are planted in what stands for the instructions of a device."""
    assert message in PROBES[name](EmulatedLauncher(edits=(edit,)), CPU)
