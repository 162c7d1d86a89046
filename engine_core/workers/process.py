"""The core's handle on the worker process: start, messages, supervision, restart.

    start -> WorkerHello -> WorkerConfig -> Progress ... -> Ready -> StepPlan <-> StepResult ...

A pidfd reports an exit at once; a time limit per step detects a hang.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from pagewire.ipc.codec import Codec
from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.lifeline import Child
from pagewire.ipc.messages import (
    PROTOCOL,
    FromWorker,
    Progress,
    Ready,
    WorkerConfig,
    WorkerFailed,
    WorkerHello,
)
from pagewire.ipc.sockets import bind_router, private_address, receive, send

logger = logging.getLogger("pagewire.core")

WORKER_COMMAND = (sys.executable, "-m", "pagewire.workers.main")


class Worker:
    """A worker process, which may be started again and again.

    ready: its `Ready` message, None while it is loading. failure: the cause that it gave before it exited.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: WorkerConfig,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self.address = private_address(f"worker-{os.getpid()}-{os.urandom(4).hex()}")
        self.socket = bind_router(context, self.address)
        self.ready: Ready | None = None
        self.failure: WorkerFailed | None = None
        self.num_starts = 0
        self._config = config
        self._command = command
        self._codec: Codec[FromWorker] = Codec(FromWorker)
        self._child: Child | None = None
        self._identity = b""
        self._exit_fd = -1

    @property
    def exit_fd(self) -> int:
        """A file descriptor that becomes readable when the process ends; -1 while there is no process."""
        return self._exit_fd

    @property
    def pid(self) -> int | None:
        """Process id, None while there is no process."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process. Each has an identity of its own, so late messages of an earlier one are ignored."""
        self.num_starts += 1
        self.ready = self.failure = None
        self._identity = f"worker-{self.num_starts}".encode()
        self._child = Child(
            [*self._command, "--connect", self.address, "--identity", self._identity.decode()]
        )
        self._exit_fd = os.pidfd_open(self._child.pid)
        logger.info("worker %d started (pid %d)", self.num_starts, self._child.pid)

    def messages(self) -> Iterator[FromWorker]:
        """Messages that have arrived; `WorkerHello` and `Progress` are handled here."""
        while True:
            try:
                identity, *frames = receive(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            if bytes(identity) != self._identity:
                continue
            try:
                message = self._codec.decode(frames)
            except ProtocolError as error:
                logger.error("invalid message from the worker: %s", error)
                self.kill()
                return
            if isinstance(message, WorkerHello):
                self._handshake(message)
            elif isinstance(message, Progress):
                logger.info("worker: %s took %.2f s", message.phase, message.seconds)
            else:
                if isinstance(message, Ready):
                    self.ready = message
                elif isinstance(message, WorkerFailed):
                    self.failure = message
                yield message

    def send(self, message: Any) -> None:
        """Send to the process. If it has just ended, nothing happens: `exit_fd` reports that."""
        try:
            send(self.socket, [self._identity, *self._codec.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def reap(self) -> str:
        """Clean up after the process has ended; returns the reason as text."""
        assert self._child is not None
        status = self._child.kill()
        os.close(self._exit_fd)
        self._exit_fd, self._child, self.ready = -1, None, None
        if self.failure is not None:
            return self.failure.error
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    def kill(self) -> None:
        """Kill the process; `exit_fd` reports its exit."""
        if self._child is not None:
            self._child.process.kill()

    def stop(self, timeout: float = 5.0) -> None:
        """End the process and close the socket."""
        if self._child is not None:
            self._child.stop(timeout)
            os.close(self._exit_fd)
            self._exit_fd, self._child = -1, None
        self.socket.close()

    def _handshake(self, hello: WorkerHello) -> None:
        if hello.protocol != PROTOCOL:
            self.failure = WorkerFailed(f"it uses protocol {hello.protocol}, not {PROTOCOL}", fatal=True)
            self.kill()
        else:
            self.send(self._config)


class Stopwatch:
    """Detects a hung worker: measures how long the oldest step in flight has been running.

    limit: seconds.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: float | None = None

    def restart(self, running: bool) -> None:
        """Start at zero; stop if no step is running."""
        self._since = time.monotonic() if running else None

    @property
    def expired(self) -> bool:
        """True if the oldest step has been running for longer than the limit."""
        return self._since is not None and time.monotonic() - self._since > self.limit
