"""Where the cores of a router are: at an address, or spawned here."""

from __future__ import annotations

import dataclasses
import math
import os

from pagewire.frontend.client import RunningCores, SpawnedCores, longest_silence
from pagewire.frontend.route.replica import CorePlace
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.sockets import CurveKeys, check_address

CONNECT_SECONDS = 3.0  # for a core that runs to accept a connection; it may load its model after that
RESTARTS = 1 << 30  # of a spawned core: as often as it dies, after growing pauses


def running_place(address: str, curve: CurveKeys | None = None, peer_uid: int | None = None) -> CorePlace:
    """The place of a core that runs at an address; one that is lost is waited for there for ever.

    Raises:
        ValueError: a bad address.
    """
    check_address(address, encrypted=curve is not None)
    source = RunningCores(
        address, curve, peer_uid, "route", CONNECT_SECONDS, math.inf, patience=longest_silence()
    )
    return CorePlace(address, source)


def spawned_place(args: EngineArgs, number: int, num_cores: int) -> CorePlace:
    """The place of one of several cores that are spawned here.

    Unless the options say otherwise, they divide the processors among themselves. With device "cuda", core i gets
    the GPU i.

    Raises:
        ValueError: an option with which they would be in each other's way.
    """
    alone = "start each with `pagewire core`, and give the router their addresses (--core)"
    if num_cores > 1 and args.resolved_kv_events() is not None:
        raise ValueError(f"kv_events: cores that are spawned together would publish at one address: {alone}")
    if args.device == "cuda" and args.num_workers > 1:
        raise ValueError(f"{args.parallel_sizes}: a core that is spawned with others gets one GPU: {alone}")
    if args.num_threads is None:
        args = dataclasses.replace(args, num_threads=max(1, (os.cpu_count() or 1) // num_cores))
    if args.device == "cuda":
        args = dataclasses.replace(args, device=f"cuda:{number}")
    label = f"spawned core {number} of {args.model}"
    return CorePlace(label, SpawnedCores(args, RESTARTS), retries=False)
