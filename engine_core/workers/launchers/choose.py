"""Chooses the launcher that the options ask for."""

from __future__ import annotations

import zmq

from pagewire.engine_core.workers.launchers.interface import Launcher
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.options import EngineArgs


def open_launcher(args: EngineArgs, context: zmq.Context[zmq.Socket[bytes]]) -> Launcher:
    """The launcher of an engine's workers.

    Raises:
        ValueError: there is none, or it cannot start as many workers. OSError: its socket cannot be bound.
    """
    if args.uses_ray:
        raise ValueError("distributed_executor_backend='ray' is not supported yet: use 'mp' or 'join'")
    return LocalLauncher(context)
