"""The agent of a worker that joins a group: `pagewire worker --join`.

It joins the group of a core as a rank, and runs that rank's worker processes: the core says when to start and end
them, and hears how they end. They end with the agent, however that ends. If the core is lost, the agent kills its
worker and waits for another core at the same address.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq

from pagewire.ipc.environment import env_float
from pagewire.ipc.errors import EngineDeadError, error_text
from pagewire.ipc.host.lifeline import Child, exit_cause
from pagewire.ipc.join.group_key import GroupKey
from pagewire.ipc.join.join_messages import (
    ANY_RANK,
    Alive,
    Dismissed,
    Ended,
    EndWorker,
    Join,
    Joined,
    JoinRefused,
    Started,
    StartWorker,
    ToAgent,
)
from pagewire.ipc.quoting import shortened
from pagewire.ipc.version import __version__
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.messages import PROTOCOL
from pagewire.ipc.wire.sockets import new_dealer, next_event, receive, send

logger = logging.getLogger("pagewire.worker")

WORKER_COMMAND = (sys.executable, "-m", "pagewire.workers.process.main")
TICK_MS = 1000
STOP_SECONDS = 5.0  # for a worker to exit by itself
MAX_CAUSE = 500  # characters of a worker's exit cause that the core gets
REACHED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
LOST = zmq.EVENT_DISCONNECTED


class Agent:
    """Joins the group of a core, and runs the worker processes of a rank.

    address: tcp://HOST:PORT where the core listens. key_file: of the group's key. rank: None for any that is free.
    patience: seconds to wait for a core, at first and after it was lost. command: the program of a worker.

    Raises:
        ValueError: a bad address or key. OSError: the key cannot be read.
    """

    def __init__(
        self,
        address: str,
        key_file: Path,
        rank: int | None = None,
        patience: float = 300.0,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._address, self._key_file, self._patience = address, key_file, patience
        self._command = command
        self._join = Join(PROTOCOL, __version__, socket.gethostname(), os.getpid())
        self._join.rank = ANY_RANK if rank is None else rank
        self._silence = env_float("PAGEWIRE_HEARTBEAT_TIMEOUT_S", 30.0)
        self._codec: Codec[ToAgent] = Codec(ToAgent)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            key = GroupKey.read(key_file).worker
            self._socket = new_dealer(self._context, address, f"agent-{uuid.uuid4().hex}".encode(), key)
        except BaseException:
            self._context.destroy(0)
            raise
        self._monitor = self._socket.get_monitor_socket(REACHED | REFUSED | LOST)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor):
            self._poller.register(source, zmq.POLLIN)
        self._worker: Child | None = None
        self._identity, self._exit_fd = "", -1
        self._reached = self._parting = self._dismissed = False
        self._heard_at = time.monotonic()  # the last message of the core, or the beginning of the wait for it

    def run(self) -> None:
        """Serve until the core dismisses this agent.

        Raises:
            ValueError: the core refuses this agent; the text says why.
            PermissionError: the core has another key. EngineDeadError: there is no core for too long.
        """
        self._socket.connect(self._address)
        try:
            while not self._dismissed:
                ready = {source for source, _ in self._poller.poll(TICK_MS)}
                if self._monitor in ready:
                    self._look_at_connection()
                if self._exit_fd in ready:
                    self._report_end()
                if self._socket in ready:
                    self._receive()
                self._check_core(time.monotonic())
        finally:
            self._end_worker(kill=True)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(0)

    # ------------------------------------------------------------ the core

    def _look_at_connection(self) -> None:
        while self._monitor.poll(0):
            event = next_event(self._monitor)
            if event & REACHED:
                self._reached, self._parting, self._heard_at = True, False, time.monotonic()
                self._send(self._join)
            elif self._parting:
                continue  # this side has closed the connection
            elif event & REFUSED or not self._reached:
                raise PermissionError(
                    f"{self._address} closed the connection: it is not where workers join, or its key is not that "
                    f"in {self._key_file}"
                )
            else:
                self._lose_core("the core has closed the connection")

    def _lose_core(self, why: str) -> None:
        logger.warning("%s; waiting for a core at %s", why, self._address)
        self._reached, self._heard_at = False, time.monotonic()
        self._end_worker(kill=True)

    def _check_core(self, now: float) -> None:
        """Notice a core that is silent or does not come.

        Raises:
            EngineDeadError: there is none for too long.
        """
        silent = now - self._heard_at
        if self._reached and silent > self._silence:
            self._lose_core(f"the core has been silent for {silent:.0f} s")
            self._parting = True
            self._socket.disconnect(self._address)
            self._socket.connect(self._address)
        elif not self._reached and silent > self._patience:
            raise EngineDeadError(f"no core for workers at {self._address} (waited {silent:.0f} s)")

    def _receive(self) -> None:
        while not self._dismissed:
            try:
                frames = receive(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            self._obey(self._codec.decode(frames))

    def _obey(self, message: ToAgent) -> None:
        """Do what the core says.

        Raises:
            ValueError: it refuses this agent.
        """
        if isinstance(message, Alive):
            self._send(Alive())
        elif isinstance(message, Joined):
            logger.info("joined %s as rank %d of %d", self._address, message.rank, message.size)
            self._join.rank = message.rank  # the same again, should the core be lost
        elif isinstance(message, StartWorker):
            self._start_worker(message)
        elif isinstance(message, EndWorker):
            if message.identity == self._identity:
                self._end_worker(kill=message.kill)
        elif isinstance(message, JoinRefused):
            raise ValueError(f"{self._address}: {message.error}")
        elif isinstance(message, Dismissed):
            logger.info("the core has stopped")
            self._dismissed = True
            if self._worker is not None:
                self._worker.stop(STOP_SECONDS)

    def _send(self, message: Any) -> None:
        with suppress(zmq.Again):  # the queue is full: the core is lost, or will be found silent
            send(self._socket, self._codec.encode(message), zmq.NOBLOCK)

    # ------------------------------------------------------------ the worker

    def _start_worker(self, message: StartWorker) -> None:
        self._end_worker(kill=True)
        url = urlsplit(self._address)
        host = url.netloc.rpartition(":")[0]
        options = ["--connect", f"tcp://{host}:{message.port}", "--identity", message.identity]
        try:
            self._worker = Child([*self._command, *options, "--key", str(self._key_file)])
            self._exit_fd = os.pidfd_open(self._worker.pid)
        except (OSError, MemoryError) as error:
            self._end_worker(kill=True)
            text = shortened(f"could not be started: {error_text(error)}", MAX_CAUSE)
            self._send(Ended(message.identity, text))
            return
        self._identity = message.identity
        self._poller.register(self._exit_fd, zmq.POLLIN)
        self._send(Started(message.identity, self._worker.pid))
        logger.info("worker %s started (pid %d)", message.identity, self._worker.pid)

    def _end_worker(self, *, kill: bool) -> None:
        """Kill the worker and forget it, or let it exit by itself; its exit is reported later."""
        if self._worker is None:
            return
        if not kill:
            self._worker.release()
            return
        self._worker.kill()
        self._report_end()

    def _report_end(self) -> None:
        """Tell the core how the worker has ended."""
        if self._worker is None:
            return
        cause = exit_cause(self._worker.kill())
        self._worker = None
        if self._exit_fd >= 0:
            self._poller.unregister(self._exit_fd)
            os.close(self._exit_fd)
            self._exit_fd = -1
        logger.info("worker %s %s", self._identity, cause)
        self._send(Ended(self._identity, cause))
        self._identity = ""
