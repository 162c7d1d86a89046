"""Worker processes in a Ray cluster, each run by an actor on a bundle of a placement group.

    core --Ray--> actor (`ray_host.py`) --child process--> worker --TCP, CURVE--> core

Ray only starts actors and reports how workers end. What core and workers say to each other goes over pagewire's own
sockets. An actor stays while its workers come and go; one that is lost is replaced, on another node if need be.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from typing import Any

import zmq

from pagewire.engine_core.workers.launchers.joined_process import JoinedProcess
from pagewire.engine_core.workers.launchers.listener import WorkerListener, admit_workers
from pagewire.engine_core.workers.launchers.ray_host import WorkerHost
from pagewire.ipc.host.gate import Gate
from pagewire.ipc.host.lifeline import exit_cause
from pagewire.ipc.join.group_key import GroupKey
from pagewire.ipc.options import ray_cluster
from pagewire.ipc.options.engine_args import EngineArgs

logger = logging.getLogger("pagewire.core")

POLL_SECONDS = 0.5  # between two looks at the time, while Ray has no answer
GRACE_SECONDS = 5.0  # for an actor to kill its worker, before it is itself killed
CALLS_AT_ONCE = 4  # of an actor: one waits for the end of the worker
MAX_CAUSE = 400  # characters of Ray's reason for the end of an actor

# Variables of the core's environment that workers on all nodes get, and those of them that concern one machine.
CARRIED = ("PAGEWIRE_", "NCCL_", "GLOO_")
OF_ONE_MACHINE = {
    "PAGEWIRE_HOST_IP",
    "PAGEWIRE_PORT",
    "PAGEWIRE_RPC_BASE_PATH",
    "PAGEWIRE_CPU_OMP_THREADS_BIND",
    "PAGEWIRE_API_KEY",
    ray_cluster.PLACEMENT_GROUP,
}
NSIGHT = {"t": "cuda,cudnn,cublas", "o": "'worker_process_%p'", "cuda-graph-trace": "node"}


class Actors:
    """The actors of a placement group, one for each rank, made when they are first needed. Used by several threads.

    Raises:
        ValueError: the placement group that $PAGEWIRE_RAY_PLACEMENT_GROUP names has too few suitable bundles.
    """

    def __init__(self, ray: Any, args: EngineArgs) -> None:
        self._ray, self._size = ray, args.num_workers
        self._bundle = ray_cluster.bundle_of(ray, args)
        self._nsight = args.ray_workers_use_nsight
        given = os.environ.get(ray_cluster.PLACEMENT_GROUP)
        self._own = given is None
        self._group = (
            ray_cluster.new_group(ray, self._bundle, args)
            if given is None
            else ray_cluster.group_of_id(given)
        )
        specs = self._group.bundle_specs
        self._suitable = ray_cluster.suitable_bundles(specs, self._bundle, self._size)
        self.room = f"room in the Ray cluster for {ray_cluster.places(specs)}"
        self._order: list[int] = []
        self._actors: dict[int, Any] = {}
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """True once the cluster has room for the placement group; waits a little for it."""
        return bool(self._group.wait(POLL_SECONDS))

    def get(self, rank: int) -> Any:
        """The actor of a rank, which may still have to start. The placement group must be ready."""
        with self._lock:
            if not self._order:
                table = self._ray.util.placement_group_table(self._group)
                node = self._ray.get_runtime_context().get_node_id()
                nodes = table["bundles_to_node_id"]
                self._order = ray_cluster.by_node(self._suitable, nodes, node)
            if rank not in self._actors:
                self._actors[rank] = self._new_actor(self._order[rank])
            return self._actors[rank]

    def _new_actor(self, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {
            # On CPUs the bundle is what is reserved; the actor itself asks for nothing.
            "num_cpus": 0,
            "num_gpus": self._bundle.get("GPU", 0),
            "max_concurrency": CALLS_AT_ONCE,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
        }
        if self._nsight:
            options["runtime_env"] = {"nsight": NSIGHT}
        return self._ray.remote(WorkerHost).options(**options).remote()

    def discard(self, rank: int, actor: Any) -> None:
        """Kill an actor that is lost or does not answer; the next `get` makes another."""
        with self._lock:
            if self._actors.get(rank) is actor:
                del self._actors[rank]
        self._ray.kill(actor)

    def close(self) -> None:
        """Kill all actors, upon which their workers end, and give their places free."""
        with self._lock:
            for actor in self._actors.values():
                self._ray.kill(actor)
            self._actors.clear()
        if self._own:
            self._ray.util.remove_placement_group(self._group)


class RayFollower:
    """Follows one worker process from its start to its end, on a thread of its own.

    arguments: of `WorkerHost.start`.

    Attributes:
        process: the core's handle.
    """

    def __init__(self, ray: Any, actors: Actors, rank: int, identity: str, *arguments: Any) -> None:
        self.process = JoinedProcess(rank, identity, actors.room, self._request_end)
        self._ray, self._actors, self._identity, self._arguments = ray, actors, identity, arguments
        self._actor: Any = None
        self._give_up: float | None = None  # when the actor is killed, for want of an answer
        self._thread = threading.Thread(target=self._run, name=f"ray-{identity}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._thread.is_alive()

    def stop(self) -> bool:
        """Wait a little for the end of the process, whose actor has been killed. Returns True if it came."""
        self._give_up = time.monotonic()
        self._thread.join(GRACE_SECONDS)
        return not self.running

    def _run(self) -> None:
        try:
            cause = self._follow()
        except Exception as error:  # of Ray, which has dozens of types
            logger.debug("traceback", exc_info=True)
            cause = f"was lost: {reason(error)}"
            if self._actor is not None:
                self._actors.discard(self.process.rank, self._actor)
        self.process.end(cause)

    def _follow(self) -> str:
        while not self._actors.ready():
            self._check_time()
        self._actor = self._actors.get(self.process.rank)
        self.process.pid = self._answer(self._actor.start.remote(*self._arguments))
        self.process.given()
        return exit_cause(self._answer(self._actor.wait.remote(self._identity)))

    def _answer(self, reference: Any) -> Any:
        """The answer of the actor.

        Raises:
            TimeoutError: there is none, long after the worker was to be killed. RayError: the actor is lost.
        """
        while not self._ray.wait([reference], timeout=POLL_SECONDS)[0]:
            self._check_time()
        return self._ray.get(reference)

    def _check_time(self) -> None:
        if self._give_up is not None and time.monotonic() >= self._give_up:
            raise TimeoutError("it was to be killed, and its actor does not answer")

    def _request_end(self, process: JoinedProcess, kill: bool) -> None:
        """Called on the core's thread."""
        if kill and self._give_up is None:
            self._give_up = time.monotonic() + (0.0 if self._actor is None else GRACE_SECONDS)
        if self._actor is not None:
            self._actor.end.remote(self._identity, kill)


class RayLauncher:
    """Starts worker processes in a Ray cluster: the one that runs, or one that is started here.

    Raises:
        ValueError: Ray is not installed. ConnectionError: no cluster answers at $RAY_ADDRESS.
        ValueError: the placement group of this process is too small. OSError: the socket cannot be bound.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._ray = ray_cluster.connect()
        self._actors = Actors(self._ray, args)
        key = GroupKey(secrets.token_bytes(32))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gate(self._context, admit_workers(key))
        host = os.environ.get("PAGEWIRE_HOST_IP") or self._ray.util.get_node_ip_address()
        try:
            self.listener = WorkerListener.tcp(self._context, host, key)
        except BaseException:
            self._context.destroy(0)
            raise
        self._gate.start()
        self._key, self._environment = key.text, carried(os.environ)
        self._followers: list[RayFollower] = []
        logger.info("workers run in the Ray cluster at %s", self._ray.get_runtime_context().gcs_address)

    def start(self, rank: int, address: str, identity: str) -> JoinedProcess:
        """See `Launcher.start`. The process waits until the cluster has room for all workers."""
        arguments = (address, identity, self._key, self._environment)
        follower = RayFollower(self._ray, self._actors, rank, identity, *arguments)
        self._followers = [*(other for other in self._followers if other.running), follower]
        return follower.process

    def start_ahead(self, rank: int, address: str) -> None:
        """Nothing: the cluster's resources are those of running workers."""

    def end_ahead(self) -> None:
        """Nothing: none is started ahead."""

    def close(self) -> None:
        """End the actors, close the socket, and disconnect from the cluster."""
        self._actors.close()
        self.listener.close()
        self._gate.stop()
        self._context.destroy(0)
        # A thread that still called Ray after this would make it connect again.
        if all(follower.stop() for follower in self._followers):
            try:
                self._ray.shutdown()
            except OSError as error:
                # It prints what workers said last, and our output may have no reader any more.
                logger.debug("Ray was left: %s", error)


def carried(environment: Any) -> dict[str, str]:
    """The variables of the core's environment that its workers get, unless their node sets them."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(CARRIED) and name not in OF_ONE_MACHINE
    }


def reason(error: Exception) -> str:
    """Why Ray lost an actor, or could not start it, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = next((line for line in lines if line.startswith("The actor is dead because")), lines[-1])
    return text if len(text) <= MAX_CAUSE else f"{text[:MAX_CAUSE]}..."
