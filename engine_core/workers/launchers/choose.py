"""Chooses the launcher that the options ask for."""

from __future__ import annotations

import importlib.util
import os
from itertools import takewhile
from pathlib import Path

import zmq

from pagewire.engine_core.workers.launchers.early import EarlyWorker
from pagewire.engine_core.workers.launchers.interface import Launcher
from pagewire.engine_core.workers.launchers.join import JoinLauncher
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.host.ports import first_port
from pagewire.ipc.join.group_key import default_key_file
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.options.ray_cluster import PLACEMENT_GROUP

DEFAULT_PORT = 5710
GPUS = Path("/proc/driver/nvidia/gpus")


def open_launcher(
    args: EngineArgs, context: zmq.Context[zmq.Socket[bytes]], early: EarlyWorker | None = None
) -> Launcher:
    """The launcher of an engine's workers. early: the first of them, if it was started already; it is a local one.

    Raises:
        ValueError: it cannot start as many workers, or Ray is not installed. OSError: its socket cannot be bound.
    """
    if uses_ray(args):
        from pagewire.engine_core.workers.launchers.ray_launcher import RayLauncher

        return RayLauncher(args)
    if args.distributed_executor_backend == "join":
        key_file = default_key_file() if args.join_key is None else Path(args.join_key)
        return JoinLauncher(args.join_address or join_address(), key_file, args.num_workers)
    check_devices(args)
    return LocalLauncher(context, early=early)


def join_address() -> str:
    """Where workers join if the options do not say it: at loopback, unless `PAGEWIRE_HOST_IP` is set.

    Raises:
        ValueError: `PAGEWIRE_PORT` is no port.
    """
    host = os.environ.get("PAGEWIRE_HOST_IP") or "127.0.0.1"
    return f"tcp://{f'[{host}]' if ':' in host else host}:{first_port() or DEFAULT_PORT}"


def uses_ray(args: EngineArgs) -> bool:
    """True if workers run in a Ray cluster: the options say so; or they say nothing, and there are several workers
    in a placement group of Ray, or more than this machine has devices, and Ray is installed.
    """
    if args.uses_ray or args.distributed_executor_backend is not None or args.num_workers == 1:
        return args.uses_ray
    if PLACEMENT_GROUP in os.environ:
        return True
    return lacks_devices(args) and importlib.util.find_spec("ray") is not None


def lacks_devices(args: EngineArgs) -> bool:
    """True if each of several workers needs a GPU, and this machine has fewer."""
    if args.num_workers == 1 or args.device == "cpu" or (args.device == "auto" and not num_gpus()):
        return False
    return args.num_workers > num_gpus()


def num_gpus() -> int:
    """Number of NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide."""
    present = len(list(GPUS.glob("*"))) if GPUS.exists() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return len(list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, visible.split(",")))))


def check_devices(args: EngineArgs) -> None:
    """Refuse to start more workers on this machine than it has GPUs, unless they run on its processors.

    Raises:
        ValueError: there are not enough.
    """
    if lacks_devices(args):
        raise ValueError(
            f"{args.parallel_sizes} takes a GPU for each worker, and this machine has "
            f"{num_gpus()}: on several machines workers run with distributed_executor_backend='join', or in a Ray "
            "cluster (pip install 'pagewire[ray]'); with device='cpu' they run on processors"
        )
