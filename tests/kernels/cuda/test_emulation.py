"""The emulation computes what a device computes, and reports errors that a device would not report."""

from pathlib import Path

import pytest
import torch

from pagewire.kernels.cuda import probes
from pagewire.kernels.cuda.launch import pack
from pagewire.kernels.cuda.source import Variant
from tests.kernels.cuda.emulate import EmulatedLauncher, EmulationError, guarded

PROBE = str(Path(__file__).parent / "emulate" / "probe.cu")


def probe(name: str, parameters: str) -> Variant:
    return Variant(PROBE, name, parameters)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("DEADLOCK", r"deadlock in block \(0, 0, 0\): thread 0 at __syncthreads"),
        ("MASK", "lane 16 is not in its mask 0000ffff"),
        ("MISALIGNED", "cp.async: .* is not aligned to 16"),
        ("UNMAPPED", "thread 0: no memory at 0x1000"),
        ("MISALIGNED_LOAD", "thread 0: a misaligned access"),
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
    variant, x = probes.variant("convert", "Convert", "e4m3"), guarded(torch.ones(64))
    out = torch.empty(128, dtype=torch.uint8)
    EmulatedLauncher().launch(variant, (1,), (128,), pack(variant, x=x, out=out, count=64))
    with pytest.raises(EmulationError, match="thread 64: no memory"):
        EmulatedLauncher().launch(variant, (1,), (128,), pack(variant, x=x, out=out, count=65))
