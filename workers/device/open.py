"""Opens the device that the configuration names."""

from __future__ import annotations

import torch

from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.workers.device.cpu import CpuDevice
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError


def open_device(config: WorkerConfig) -> Device:
    """The device `cpu`, `cuda`, `cuda:N` or `auto` (a GPU if there is one).

    Each worker of a group on a machine has a GPU of its own, in the order of the ranks.

    Raises:
        LoadError: the device or something it needs is missing; the text says how to fix it.
    """
    device = torch_device(config)
    if device.type == "cpu":
        return CpuDevice.open(config.num_threads, config.parallel)
    # It imports the CUDA kernels, which a CPU worker does not need.
    from pagewire.workers.device.cuda import CudaDevice

    return CudaDevice.open(device.index, config.batch_invariant)


def torch_device(config: WorkerConfig) -> torch.device:
    """PyTorch's name of the device of a worker; the device need not be there.

    Raises:
        LoadError: the option names no device, or the machine has more workers than GPUs.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise LoadError(f"device {config.device!r} is not supported: use auto, cpu, cuda or cuda:N")
    own = int(index) if index else own_gpu(config.parallel, torch.cuda.device_count())
    return torch.device("cuda", own)


def own_gpu(parallel: Parallel, num_visible: int) -> int:
    """The index of a worker's GPU among those that its process sees. A launcher may show each worker its own only.

    Raises:
        LoadError: the machine has more workers than GPUs.
    """
    if num_visible <= 1:
        return 0  # if several workers see the same, NCCL refuses them
    if parallel.local_rank >= num_visible:
        raise LoadError(
            f"{parallel.local_size} workers are on a machine with {num_visible} GPUs: each takes one"
        )
    return parallel.local_rank
