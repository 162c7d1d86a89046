"""The worker process as the core sees it: started, told what to do, watched, and started again.

    start -> WorkerHello -> WorkerConfig -> Progress ... -> Ready -> StepPlan <-> StepResult ...

An exit is seen through a pidfd at once, a hang by a time limit per step.
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
    """One worker process. `ready` is what it learned while loading, or None until then."""

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
        """Becomes readable when the process ends; -1 while there is none."""
        return self._exit_fd

    @property
    def pid(self) -> int | None:
        """Process id, or None while there is none."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process. What an earlier one may still send is ignored: each has its own identity."""
        self.num_starts += 1
        self.ready = self.failure = None
        self._identity = f"worker-{self.num_starts}".encode()
        self._child = Child(
            [*self._command, "--connect", self.address, "--identity", self._identity.decode()]
        )
        self._exit_fd = os.pidfd_open(self._child.pid)
        logger.info("worker %d started (pid %d)", self.num_starts, self._child.pid)

    def messages(self) -> Iterator[FromWorker]:
        """What the process has sent, less what belongs to its start."""
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
        """Send to the process. If it is gone already, its exit will tell."""
        try:
            send(self.socket, [self._identity, *self._codec.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def reap(self) -> str:
        """Take note that the process has ended: why, in words."""
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
        """End the process now; its exit is noticed as any other."""
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
    """Seconds since a step was launched with nothing else in flight; tells a hung worker."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: float | None = None

    def restart(self, running: bool) -> None:
        """Begin anew, or stop if nothing is running."""
        self._since = time.monotonic() if running else None

    @property
    def expired(self) -> bool:
        """True once the limit is passed."""
        return self._since is not None and time.monotonic() - self._since > self.limit
