"""The engine core as a process: sockets, signals, exit status.

A frontend starts it as `python -m pagewire.engine_core` (`__main__.py`), a user as `pagewire core`.
Exit status: 0 after a stop, 1 after a failure; the last line of the log is then its cause.
"""

from __future__ import annotations

import logging
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import zmq

from pagewire.engine_core.clients.access import Access
from pagewire.engine_core.clients.clients import RECEIVE_QUEUE, SEND_QUEUE, Clients
from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.events.kv_events import KVPublisher
from pagewire.engine_core.tiers.peer_links import PeerLinks
from pagewire.engine_core.wiring import open_core
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.launchers.choose import open_launcher
from pagewire.engine_core.workers.launchers.early import EarlyWorker
from pagewire.ipc.environment import env_float
from pagewire.ipc.host.address_lock import AddressLock, sweep
from pagewire.ipc.host.descriptors import raise_descriptor_limit, require_descriptors
from pagewire.ipc.host.gate import Gate
from pagewire.ipc.host.heap import return_freed_memory
from pagewire.ipc.host.priority import take_short_turns
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.sockets import CurveKeys, bind_router, runtime_dir

logger = logging.getLogger("pagewire.core")

# The fewest open files that a core and each of its workers need: ZeroMQ ends a process that has none left when a
# peer connects over ipc (libzmq 4.3.5, ipc_listener.cpp). Each frontend takes one more.
CORE_DESCRIPTORS, WORKER_DESCRIPTORS = 112, 16
FLUSH_MS = 500  # how long closing the socket may take to send what is queued, such as the cause of a failure


@dataclass(frozen=True)
class Listen:
    """The address of the core, and which frontends may connect.

    curve_secret: the core's certificate. curve_clients: folder of the public certificates of allowed frontends.
    allowed_users: ids of users who may attach over ipc beside this user and root. rights: file of what each
        frontend may do; without it, everything.
    drain_seconds: time that running requests get to finish after a signal.
    announce: print `ready ADDRESS` when the model is loaded.
    """

    address: str
    curve_secret: Path | None = None
    curve_clients: Path | None = None
    allowed_users: tuple[int, ...] = ()
    rights: Path | None = None
    drain_seconds: float = 30.0
    announce: bool = False

    def __post_init__(self) -> None:
        if (self.curve_secret is None) != (self.curve_clients is None):
            raise ValueError(
                "CURVE needs both the core's secret certificate and the folder of client certificates"
            )
        if self.allowed_users and not self.address.startswith("ipc://"):
            raise ValueError(
                f"--allow-uid has no effect at {self.address}: user ids are known over ipc:// only; over TCP, "
                "CURVE keys say who may attach"
            )


class OwnerTold(Exception):
    """The core has failed, and the frontend that spawned it knows why."""


def serve(args: EngineArgs, listen: Listen, lifeline_fd: int = -1, early: EarlyWorker | None = None) -> int:
    """Run a core until it is stopped. Returns the exit status: 0, or 1 after saying the cause of a failure.

    The cause is logged, unless the frontend that spawned this core was told, which says it itself.

    early: a worker that was started already.
    """
    try:
        with ExitStack() as stack:
            run(args, listen, lifeline_fd, early, stack)
        return 0
    except Exception as error:
        logger.debug("traceback", exc_info=True)
        if not isinstance(error, OwnerTold):
            logger.error("engine core failed: %s", error)
        return 1


def run(
    args: EngineArgs, listen: Listen, lifeline_fd: int, early: EarlyWorker | None, stack: ExitStack
) -> None:
    """Bind the address, load the model and serve; everything opened is closed with `stack`.

    The address is bound first, so frontends may connect at once; they get an answer when the model is loaded,
    or loading has failed.
    """
    raise_descriptor_limit()
    return_freed_memory()
    take_short_turns()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.term)
    lock = AddressLock(listen.address)
    stack.callback(lock.release)
    sweep(runtime_dir())
    keys = CurveKeys.load(listen.curve_secret) if listen.curve_secret else None
    access = Access(listen.allowed_users, listen.curve_clients, listen.rights)
    gate = Gate(context, access.admit)
    stack.callback(gate.stop)
    gate.start()
    # The gate knows the user of each process that connects, so the socket's file may be open to all users.
    mode = 0o666 if listen.allowed_users else 0o600
    socket = bind_router(
        context,
        listen.address,
        keys,
        guarded=True,
        mode=mode,
        receive_queue=RECEIVE_QUEUE,
        send_queue=SEND_QUEUE,
    )
    stack.callback(socket.close, FLUSH_MS)
    logger.info("listening on %s", listen.address)
    clients = Clients(socket, env_float("PAGEWIRE_HEARTBEAT_TIMEOUT_S", 30.0), access)
    try:
        config, workers, publisher, peers = prepare(args, clients, context, early, listen.address, keys)
        if publisher is not None:
            stack.callback(publisher.close)
        if peers is not None:
            stack.callback(peers.close)
        core = open_core(config, workers, clients, lifeline_fd, publisher, peers)
        if listen.announce:
            core.on_ready = lambda: print(f"ready {listen.address}", flush=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: core.stop(listen.drain_seconds))
        core.run()
    except Exception as error:
        if clients.told and lifeline_fd >= 0:
            raise OwnerTold from error
        raise
    logger.info("stopped")


def prepare(
    args: EngineArgs,
    clients: Clients,
    context: zmq.Context[zmq.Socket[bytes]],
    early: EarlyWorker | None,
    address: str,
    keys: CurveKeys | None,
) -> tuple[EngineConfig, WorkerGroup, KVPublisher | None, PeerLinks | None]:
    """The configuration, the workers (only an early one is started yet), the publisher of KV events, and the other
    cores from which blocks are fetched. address: of this core, which may be among theirs.

    An error, as of `EngineConfig.resolve` and `open_launcher`, is also sent to the frontends that wait to attach.
    """
    try:
        needed = CORE_DESCRIPTORS + WORKER_DESCRIPTORS * args.num_workers
        require_descriptors(needed, "an engine core with these options")
        config, events = EngineConfig.resolve(args), args.resolved_kv_events()
        others = [other for other in args.resolved_kv_peers() if other != address]
        peers = None if args.kv_peers is None else PeerLinks(others, keys)
        publisher = None if events is None else KVPublisher(context, events, args.block_size)
        workers = WorkerGroup(config.worker_config(), open_launcher(args, context, early))
        return config, workers, publisher, peers
    except Exception as error:
        clients.refuse_all(error)
        raise
