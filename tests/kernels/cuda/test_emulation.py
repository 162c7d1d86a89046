"""The emulation computes what a device computes, and reports errors that a device would not report."""

from pathlib import Path

import pytest
import torch

from pagewire.kernels.cuda.launch import pack
from pagewire.kernels.cuda.source import Variant
from tests.kernels.cuda.emulate import ORDERS, EmulatedLauncher, EmulationError, guarded

PROBE = str(Path(__file__).parent / "emulate" / "probe.cu")
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ALL_BYTES = torch.arange(256).to(torch.uint8)


def probe(name: str, parameters: str) -> Variant:
    return Variant(PROBE, name, parameters)


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_is_widened_exactly(name: str) -> None:
    variant, out = probe(f"widen_all<{name}>", "Widen"), torch.empty(3, 256)
    EmulatedLauncher().launch(variant, (1,), (256,), pack(variant, x=ALL_BYTES, out=out))
    expected = ALL_BYTES.view(FP8[name]).float().expand(3, 256)
    assert torch.equal(out.nan_to_num(1e9, 2e9, -2e9), expected.nan_to_num(1e9, 2e9, -2e9))


@pytest.mark.parametrize("name", FP8)
def test_rounding_to_fp8_is_torchs_with_saturation(name: str) -> None:
    dtype, variant = FP8[name], probe(f"convert<{name}>", "Convert")
    exact = ALL_BYTES.view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    halfway = (exact[1:].double() + exact[:-1].double()).div(2).float()
    around = torch.cat([exact, halfway, *(torch.nextafter(halfway, torch.tensor(s)) for s in (1e9, -1e9))])
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(4096, generator=generator) * torch.exp2(
        torch.randint(-30, 20, (4096,), generator=generator)
    )
    special = torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf, 1e-40, -1e-40])
    x = torch.cat([around, random, special])
    out = torch.empty(len(x), dtype=torch.uint8)
    EmulatedLauncher().launch(
        variant, (-(-len(x) // 128),), (128,), pack(variant, x=x, out=out, count=len(x))
    )
    largest = torch.finfo(dtype).max
    assert torch.equal(out, x.clamp(-largest, largest).to(dtype).view(torch.uint8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_product_of_tensor_cores(order: tuple[int, int], name: str, dtype: torch.dtype) -> None:
    a, b, out = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.full((16, 8), torch.nan)
    variant = probe(f"product<{name}>", "Product")
    EmulatedLauncher(order).launch(variant, (1,), (32,), pack(variant, a=a, b=b, out=out), 1024)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("DEADLOCK", r"deadlock in block \(0, 0, 0\): thread 0 at __syncthreads"),
        ("MASK", "lane 16 is not in its mask 0000ffff"),
        ("MISALIGNED", "cp.async: .* is not aligned to 16"),
        ("UNMAPPED", "thread 0: no memory at 0x1000"),
        ("TOO_MUCH_SHARED", "no memory at"),
    ],
)
def test_errors_of_kernels_are_reported(failure: str, message: str) -> None:
    variant, out = probe(f"fail<{failure}>", "Fail"), torch.zeros(64, dtype=torch.int32)
    for _ in range(2):  # an error leaves the emulation usable
        with pytest.raises(EmulationError, match=message):
            EmulatedLauncher().launch(variant, (1,), (64,), pack(variant, out=out), 256)


def test_shared_memory_starts_as_nan() -> None:
    variant, out = probe("fail<UNSET>", "Fail"), torch.zeros(64, dtype=torch.int32)
    EmulatedLauncher().launch(variant, (1,), (64,), pack(variant, out=out), 256)
    assert out.view(torch.float32).isnan().all()


def test_an_access_beyond_a_guarded_tensor_is_reported() -> None:
    variant, x = probe("convert<e4m3>", "Convert"), guarded(torch.ones(64))
    out = torch.empty(128, dtype=torch.uint8)
    EmulatedLauncher().launch(variant, (1,), (128,), pack(variant, x=x, out=out, count=64))
    with pytest.raises(EmulationError, match="thread 64: no memory"):
        EmulatedLauncher().launch(variant, (1,), (128,), pack(variant, x=x, out=out, count=65))
