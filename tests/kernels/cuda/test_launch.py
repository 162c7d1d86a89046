"""Launches up to the driver's calls, which a fake driver records."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.kernels.cuda import compile, gates, kv, launch, norms
from pagewire.kernels.cuda.launch import CudaLauncher, pack
from pagewire.kernels.cuda.limits import check_launch
from pagewire.kernels.cuda.source import Variant, parameter_dtype, read_source
from pagewire.kernels.cuda.variants import all_variants
from pagewire.kernels.data.layer import Activation
from tests.kernels.cuda.emulate import EmulatedLauncher, EmulationError


@dataclass
class Recorder:
    """A driver that loads nothing and records its calls."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    fails: bool = False

    def load(self, image: bytes, symbol: str) -> launch.Function:
        self.calls.append(("load", symbol))

        def function(*arguments: Any) -> None:
            self.calls.append((symbol, arguments))
            if self.fails:
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE")

        return function

    def allow_shared(self, function: launch.Function, num_bytes: int) -> None:
        self.calls.append(("allow_shared", num_bytes))

    def most_shared(self) -> int:
        return 227 << 10

    def stream(self) -> str:
        return "torch's stream"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def launcher(nvrtc: object, recorder: Recorder) -> CudaLauncher:
    return CudaLauncher((9, 0), 132, recorder)


def test_a_launch_arrives_with_its_parameters(launcher: CudaLauncher, recorder: Recorder) -> None:
    x, weight = torch.randn(5, 256).bfloat16(), torch.randn(256).bfloat16()
    out = norms.rms_norm(launcher, x, weight, 1e-5, offset=1.0)
    (loaded, symbol), (launched, arguments) = recorder.calls
    assert loaded == "load" and launched == symbol and "rms_norm" in symbol
    grid, block, (parameters,), shared_bytes, stream = arguments
    assert (grid, block, shared_bytes, stream) == ((5,), (32,), 0, "torch's stream")
    assert parameters.dtype.names is None and parameters.size == 1
    row = parameters.view(parameter_dtype("norms.cu", "RmsNorm"))[0]
    assert [row[name] for name in ("x", "weight", "out")] == [t.data_ptr() for t in (x, weight, out)]
    assert row["residual"] == 0 and row["size"] == 256 and row["inner"] == 5
    assert row["eps"] == np.float32(1e-5) and row["offset"] == 1.0


def test_a_kernel_is_loaded_once(launcher: CudaLauncher, recorder: Recorder) -> None:
    x = torch.randn(4, 64).half()
    for _ in range(3):
        gates.activate_and_mul(launcher, x, Activation.SILU)
    gates.activate_and_mul(launcher, x, Activation.GELU)
    assert [name for name, _ in recorder.calls].count("load") == 2
    assert len(recorder.calls) == 6


def test_loading_ahead_leaves_only_launches(launcher: CudaLauncher, recorder: Recorder) -> None:
    done: list[tuple[int, int]] = []
    launcher.load(gates.variants(), lambda *call: done.append(call[:2]))
    assert len(recorder.calls) == len(gates.variants()) == len(done)
    launcher.load(gates.variants())
    for dtype in (torch.float16, torch.bfloat16):
        for activation in gates.ACTIVATIONS:
            gates.activate_and_mul(launcher, torch.zeros(1, 16, dtype=dtype), activation)
    assert [name for name, _ in recorder.calls].count("load") == len(gates.variants())


def test_a_larger_limit_of_shared_memory_is_set_once(launcher: CudaLauncher, recorder: Recorder) -> None:
    variant = gates.variants()[0]
    parameters = pack(variant, x=None, out=None, row_stride=0, num_rows=0, size=8)
    for shared_bytes in (48 << 10, 100 << 10, 100 << 10, 64 << 10, 160 << 10):
        launcher.launch(variant, (1,), (32,), parameters, shared_bytes)
    assert [value for name, value in recorder.calls if name == "allow_shared"] == [100 << 10, 160 << 10]
    assert [value[3] for name, value in recorder.calls if "gate" in name] == [
        48 << 10, 100 << 10, 100 << 10, 64 << 10, 160 << 10,
    ]  # fmt: skip


def test_a_launch_that_a_device_cannot_run_names_the_kernel(
    launcher: CudaLauncher, recorder: Recorder
) -> None:
    variant = gates.variants()[0]
    parameters = pack(variant, x=None, out=None, row_stride=0, num_rows=0, size=8)
    for block, shared_bytes, message in (
        ((512,), 0, r"gate<bf16, SILU>: 512 threads in a block, but it is compiled for 256 at most"),
        ((32,), 228 << 10, r"gate<bf16, SILU>: 233472 bytes of shared memory, but the device has 232448"),
    ):
        with pytest.raises(launch.LaunchError, match=message):
            launcher.launch(variant, (1,), block, parameters, shared_bytes)
    recorder.fails = True
    with pytest.raises(launch.LaunchError, match=r"gate<bf16, SILU>, grid \(1,\), block \(32,\): CUDA_ERROR"):
        launcher.launch(variant, (1,), (32,), parameters)
    assert [name for name, _ in recorder.calls if "gate" in name] == [recorder.calls[-1][0]]


def test_registers_of_a_block() -> None:
    limits = {"bound": 0, "shared_bytes": 0, "most_shared_bytes": 0}
    check_launch("k", (1024,), registers=64, **limits)
    with pytest.raises(launch.LaunchError, match="k: 1000 threads of 65 registers, but a block has 65536"):
        check_launch("k", (500, 2), registers=65, **limits)


def test_the_architecture_follows_the_device(nvrtc: object, recorder: Recorder) -> None:
    assert CudaLauncher((8, 9), 58, recorder).arch == "sm_89"
    with pytest.raises(compile.CompileError, match=r"need compute capability 8\.0"):
        CudaLauncher((7, 0), 80, recorder)


def test_a_missing_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(launch.LaunchError, match="no device cuda:0"):
        CudaLauncher.at(0)


def test_fields_are_packed_by_name() -> None:
    variant = kv.variants()[0]
    with pytest.raises(TypeError, match=r"WriteKv: missing or unknown fields: .*k_cache.*nonsense"):
        pack(variant, nonsense=1)


def test_every_struct_has_the_same_size_in_c_and_in_numpy() -> None:
    """The emulation compares the size of the parameters with the struct's before it refuses so large a block."""
    for variant in {(v.source, v.parameters): v for v in all_variants()}.values():
        dtype = parameter_dtype(variant.source, variant.parameters)
        for num_structs, message in ((1, "threads per block"), (2, "the parameters have another size")):
            with pytest.raises(EmulationError, match=message):
                EmulatedLauncher().launch(variant, (1,), (2048,), np.zeros(num_structs, dtype))


STRUCTS = """
struct Good {
    const void* a;  // a pointer
    int b, c;       // two; with a semicolon
    float* __restrict__ d;
    u32 e; i64 f;
    const u64* g;
};
struct Bad {
    bool a;
};
"""


def test_structs_are_read_from_their_declaration(tmp_path: Path) -> None:
    source = tmp_path / "structs.cu"
    source.write_text(STRUCTS)
    dtype = parameter_dtype(str(source), "Good")
    assert dtype.names == tuple("abcdefg")
    assert [dtype.fields[name][1] for name in dtype.names] == [0, 8, 12, 16, 24, 32, 40]  # type: ignore[index]
    assert dtype.itemsize == 48
    with pytest.raises(ValueError, match="struct Bad: cannot pack a field of type 'bool'"):
        parameter_dtype(str(source), "Bad")
    with pytest.raises(ValueError, match="no struct Ugly is declared"):
        parameter_dtype(str(source), "Ugly")


def test_a_source_comes_with_its_includes() -> None:
    files = [name for name, _ in read_source("kv.cu")]
    assert files[0] == "kv.cu" and set(files) == {"kv.cu", "chunk.cuh", "layout.cuh", "ptx.cuh"}


def test_variants_name_structs_that_are_declared() -> None:
    for variant in all_variants():
        assert isinstance(variant, Variant)
        assert parameter_dtype(variant.source, variant.parameters).itemsize <= 4096
