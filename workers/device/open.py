"""Opens the device that the configuration names."""

from __future__ import annotations

import torch

from pagewire.ipc.worker_messages import WorkerConfig
from pagewire.workers.device.cpu import CpuDevice
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError


def open_device(config: WorkerConfig) -> Device:
    """The device `cpu`, `cuda`, `cuda:N` or `auto` (a GPU if there is one).

    Raises:
        LoadError: the device or something it needs is missing; the text says how to fix it.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice.open(config.num_threads)
    # It imports the CUDA kernels, which a CPU worker does not need.
    from pagewire.workers.device.cuda import CudaDevice

    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise LoadError(f"device {config.device!r} is not supported: use auto, cpu, cuda or cuda:N")
    return CudaDevice.open(int(index or 0))
