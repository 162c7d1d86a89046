"""Chooses the launcher that the options ask for."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from pagewire.engine_core.workers.launchers.interface import Launcher
from pagewire.engine_core.workers.launchers.join import JoinLauncher
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.group_key import default_key_file
from pagewire.ipc.options import EngineArgs
from pagewire.ipc.ports import first_port

DEFAULT_PORT = 5710
GPUS = Path("/proc/driver/nvidia/gpus")


def open_launcher(args: EngineArgs, context: zmq.Context[zmq.Socket[bytes]]) -> Launcher:
    """The launcher of an engine's workers.

    Raises:
        ValueError: there is none, or it cannot start as many workers. OSError: its socket cannot be bound.
    """
    if args.uses_ray:
        raise ValueError("distributed_executor_backend='ray' is not supported yet: use 'mp' or 'join'")
    if args.distributed_executor_backend == "join":
        key_file = default_key_file() if args.join_key is None else Path(args.join_key)
        return JoinLauncher(args.join_address or join_address(), key_file, args.tensor_parallel_size)
    check_devices(args)
    return LocalLauncher(context)


def join_address() -> str:
    """Where workers join if the options do not say it: at loopback, unless `PAGEWIRE_HOST_IP` is set.

    Raises:
        ValueError: `PAGEWIRE_PORT` is no port.
    """
    host = os.environ.get("PAGEWIRE_HOST_IP") or "127.0.0.1"
    return f"tcp://{f'[{host}]' if ':' in host else host}:{first_port() or DEFAULT_PORT}"


def check_devices(args: EngineArgs) -> None:
    """Refuse to start more workers on this machine than it has GPUs, unless they run on its processors.

    Raises:
        ValueError: there are not enough.
    """
    num_workers = args.tensor_parallel_size
    if num_workers == 1 or args.device == "cpu":
        return
    num_gpus = len(list(GPUS.glob("*"))) if GPUS.exists() else 0
    if args.device == "auto" and not num_gpus:
        return
    if num_workers > num_gpus:
        raise ValueError(
            f"tensor_parallel_size={num_workers} takes a GPU for each worker, and this machine has {num_gpus}: "
            "with distributed_executor_backend='join' or 'ray' workers run on several machines, with device='cpu' "
            "on processors"
        )
