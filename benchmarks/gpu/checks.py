"""Parts that show whether the kernels, the worker and what is beneath them are right on a device."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import SkipError

# torch is imported in the parts that need it, so that one without it says so.

PACKAGES = ("torch", "transformers", "cupy", "numpy", "zmq", "msgspec", "llguidance", "tokenizers")
TEST_PROCESSES = 6
SANITIZED_TRIALS = (
    "rms_norm of 4088",
    "rotate_and_store in bfloat16, heads of 128",
    "decode attention over bfloat16, heads of 128",
    "prefill attention over bfloat16, heads of 128",
    "prefill attention of warpgroups over bfloat16, heads of 128",
    "decode attention to latents of 576",
    "drafts attention to latents of 576",
    "decode attention of 8 heads to chosen latents of 576",
    "decode attention of 24 heads to chosen latents of 576",
    "index scores of 128",
    "products with 4 bits, groups of 64, scales in float16",
    "unpacked 4 bits, groups of 64, scales in float16",
    "products with 8 bits, groups of 16, scales in float16",
    "products with 8-bit floats, groups of 64",
    "rows as integers",
    "products of rows as integers",
    "experts with 4 bits, groups of 64, scales in float16",
    "experts with dense weights",
    "adapters",
)


def command(arguments: Sequence[str], **environment: str) -> None:
    """Run a command, with its output in the part's.

    Raises:
        RuntimeError: its exit status is not 0.
    """
    sys.stdout.flush()
    status = subprocess.run(arguments, env=os.environ | environment, stderr=subprocess.STDOUT).returncode
    if status:
        raise RuntimeError(f"{' '.join(arguments[:4])}: exit status {status}")


def machine(is_gpu: bool) -> dict[str, Any]:
    """The machine, and its driver."""
    facts: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
    facts |= {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
    for file in ("/proc/driver/nvidia/version", "/proc/meminfo"):
        if Path(file).exists():
            facts[file] = Path(file).read_text().splitlines()[0]
    if is_gpu or shutil.which("nvidia-smi"):
        command(["nvidia-smi"])
    for name in ("g++", "nvcc", "compute-sanitizer", "nvidia-smi"):
        facts[name] = shutil.which(name)
    return facts


def packages(is_gpu: bool) -> dict[str, Any]:
    """The versions of the packages that are needed, and what does not import. A rehearsal needs no CuPy."""
    versions, missing = {}, []
    for name in PACKAGES if is_gpu else set(PACKAGES) - {"cupy"}:
        begin = time.perf_counter()
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a package that is broken raises anything
            missing.append(f"{name} ({type(error).__name__}: {error})")
            continue
        versions[name] = f"{getattr(module, '__version__', '?')}, {time.perf_counter() - begin:.1f} s"
        print(name, versions[name])
    if missing:
        raise ImportError("; ".join(missing))
    return versions


def doctor(is_gpu: bool) -> dict[str, Any]:
    """`pagewire doctor`: driver, compiler, cache, a launch, and the probes."""
    from pagewire.cli.main import main

    if main(["doctor"]) and is_gpu:
        raise RuntimeError("pagewire doctor found what its output says")
    return {}


def compiled(is_gpu: bool) -> dict[str, Any]:
    """Every kernel, compiled for the device and loaded by its driver, which must see the same resources."""
    from pagewire.kernels.cuda import compile
    from pagewire.kernels.cuda.variants import all_variants

    variants = all_variants()
    if not is_gpu:
        try:
            compile.nvrtc()
        except compile.CompileError as error:
            raise SkipError(str(error)) from None
        variants = variants[-2:]
    begin = time.perf_counter()
    arch = compile.architecture(capability(is_gpu))
    cubins = compile.build(variants, arch)
    figures = {"arch": arch, "kernels": len(cubins), "seconds": time.perf_counter() - begin}
    spilled = [variant.name for variant, cubin in cubins.items() if cubin.local_bytes]
    if spilled:
        raise RuntimeError(f"{len(spilled)} kernels use local memory: {spilled[0]}")
    if is_gpu:
        check_resources(cubins)
    return figures


def capability(is_gpu: bool) -> tuple[int, int]:
    """The device's compute capability."""
    import torch

    return torch.cuda.get_device_capability(0) if is_gpu else (9, 0)


def check_resources(cubins: dict[Any, Any]) -> None:
    """Load all kernels, and compare what the driver says of each with what the compiler said.

    Raises:
        RuntimeError: they differ.
    """
    from cupy.cuda import driver

    from pagewire.kernels.cuda.launch import CupyDriver

    loader, kinds = CupyDriver(0), ("NUM_REGS", "LOCAL_SIZE_BYTES", "MAX_THREADS_PER_BLOCK")
    for variant, cubin in cubins.items():
        function: Any = loader.load(cubin.image, cubin.symbol)
        registers, local, threads = (
            driver.funcGetAttribute(getattr(driver, f"CU_FUNC_ATTRIBUTE_{kind}"), function.ptr)
            for kind in kinds
        )
        if (registers, local) != (cubin.registers, cubin.local_bytes):
            raise RuntimeError(
                f"{variant.name}: the driver sees {registers} registers, {local} bytes of local"
            )
        if threads < cubin.bound:
            raise RuntimeError(f"{variant.name}: only {threads} threads in a block")


def probes(is_gpu: bool) -> dict[str, Any]:
    """What kernels rely on, one thing at a time."""
    from benchmarks.gpu.place import Gpu, Rehearsal
    from pagewire.kernels.cuda.probes import PROBES

    place = Gpu() if is_gpu else Rehearsal()
    launcher = place.kernels().launcher
    reasons = {name: probe(launcher, place.device) for name, probe in PROBES.items()}
    print(reasons)
    if wrong := [reason for reason in reasons.values() if reason]:
        raise RuntimeError("; ".join(wrong))
    return {}


def tried(is_gpu: bool, methods: Sequence[str]) -> dict[str, Any]:
    """The trials of some methods of the kernels, of every dtype and size."""
    from benchmarks.gpu.place import Gpu, Rehearsal

    place = Gpu() if is_gpu else Rehearsal()
    kernels, wrong, count = place.kernels(), [], 0
    for of, trial in place.trials():
        if trial.method in methods:
            count += 1
            if reason := trial.why_wrong(kernels, place.device):
                wrong.append(f"{of}, {trial.name}: {reason}")
                print(wrong[-1], flush=True)
    if wrong or not count:
        raise RuntimeError(f"{len(wrong)} of {count} trials differ: {'; '.join(wrong[:3])}")
    return {"trials": count}


def sampling(is_gpu: bool) -> dict[str, Any]:
    """The sampling kernels, beside the sampler of CPUs, to the bit."""
    import torch

    from benchmarks.gpu.place import Gpu, Rehearsal
    from pagewire.workers.device.first_run import why_sampling_is_wrong

    device = (Gpu() if is_gpu else Rehearsal()).worker_device()
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if is_gpu else (torch.bfloat16,)
    if wrong := [
        f"{dtype}: {reason}" for dtype in dtypes if (reason := why_sampling_is_wrong(device, dtype))
    ]:
        raise RuntimeError("; ".join(wrong))
    return {}


def first_run(is_gpu: bool) -> dict[str, Any]:
    """What a worker does at its first start here, and that the next start finds the verdicts."""
    import torch

    from benchmarks.gpu.place import Gpu, Rehearsal
    from pagewire.kernels.cuda.kernels import PREFERRED
    from pagewire.kernels.cuda.variants import Launches
    from pagewire.workers.device.first_run import here, in_processes, replace_wrong_kernels

    device = (Gpu() if is_gpu else Rehearsal()).worker_device()
    launches = Launches(torch.bfloat16, torch.float8_e4m3fn, 128, mixture=True)
    if not is_gpu:  # sampling is all that is tried for float32
        launches = Launches(torch.float32, torch.float32, 64)
    seconds = []
    for run in (in_processes if is_gpu else here, no_trials):
        begin = time.perf_counter()
        replace_wrong_kernels(device, launches, run)
        seconds.append(time.perf_counter() - begin)
    if wrong := device.kernels.replaced | (PREFERRED - device.kernels.preferred):
        raise RuntimeError(f"others stand in for {', '.join(sorted(wrong))}")
    return {"first_s": seconds[0], "next_s": seconds[1]}


def no_trials(*_: object) -> dict[str, str]:
    """The trials of a start that should run none."""
    raise RuntimeError("the verdicts of the first run were not kept")


def tests(is_gpu: bool, expression: str) -> dict[str, Any]:
    """Tests of the worker on a GPU: tokens beside those of transformers, adapters, graphs, steps launched ahead."""
    if importlib.util.find_spec("pytest") is None:
        raise SkipError("there is no pytest")
    # Without a GPU these tests run on the emulated device, which takes minutes: a rehearsal runs a short one.
    root = Path(__file__).parents[2] / "tests"
    chosen = [root / "workers" / "device", "-k", expression] if is_gpu else [root / "ipc" / "test_quoting.py"]
    # Names as they run, and the first failures in full: the part's time may end before its tests.
    options = ["-v", "--tb=short", "--maxfail=10", "-p", "no:cacheprovider"]
    if is_gpu and importlib.util.find_spec("xdist") is not None:  # Python takes most of their time
        options += ["-n", str(min(TEST_PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]
    command([sys.executable, "-m", "pytest", *options, *map(str, chosen)])
    return {}


def graphs(is_gpu: bool) -> dict[str, Any]:
    """A graph of PyTorch's and our launches replays rightly while both allocators of the process go on.

    Raises:
        RuntimeError: it does not.
    """
    import torch

    from benchmarks.gpu.place import Gpu, Rehearsal
    from pagewire.kernels.data.layer import Activation

    place = Gpu() if is_gpu else Rehearsal()
    kernels, taken = place.kernels(), []
    x = torch.randn(64, 512, device=place.device).bfloat16()
    weight = torch.ones(512, device=place.device).bfloat16()

    def run() -> torch.Tensor:
        normed = kernels.rms_norm(x * 2, weight, 1e-6)
        return kernels.activate_and_mul(torch.cat([normed, normed]), Activation.SILU) + 1

    result, replay = place.record(run)
    for turn in range(4):
        x.normal_()
        taken += [torch.empty(1 << 20, device=place.device) for _ in range(8)]
        if is_gpu:
            import cupy

            taken.append(cupy.ones(1 << 20))
        result.fill_(torch.nan)
        replay()
        if not torch.allclose(result.float(), run().float(), rtol=1e-2, atol=1e-2):
            raise RuntimeError(f"replay {turn} differs from the same launches without a graph")
        del taken[::2]
    return {}


def streams(is_gpu: bool) -> dict[str, Any]:
    """Launches go to PyTorch's current stream, and what is copied to the host is there when its event is reached.

    Raises:
        RuntimeError: they do not, or it is not.
    """
    import torch

    from benchmarks.gpu.place import Gpu, Rehearsal

    place = Gpu() if is_gpu else Rehearsal()
    kernels, device = place.kernels(), place.worker_device()
    x = torch.randn(4096 if is_gpu else 4, 4096 if is_gpu else 64, device=place.device).bfloat16()
    weight = torch.ones(x.shape[1], device=place.device).bfloat16()
    expected = kernels.rms_norm(x.clone(), weight, 1e-6).cpu()
    host = device.pinned(x.nbytes).view(torch.bfloat16).view(x.shape)
    with place.other_stream():
        for turn in range(5):
            late = torch.zeros_like(x)
            for _ in range(
                50 if is_gpu else 1
            ):  # keeps the stream busy: a launch on another one would overtake
                late = late @ late[: x.shape[1]] if is_gpu else late
            late += x
            host.fill_(torch.nan)
            copied = device.download(kernels.rms_norm(late, weight, 1e-6), host)
            copied.wait()
            if not torch.equal(host, expected):
                raise RuntimeError(f"turn {turn}: the copy has not what was computed on the stream before it")
    return {}


def nccl(is_gpu: bool) -> dict[str, Any]:
    """NCCL starts, and its exchanges give what was sent; in a group of one rank, as there is one GPU."""
    import torch

    from pagewire.ipc.wire.worker_messages import Parallel
    from pagewire.workers.ranks.check import check
    from pagewire.workers.ranks.distributed import DistributedGroup

    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    parallel = Parallel(rank=0, size=1, local_rank=0, local_size=1, rendezvous=f"pagewire-{os.getpid()}")
    group = DistributedGroup("nccl" if is_gpu else "gloo", device, parallel)
    check(group, device)
    group.barrier()
    group.close()
    return {}


def sanitized(tool: str) -> dict[str, Any]:
    """Some trials under compute-sanitizer: accesses beyond memory, or races in shared memory."""
    found = [
        shutil.which("compute-sanitizer"),
        *map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")),
    ]
    if not (sanitizer := next(filter(None, found), None)):
        raise SkipError("there is no compute-sanitizer")
    program = [sys.executable, "-c", "from benchmarks.gpu.checks import run_sanitized; run_sanitized()"]
    command([sanitizer, "--tool", tool, "--error-exitcode", "9", *program])
    return {}


def run_sanitized() -> None:
    """The program under the sanitizer: a few trials, without graphs."""
    import torch

    from benchmarks.gpu.place import Gpu
    from pagewire.kernels.cuda.layout import exchange_chunks
    from pagewire.kernels.cuda.trials import trials
    from pagewire.kernels.cuda.variants import Launches

    place = Gpu()
    kernels = place.kernels()
    launches = Launches(
        torch.bfloat16, torch.bfloat16, 128, mixture=True, capability=capability(True), indexed=True
    )
    known = {trial.name: trial for size in (128, 576) for trial in trials(launches._replace(head_dim=size))}
    for name in filter(known.__contains__, SANITIZED_TRIALS):
        known[name].runs(kernels, exchange_chunks, place.device)()
        torch.cuda.synchronize()
        print(name, flush=True)
