"""Worker processes on any machines, run by agents that join: `pagewire worker --join ADDRESS --key FILE`.

The launcher listens over TCP, with CURVE keys of the group's own. A thread talks to the agents, so that the core
waits for none of them. An agent that is gone is noticed when a sign of life cannot be sent to it, or after the time
of `PAGEWIRE_HEARTBEAT_TIMEOUT_S` without one of its own; then its worker counts as lost.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq

from pagewire.engine_core.workers.launchers.joined_process import JoinedProcess
from pagewire.engine_core.workers.launchers.listener import WorkerListener, admit_workers
from pagewire.ipc.environment import env_float
from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.host.gate import Gate
from pagewire.ipc.join.group_key import GroupKey
from pagewire.ipc.join.join_messages import (
    ANY_RANK,
    Alive,
    Dismissed,
    Ended,
    EndWorker,
    FromAgent,
    Join,
    Joined,
    JoinRefused,
    Started,
    StartWorker,
)
from pagewire.ipc.quoting import MAX_QUOTED, shortened
from pagewire.ipc.version import __version__
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.messages import PROTOCOL
from pagewire.ipc.wire.sockets import bind_router, receive, send

logger = logging.getLogger("pagewire.core")

TICK_SECONDS = 1.0  # between two signs of life
REMIND_SECONDS = 10.0  # between two log lines about ranks that are missing
FLUSH_MS = 500  # how long closing may take, so that agents learn that the core has stopped
MAX_HEAD_BYTES = 1 << 16
ANY_HOST = ("0.0.0.0", "::", "*")


@dataclass(slots=True)
class JoinedAgent:
    """An agent that has joined. name: its ZeroMQ routing id. last_sign: monotonic time of its last message."""

    name: bytes
    machine: str
    last_sign: float


class JoinLauncher:
    """Has worker processes started by agents that join.

    address: tcp://HOST:PORT to listen at. key_file: of the group's key, made if it does not exist.
    size: number of ranks.

    Attributes:
        address: where agents join; with the port that the system chose, if `address` has port 0.

    Raises:
        OSError: the address is in use, or the key cannot be read. ValueError: a bad address or key.
    """

    def __init__(self, address: str, key_file: Path, size: int) -> None:
        self.size, self._key_file = size, key_file
        key = GroupKey.read_or_make(key_file)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gate(self._context, admit_workers(key))
        try:
            self._socket = bind_router(self._context, address, key.core)
            self._socket.router_handover = (
                1  # an agent that connects again may be faster than the end of before
            )
            self.address = reachable(self._socket.last_endpoint.decode())  # type: ignore[union-attr]
            self.listener = WorkerListener.tcp(self._context, urlsplit(address).hostname or "", key)
        except BaseException:
            self._context.destroy(0)
            raise
        self._port = urlsplit(self.listener.address).port or 0
        self._codec: Codec[FromAgent] = Codec(FromAgent, MAX_HEAD_BYTES)
        self._silence = env_float("PAGEWIRE_HEARTBEAT_TIMEOUT_S", 30.0)
        self._agents: dict[int, JoinedAgent] = {}  # by rank
        self._processes: dict[int, JoinedProcess] = {}  # the newest of each rank
        self._orders: deque[tuple[str, JoinedProcess]] = deque()  # of the core's thread
        self._wake_fd, self._wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = False
        self._next_tick = self._next_reminder = 0.0
        self._gate.start()
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._thread.start()
        logger.info("workers join at %s with the key in %s", self.address, key_file)

    # ------------------------------------------------------------ the core's thread

    def start(self, rank: int, address: str, identity: str) -> JoinedProcess:
        """See `Launcher.start`. The process waits until its rank has joined."""
        waits_for = (
            f"rank {rank} has not joined (pagewire worker --join {self.address} --key {self._key_file})"
        )
        process = JoinedProcess(rank, identity, waits_for, self._end)
        self._order("start", process)
        return process

    def _end(self, process: JoinedProcess, kill: bool) -> None:
        self._order("kill" if kill else "release", process)

    def _order(self, what: str, process: JoinedProcess) -> None:
        self._orders.append((what, process))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the thread wakes up anyway
            os.write(self._wake_write_fd, b"x")

    def start_ahead(self, rank: int, address: str) -> None:
        """Nothing: agents start processes when their rank is lost."""

    def end_ahead(self) -> None:
        """Nothing: none is started ahead."""

    def close(self) -> None:
        """Dismiss the agents, and close the sockets."""
        self._closing = True
        self._wake()
        self._thread.join()
        self.listener.close()
        self._gate.stop()
        self._context.destroy(0)
        os.close(self._wake_fd)
        os.close(self._wake_write_fd)

    # ------------------------------------------------------------ the launcher's thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._closing:
            poller.poll(int(TICK_SECONDS * 1000))
            with suppress(BlockingIOError):
                os.read(self._wake_fd, 4096)
            self._obey()
            self._receive()
            self._tick(time.monotonic())
        self._obey()
        for agent in self._agents.values():
            self._send(agent.name, Dismissed())
        self._socket.close(FLUSH_MS)

    def _obey(self) -> None:
        """Do what the core's thread has ordered."""
        while self._orders:
            what, process = self._orders.popleft()
            agent = self._agents.get(process.rank)
            if what == "start":
                self._processes[process.rank] = process
                self._give(process)
            elif agent is None or process.obstacle is not None:
                process.given()
                process.end("was never started")
            elif process.exit_cause is None:
                self._send(agent.name, EndWorker(process.identity.decode(), what == "kill"))

    def _give(self, process: JoinedProcess) -> None:
        """Have a process started, if the agent of its rank has joined."""
        if (agent := self._agents.get(process.rank)) is not None and process.exit_cause is None:
            process.given()
            self._send(agent.name, StartWorker(process.identity.decode(), self._port))

    def _receive(self) -> None:
        while True:
            try:
                name, *frames = receive(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(bytes(name), self._codec.decode(frames))
            except ProtocolError as error:
                logger.warning("refused a worker that wants to join: %s", error)
                self._send(bytes(name), JoinRefused(f"{error}: is it another version than {__version__}?"))

    def _take(self, name: bytes, message: FromAgent) -> None:
        if isinstance(message, Join):
            self._admit(name, message)
            return
        rank = next((rank for rank, agent in self._agents.items() if agent.name == name), None)
        if rank is None:
            return  # it has been lost meanwhile, and will join again
        self._agents[rank].last_sign = time.monotonic()
        process = self._processes.get(rank)
        if isinstance(message, Alive) or process is None or message.identity.encode() != process.identity:
            return
        if isinstance(message, Started):
            process.pid = message.pid
        elif isinstance(message, Ended):
            process.end(shortened(message.cause))

    def _admit(self, name: bytes, join: Join) -> None:
        """Give an agent its place in the group, or refuse it."""
        for rank in [rank for rank, agent in self._agents.items() if agent.name == name]:
            self._lose(rank, "has joined again")
        machine = f"{shortened(join.machine, MAX_QUOTED)} (pid {join.pid})"
        try:
            rank = self._place_for(join, machine)
        except ValueError as error:
            logger.warning("refused the worker of %s: %s", machine, error)
            self._send(name, JoinRefused(str(error)))
            return
        self._agents[rank] = JoinedAgent(name, machine, time.monotonic())
        self._send(name, Joined(rank, self.size))
        logger.info("rank %d has joined from %s: %d of %d", rank, machine, len(self._agents), self.size)
        if (process := self._processes.get(rank)) is not None:
            self._give(process)

    def _place_for(self, join: Join, machine: str) -> int:
        """The rank of an agent.

        Raises:
            ValueError: there is no place for it.
        """
        if join.protocol != PROTOCOL or join.version != __version__:
            raise ValueError(
                f"the worker has pagewire {shortened(join.version, MAX_QUOTED)} (protocol {join.protocol}), the "
                f"core {__version__} (protocol {PROTOCOL}): install the same version"
            )
        self._check_agents(time.monotonic())  # one that has just ended makes room
        free = [rank for rank in range(self.size) if rank not in self._agents]
        if join.rank == ANY_RANK:
            if not free:
                raise ValueError(f"all {self.size} ranks have joined already")
            return free[0]
        if not 0 <= join.rank < self.size:
            raise ValueError(f"there is no rank {join.rank} in a group of {self.size} (-tp times -pp)")
        if join.rank not in free:
            raise ValueError(f"rank {join.rank} has joined already, from {self._agents[join.rank].machine}")
        return join.rank

    def _tick(self, now: float) -> None:
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        self._check_agents(now)
        missing = [str(rank) for rank in range(self.size) if rank not in self._agents]
        if missing and self._processes and now >= self._next_reminder:
            self._next_reminder = now + REMIND_SECONDS
            logger.info(
                "waiting for rank%s %s to join at %s: %d of %d have",
                "s" if len(missing) > 1 else "",
                ", ".join(missing),
                self.address,
                len(self._agents),
                self.size,
            )

    def _check_agents(self, now: float) -> None:
        """Send a sign of life to all agents; those that get or send none are lost."""
        for rank, agent in list(self._agents.items()):
            if not self._send(agent.name, Alive()):
                self._lose(rank, "is gone")
            elif now - agent.last_sign > self._silence:
                self._lose(rank, f"has been silent for {self._silence:g} s")

    def _lose(self, rank: int, why: str) -> None:
        agent = self._agents.pop(rank)
        logger.warning("rank %d of %s %s", rank, agent.machine, why)
        process = self._processes.get(rank)
        if process is not None and process.obstacle is None:
            process.end(f"was lost: its agent on {agent.machine} {why}")

    def _send(self, name: bytes, message: Any) -> bool:
        """Send a message to an agent without waiting; False if it is gone, or reads nothing."""
        try:
            send(self._socket, [name, *self._codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


def reachable(address: str) -> str:
    """An address that others can connect to: for one that listens at all interfaces, with this machine's name."""
    url = urlsplit(address)
    return f"tcp://{socket.gethostname()}:{url.port}" if url.hostname in ANY_HOST else address
