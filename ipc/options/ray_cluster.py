"""Connects a process to a Ray cluster, and reserves the places of an engine's workers in it.

Ray is imported by the functions here, when an engine or a program asks for it, and by nothing else.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

from pagewire.ipc.compatibility import OPTIONS, settle
from pagewire.ipc.environment import env_float
from pagewire.ipc.options.engine_args import EngineArgs

logger = logging.getLogger("pagewire.ray")

PLACEMENT_GROUP = "PAGEWIRE_RAY_PLACEMENT_GROUP"
"""Environment variable of a core: the id of the placement group in which its workers run, in hexadecimal digits."""
STORE_BYTES = 128 << 20  # Ray's object store in a cluster that is started here; workers put nothing into it
REMIND_SECONDS = 10.0  # between two log lines about places that are missing

_reserved: Any = None  # the placement group of `initialize_ray_cluster`
_started_here = False  # the cluster that this process is connected to


def initialize_ray_cluster(
    parallel_config: EngineArgs, engine_use_ray: bool = False, ray_address: str | None = None
) -> None:
    """Connect this process to a Ray cluster, and reserve places for the workers of the engines that it starts next.

    In a placement group (of an actor or task that captures its child tasks) that group is used, else one is made,
    which lasts as long as this process is connected. An engine with `distributed_executor_backend="ray"` needs no
    such call: its core does the same.

    parallel_config: options of the engine. engine_use_ray: has no effect.
    ray_address: of the cluster; default: $RAY_ADDRESS, else one that runs on this machine, else a new one.

    Raises:
        ValueError: Ray is not installed, or the placement group, or a cluster started here, has too few places.
        ConnectionError: no cluster answers at the address.
        TimeoutError: the places are not free within $PAGEWIRE_WORKER_START_TIMEOUT_S seconds.
    """
    global _reserved
    settle("engine_use_ray", engine_use_ray, OPTIONS["engine_use_ray"])
    ray = connect(ray_address)
    bundle = bundle_of(ray, parallel_config)
    group = ray.util.get_current_placement_group() or new_group(ray, bundle, parallel_config)
    suitable_bundles(group.bundle_specs, bundle, parallel_config.num_workers)
    limit = env_float("PAGEWIRE_WORKER_START_TIMEOUT_S", 300.0)
    give_up, remind = time.monotonic() + limit, time.monotonic() + REMIND_SECONDS
    while not group.wait(1.0):
        if time.monotonic() >= give_up:
            raise TimeoutError(f"no room within {limit:g} s for {places(group.bundle_specs)}")
        if time.monotonic() >= remind:
            remind += REMIND_SECONDS
            logger.info("waiting for %s", places(group.bundle_specs))
    _reserved = group


def environment() -> dict[str, str]:
    """Environment variables of a core that this process starts: its Ray cluster, and the group for the workers.

    Empty unless this process uses Ray.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    group = _reserved or ray.util.get_current_placement_group()
    found = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    return found if group is None else found | {PLACEMENT_GROUP: group.id.hex()}


def connect(address: str | None = None) -> Any:
    """The module `ray`, connected to a cluster; a cluster that is started here ends with this process.

    address: default: $RAY_ADDRESS, else a cluster that runs on this machine, else a new one.

    Raises:
        ValueError: Ray is not installed. ConnectionError: no cluster answers at the address.
    """
    global _started_here
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "distributed_executor_backend='ray' needs Ray, which is not installed: pip install 'pagewire[ray]'"
        ) from error
    if ray.is_initialized():
        return ray
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address=address or "auto")
    except ConnectionError:
        if address:
            raise
        ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES)
        _started_here = True
    return ray


def bundle_of(ray: Any, args: EngineArgs) -> dict[str, float]:
    """The resources of one worker: a GPU where the options and the cluster have some, else `num_threads` CPUs."""
    if args.device != "cpu" and (args.device != "auto" or ray.cluster_resources().get("GPU")):
        return {"GPU": 1.0}
    return {"CPU": float(args.num_threads or 1)}


def new_group(ray: Any, bundle: dict[str, float], args: EngineArgs) -> Any:
    """A new placement group with one bundle for each worker, which may still have to wait for room.

    Raises:
        ValueError: the cluster was started here, and is too small.
    """
    size = args.num_workers
    name, amount = next(iter(bundle.items()))
    present = ray.cluster_resources().get(name, 0.0)
    if _started_here and present < size * amount:
        raise ValueError(
            f"{size} workers need {places([bundle] * size)}, and this machine, which is in no Ray cluster, has "
            f"{present:g} {name}"
        )
    return ray.util.placement_group([bundle] * size, strategy="PACK")


def group_of_id(text: str) -> Any:
    """The placement group with an id in hexadecimal digits."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(text)))


def suitable_bundles(specs: list[dict[str, float]], bundle: dict[str, float], size: int) -> list[int]:
    """The indices of the bundles of a placement group that can hold a worker.

    Raises:
        ValueError: there are fewer than `size`.
    """
    found = [
        index
        for index, spec in enumerate(specs)
        if all(spec.get(name, 0.0) >= bundle[name] for name in bundle)
    ]
    if len(found) < size:
        raise ValueError(
            f"{size} workers need {places([bundle] * size)}, but the placement group has {places(specs)}"
        )
    return found


def by_node(indices: list[int], node_of: dict[int, str], own_node: str) -> list[int]:
    """Bundles in the order of the ranks: those of the core's node first, and those of any node together."""
    return sorted(indices, key=lambda index: (node_of[index] != own_node, node_of[index], index))


def places(specs: list[dict[str, float]]) -> str:
    """Bundles as text: "2 bundles of 1 GPU"."""
    kinds: dict[str, int] = {}
    for spec in specs:
        text = " and ".join(f"{amount:g} {name}" for name, amount in spec.items())
        kinds[text] = kinds.get(text, 0) + 1
    return ", ".join(f"{count} bundle{'s' if count > 1 else ''} of {text}" for text, count in kinds.items())
