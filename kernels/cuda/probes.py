"""Probes of what the kernels rely on, one thing at a time, each against plain arithmetic on the CPU, to the bit.

Where a kernel gives wrong results on a device, they tell why: the place of elements in fragments of tensor cores,
subnormal numbers, products that a compiler fused with sums, conversions of 8-bit floats, large shared memory.
`pagewire doctor` runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.cuda.kv import FP8
from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant

SOURCE = "probes.cu"
THREADS = 128
FILLED_BYTES = 96 << 10
"""Of shared memory: as much as attention takes with heads of 128 or 256 elements."""


@functools.cache
def variant(kernel: str, parameters: str, of: str = "") -> Variant:
    """A kernel of this source, or the instance of a template for a type."""
    return Variant(SOURCE, f"{kernel}<{of}>" if of else kernel, parameters)


def variants() -> list[Variant]:
    """All kernels of this source."""
    return [
        *(variant("multiply_fragments", "Product", of) for of in DTYPES.values()),
        *(variant("convert", "Convert", of) for of in FP8.values()),
        *(variant("widen_all", "Widen", of) for of in FP8.values()),
        variant("compute_exactly", "Arithmetic"),
        variant("fill_shared", "Fill"),
    ]


def why_fragments_differ(launcher: KernelLauncher, on: torch.device) -> str:
    """Why products of tensor cores are not those of plain loops; empty if they are.

    The numbers are small integers, so all sums are exact, and one element in another place changes the result.
    """
    rng = np.random.default_rng(0)
    left, right = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (16, 8))
    expected = [
        [sum(int(left[i, k]) * int(right[k, j]) for k in range(16)) for j in range(8)] for i in range(16)
    ]
    ways = ("ldmatrix.trans of two matrices", "ldmatrix.trans of four", "ldmatrix of two")
    for dtype, name in DTYPES.items():
        a, b = (torch.from_numpy(x).to(dtype).to(on) for x in (left, right))
        out = torch.full((3, 16, 8), torch.nan, device=on)
        kernel = variant("multiply_fragments", "Product", name)
        launcher.launch(kernel, (1,), (32,), pack(kernel, a=a, b=b, out=out), 2048)
        for way, product in zip(ways, out.tolist(), strict=True):
            if product != expected:
                return f"a product of {name} by tensor cores has elements in other places, with {way}"
    return ""


def why_arithmetic_differs(launcher: KernelLauncher, on: torch.device) -> str:
    """Why arithmetic is not rounded after each operation, subnormal numbers kept; empty if it is."""
    rng = np.random.default_rng(0)
    special = [0.0, 1.0, -1.0, 1.5, 1e-38, -1e-38, 1e-40, 1e-45, 1 + 2**-12, 1 + 2**-23, 3e38, 12582912.0]
    x, y = (grid.ravel() for grid in np.meshgrid(*2 * [np.array(special, np.float32)]))
    scale = np.exp2(rng.integers(-20, 20, (2, 4096))).astype(np.float32)
    random = rng.standard_normal((2, 4096)).astype(np.float32) * scale
    x, y = np.concatenate([x, random[0]]), np.concatenate([y, random[1]])
    count = len(x)
    tensors = {"x": torch.from_numpy(x).to(on), "y": torch.from_numpy(y).to(on)}
    tensors["out"] = torch.full((5, count), torch.nan, device=on)
    tensors["wide"] = torch.full((2, count), torch.nan, dtype=torch.float64, device=on)
    tensors["high"] = torch.zeros(count, dtype=torch.int64, device=on)
    kernel = variant("compute_exactly", "Arithmetic")
    grid = (-(-count // THREADS),)
    launcher.launch(kernel, grid, (THREADS,), pack(kernel, **tensors, count=count))
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64) * y.astype(np.float64)
        expected = {
            "a sum": x + y,
            "a difference": x - y,
            "a product": x * y,
            "a quotient": x / y,
            "a product and then a sum (they were fused)": x * y + x,
            "a product of float64": wide,
            "a float64 rounded up": np.ceil(wide),
        }
    bits = [int(a) * int(b) >> 4 for a, b in zip(x.view(np.uint32), y.view(np.uint32), strict=True)]
    results = [*tensors["out"].cpu().numpy(), *tensors["wide"].cpu().numpy()]
    for (name, right), result in zip(expected.items(), results, strict=True):
        wrong = ~(
            (right == result) & (np.signbit(right) == np.signbit(result))
            | (np.isnan(right) & np.isnan(result))
        )
        if wrong.any():
            i = int(wrong.argmax())
            return f"{name} differs: of {x[i]:g} and {y[i]:g} it is {result[i]:g}, not {right[i]:g}"
    return "" if tensors["high"].tolist() == bits else "the high half of a product of integers differs"


def why_conversions_differ(launcher: KernelLauncher, on: torch.device) -> str:
    """Why 8-bit floats are not converted as PyTorch does it on the CPU; empty if they are."""
    codes = torch.arange(256).to(torch.uint8)
    for dtype, name in FP8.items():
        exact = codes.view(dtype).float()
        out, widen = torch.full((5, 256), torch.nan, device=on), variant("widen_all", "Widen", name)
        launcher.launch(widen, (1,), (256,), pack(widen, x=codes.to(on), out=out))
        usual = exact.isfinite()  # attention has no codes of infinity and NaN
        if not (_equal(out[:3], exact) and _equal(out[3:, usual], exact[usual])):
            return f"numbers of {name} are not widened exactly"
        x = rounded_numbers(exact)
        narrowed, convert = (
            torch.zeros(len(x), dtype=torch.uint8, device=on),
            variant("convert", "Convert", name),
        )
        launcher.launch(
            convert,
            (-(-len(x) // THREADS),),
            (THREADS,),
            pack(convert, x=x.to(on), out=narrowed, count=len(x)),
        )
        largest = torch.finfo(dtype).max
        if not torch.equal(narrowed.cpu(), x.clamp(-largest, largest).to(dtype).view(torch.uint8)):
            return f"numbers are not rounded to {name} to nearest even, with the largest for what is larger"
    return ""


def _equal(results: Tensor, exact: Tensor) -> bool:
    """True if every row has these numbers, NaN included."""
    return torch.allclose(results.cpu(), exact.expand_as(results), rtol=0, atol=0, equal_nan=True)


def rounded_numbers(exact: Tensor) -> Tensor:
    """Numbers that are hard to round: of a type's own, halfway between two, just beside that, and beyond.

    exact: float32 [n], all numbers of the type.
    """
    exact = exact[exact.isfinite()].sort().values
    halfway = (exact[1:].double() + exact[:-1].double()).div(2).float()
    beside = [torch.nextafter(halfway, torch.tensor(to)) for to in (1e9, -1e9)]
    special = torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf, 1e-40, -1e-40])
    return torch.cat([exact, halfway, *beside, special])


def why_shared_memory_fails(launcher: KernelLauncher, on: torch.device) -> str:
    """Why a block cannot use as much shared memory as attention needs; empty if it can."""
    words = FILLED_BYTES // 4
    out, kernel = torch.zeros(8, dtype=torch.int32, device=on), variant("fill_shared", "Fill")
    launcher.launch(kernel, (8,), (256,), pack(kernel, out=out, words=words), FILLED_BYTES)
    expected = words * (words - 1) // 2 % 2**32
    right = all(number % 2**32 == expected for number in out.tolist())
    return "" if right else f"{FILLED_BYTES} bytes of shared memory do not keep what is written"


PROBES: dict[str, Callable[[KernelLauncher, torch.device], str]] = {
    "fragments of tensor cores": why_fragments_differ,
    "arithmetic": why_arithmetic_differs,
    "8-bit floats": why_conversions_differ,
    "shared memory": why_shared_memory_fails,
}
