"""`pagewire doctor`: check what models run on here, a GPU or the CPU, and print what to fix if they do not.

Where there is no NVIDIA GPU, nothing of CUDA is missing: then the CPU's kernels are checked.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pagewire.cli.commands import SUMMARIES, doctor_distributed
from pagewire.cli.console.parser import UsageError

if TYPE_CHECKING:
    from torch import Tensor

NVIDIA, DISPLAY = "0x10de", "0x03"  # a vendor, and the beginning of a class, of PCI
VERDICTS = {
    True: (
        "CUDA kernels can run here.",
        "CUDA kernels cannot run here: see FAIL above. Models still run on the CPU.",
    ),
    False: ("Models run on this CPU.", "Models run on this CPU, but slowly: see FAIL above."),
}
"""What is said at the end, if all is well and if not: of a machine with a GPU, and of one without."""
MARKS = {True: "ok", False: "FAIL", None: "-"}


class Finding(NamedTuple):
    """The result of one check."""

    good: bool | None
    """True: passed. False: failed. None: not required, or not tried."""
    text: str


class CheckError(Exception):
    """A check failed. The message says why, and what to do about it."""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help=SUMMARIES["doctor"],
        description="Where there is an NVIDIA GPU, check the driver, CuPy, NVRTC and CUDA's headers, compile a "
        "kernel and launch it on every GPU; else check the compiled kernels of the CPU. Exit status 0 if models "
        "can run so, else 1. With --distributed: check how workers exchange tensors, and measure latency and "
        "bandwidth.",
    )
    parser.add_argument("--cuda", action="store_true", help="check CUDA even if no NVIDIA GPU is found")
    group = parser.add_argument_group("Several workers")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="check shared memory, gloo and NCCL between processes instead",
    )
    group.add_argument(
        "--ranks", type=int, default=2, metavar="INT", help="number of processes (default: %(default)s)"
    )
    group.add_argument(
        "--at", metavar="HOST:PORT", help="check several machines: where rank 0 listens, the same for all"
    )
    group.add_argument("--rank", type=int, metavar="INT", help="check several machines: the rank of this one")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run all checks, print their results, and return 0 if none failed, else 1.

    Raises:
        UsageError: the options do not fit each other.
    """
    if options.distributed:
        return doctor_distributed.run(options)
    if options.at is not None or options.rank is not None:
        raise UsageError("--at and --rank need --distributed")
    on_gpu = options.cuda or has_gpu()
    results = []
    for name, check in (CHECKS if on_gpu else CPU_CHECKS).items():
        try:
            findings = list(check())
        except CheckError as error:
            findings = [Finding(False, str(error))]
        for finding in findings:
            first, *more = finding.text.splitlines()
            print(f"{MARKS[finding.good]:4}  {name:8}  {first}")
            for line in more:
                print(f"{'':16}{line}")
        results += findings
    healthy = all(finding.good is not False for finding in results)
    good, bad = VERDICTS[on_gpu]
    print(good if healthy else bad)
    return 0 if healthy else 1


def has_gpu() -> bool:
    """True if the system shows an NVIDIA GPU, with or without a driver."""
    if Path("/proc/driver/nvidia").exists() or any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    devices = Path("/sys/bus/pci/devices")
    return any(is_nvidia(device) for device in (devices.iterdir() if devices.is_dir() else ()))


def is_nvidia(device: Path) -> bool:
    """True for the folder in /sys of a PCI device that is a GPU of NVIDIA's."""
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == NVIDIA and kind.startswith(DISPLAY)


def check_cpu() -> Iterator[Finding]:
    """Say what the CPU has."""
    from pagewire.kernels.cpu.build import supported_instruction_sets
    from pagewire.workers.device.machine import machine_memory

    total, available = machine_memory(1)
    best, count = supported_instruction_sets()[0].name, len(os.sched_getaffinity(0))
    memory = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB are available"
    yield Finding(True, f"{best} is the best of its instruction sets; {count} processors; {memory}")


def check_cpu_kernels() -> Iterator[Finding]:
    """Check that the kernels for the CPU are compiled, or can be."""
    from pagewire.kernels.cpu.build import (
        BuildError,
        compiler_command,
        is_shipped,
        library_name,
        supported_instruction_sets,
    )
    from pagewire.kernels.cpu.library import SLOWER_WITHOUT
    from pagewire.kernels.native import cache

    best, *lesser = supported_instruction_sets()
    if is_shipped(best):
        yield Finding(True, f"{best.name}: they came with the wheel, nothing compiles here")
        return
    try:
        compiler, name = compiler_command()[0], library_name(best)
    except BuildError as error:
        if (other := next(filter(is_shipped, lesser), None)) is not None:
            yield Finding(
                True, f"{other.name}: they came with the wheel; those for {best.name} need a compiler"
            )
            return
        raise CheckError(f"{error}\nwithout it, models run up to {SLOWER_WITHOUT} times slower") from None
    if cache.read(name) is not None:
        yield Finding(True, f"compiled, in {cache.cache_folder()}")
    else:
        yield Finding(True, f"{compiler} will compile them at the first start, which takes minutes, once")


def check_no_gpu() -> Iterator[Finding]:
    """Say that there is no GPU to check."""
    yield Finding(None, "no NVIDIA GPU here, so CUDA is not checked (--cuda checks it all the same)")


def check_driver() -> Iterator[Finding]:
    """Check the driver, without using CuPy or torch."""
    major, minor = driver_version()
    yield Finding(True, f"supports CUDA {major}.{minor}")


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version (major, minor) that the driver supports.

    Raises:
        CheckError: there is no driver, or it has no device.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise CheckError(
            "no NVIDIA driver (libcuda.so.1): install one, or give the container access to the GPUs"
        ) from None
    if error := driver.cuInit(0):
        raise CheckError(
            f"the driver does not start (cuInit: error {error}): is there a GPU, and may this user access it?"
        )
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def check_torch() -> Iterator[Finding]:
    """Check PyTorch, which owns the GPU memory and the streams."""
    import torch

    if torch.version.cuda is None:
        raise CheckError(
            f"{torch.__version__} is built without CUDA: install a build with CUDA from pytorch.org"
        )
    if not torch.cuda.is_available():
        raise CheckError(f"{torch.__version__} for CUDA {torch.version.cuda} sees no device")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = f"{facts.total_memory / 2**30:.0f} GiB"
        text = f"{torch.__version__}, cuda:{index}: {facts.name}, sm_{facts.major}{facts.minor}, {memory}"
        yield Finding(True, text)


def check_cupy() -> Iterator[Finding]:
    """Check CuPy, which loads and launches kernels."""
    try:
        import cupy
    except ImportError as error:
        from pagewire.kernels.cuda.compile import install_command

        raise CheckError(f"not installed ({error}):\n{install_command()}") from None
    cuda = cupy.cuda.runtime.runtimeGetVersion()
    yield Finding(True, f"{cupy.__version__} for CUDA {cuda // 1000}")


def check_nvrtc() -> Iterator[Finding]:
    """Check the compiler, and that the driver can run its output."""
    try:
        import cupy  # noqa: F401
    except ImportError:
        yield Finding(None, "not tried: no CuPy")
        return
    major, minor = compiler_version()
    text = f"{major}.{minor}"
    try:
        driver = driver_version()
    except CheckError:
        yield Finding(True, text)
        return
    if driver[0] < major:
        from pagewire.kernels.cuda.compile import install_command

        raise CheckError(
            f"{text}, but the driver supports only CUDA {driver[0]}.{driver[1]}:\n{install_command(driver[0])}"
        )
    yield Finding(True, text)


def compiler_version() -> tuple[int, int]:
    """Return NVRTC's version (major, minor).

    Raises:
        CheckError: NVRTC is missing, or does not match CuPy.
    """
    from pagewire.kernels.cuda import compile

    try:
        version: tuple[int, int] = compile.nvrtc().getVersion()
    except compile.CompileError as error:
        raise CheckError(str(error)) from None
    return version


def check_headers() -> Iterator[Finding]:
    """Report CUDA's headers. pagewire's kernels need none, but CuPy's own kernels do."""
    try:
        from cuda.pathfinder import (  # type: ignore[import-not-found, unused-ignore]
            find_nvidia_header_directory,
        )
    except ImportError:
        yield Finding(None, "not searched for: no cuda-pathfinder (pagewire's kernels need no headers)")
        return
    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        yield Finding(None, "none (pagewire's kernels need no headers)")
        return
    header = Path(folder) / "cuda_runtime_api.h"
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text()) if header.exists() else None
    version = f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else "unknown version"
    text = f"{version} in {folder} (pagewire's kernels need no headers)"
    try:
        nvrtc = compiler_version()
    except CheckError:
        nvrtc = None
    if match and nvrtc and int(match[1]) // 1000 != nvrtc[0]:
        text += f"\nthey do not match NVRTC: pip install 'cuda-toolkit[cudart]=={nvrtc[0]}.*'"
    yield Finding(None, text)


def check_compile() -> Iterator[Finding]:
    """Compile a kernel for every kind of GPU of this machine, or for sm_90 if there is none; ignores the cache."""
    import torch

    from pagewire.kernels.cuda import compile
    from pagewire.kernels.cuda.gates import variants
    from pagewire.kernels.native.cache import cache_folder, opened_folder

    try:
        compile.nvrtc()
    except compile.CompileError:
        yield Finding(None, "not tried: no compiler")
        return
    count = torch.cuda.device_count()
    capabilities = {torch.cuda.get_device_capability(index) for index in range(count)} or {(9, 0)}
    for capability in sorted(capabilities):
        try:
            arch = compile.architecture(capability)
            cubin = compile.compile_uncached(variants()[0], arch)
        except compile.CompileError as error:
            raise CheckError(str(error)) from None
        size = f"{len(cubin.image)} bytes, {cubin.registers} registers"
        yield Finding(True, f"{variants()[0].name} for {arch}: {size}")
    try:
        cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with opened_folder() as folder:
            probe = f"doctor.{os.urandom(8).hex()}"
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=folder))
            os.unlink(probe, dir_fd=folder)
    except OSError as error:
        raise CheckError(f"the cache cannot be written: {error}; set PAGEWIRE_CACHE_ROOT") from None


def why_no_launch() -> str:
    """Return what kernels lack here: a device or a compiler; empty if they have both."""
    import torch

    from pagewire.kernels.cuda import compile

    if not torch.cuda.is_available():
        return "no device"
    try:
        compile.nvrtc()
    except compile.CompileError:
        return "no compiler"
    return ""


def check_launch() -> Iterator[Finding]:
    """Run a kernel on every GPU and compare the result with PyTorch's on the CPU."""
    if reason := why_no_launch():
        yield Finding(None, f"not tried: {reason}")
        return
    import torch

    from pagewire.kernels.data.layer import Activation
    from pagewire.kernels.reference.kernels import reference

    x = torch.randn(64, 2048).bfloat16()
    expected = reference.activate_and_mul(x, Activation.SILU)
    for index in range(torch.cuda.device_count()):
        try:
            result = silu_and_mul_on(index, x)
        except Exception as error:  # CuPy, the driver and torch raise many types; all are reported
            raise CheckError(f"cuda:{index}: {type(error).__name__}: {error}") from None
        if not torch.allclose(result.float(), expected.float(), rtol=2**-6, atol=1e-5):
            raise CheckError(f"cuda:{index}: wrong result: the device, its driver or the compiler is faulty")
        yield Finding(True, f"cuda:{index}: silu and mul of {tuple(x.shape)}, equal to PyTorch's")


def check_probes() -> Iterator[Finding]:
    """Check on every GPU what the kernels rely on: fragments of tensor cores, arithmetic, shared memory."""
    if reason := why_no_launch():
        yield Finding(None, f"not tried: {reason}")
        return
    import torch

    from pagewire.kernels.cuda.probes import PROBES

    for index in range(torch.cuda.device_count()):
        for name in PROBES:
            try:
                reason = why_probe_fails(name, index)
            except Exception as error:  # as in `check_launch`
                raise CheckError(f"cuda:{index}, {name}: {type(error).__name__}: {error}") from None
            if reason:
                raise CheckError(f"cuda:{index}: {reason}")
        yield Finding(True, f"cuda:{index}: {', '.join(PROBES)} as the kernels need them")


def why_probe_fails(name: str, index: int) -> str:
    """Return why a probe fails on `cuda:index`; empty if it passes."""
    import torch

    from pagewire.kernels.cuda.launch import CudaLauncher
    from pagewire.kernels.cuda.probes import PROBES

    with torch.cuda.device(index):
        return PROBES[name](CudaLauncher.at(index), torch.device("cuda", index))


def silu_and_mul_on(index: int, x: Tensor) -> Tensor:
    """Return silu(gate) * up, computed on `cuda:index`, for a CPU tensor that holds gate and up side by side."""
    import torch

    from pagewire.kernels.cuda.gates import activate_and_mul
    from pagewire.kernels.cuda.launch import CudaLauncher
    from pagewire.kernels.data.layer import Activation

    with torch.cuda.device(index):
        return activate_and_mul(CudaLauncher.at(index), x.to(f"cuda:{index}"), Activation.SILU).cpu()


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "driver": check_driver,
    "torch": check_torch,
    "cupy": check_cupy,
    "nvrtc": check_nvrtc,
    "headers": check_headers,
    "compile": check_compile,
    "launch": check_launch,
    "probes": check_probes,
}
CPU_CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "cpu": check_cpu,
    "kernels": check_cpu_kernels,
    "cuda": check_no_gpu,
}
