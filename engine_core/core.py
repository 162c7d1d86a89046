"""The engine core's loop: one thread that handles all messages and keeps the worker busy.

    wait -> worker's messages (commit) -> frontends' messages (add, abort, call) -> plan and launch -> deliver

Launching comes before delivering: the worker computes the next step while the core encodes the last results.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import zmq

from pagewire.engine_core.clients.clients import GREETING_MS, Clients
from pagewire.engine_core.clients.early import EarlyFrontends
from pagewire.engine_core.engine import EngineHost
from pagewire.engine_core.serving import Serving, shortage
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.supervisor import CoreError, WorkerSupervisor
from pagewire.ipc.errors import EngineStoppedError, error_text, received_error
from pagewire.ipc.host.heap import freeze_heap, release_spare_memory
from pagewire.ipc.wire import messages
from pagewire.ipc.wire.worker_messages import Ready, WorkerFailed

logger = logging.getLogger("pagewire.core")

TICK_SECONDS = (
    1.0  # interval of heartbeats, and the longest wait for a message: timeouts are checked this often
)
TIDY_SECONDS = 1.0  # between two times that spare memory is given back
SAVE_SECONDS = 60.0  # after the last request, for KV blocks to be written to disk
# The longest wait while a frontend has unsent deltas. No event says when its socket has room again, so sending
# is retried this often.
BEHIND_SECONDS = 0.02


class EngineOpener(Protocol):
    """Opens what a core serves with; see `wiring.py`."""

    def begin(self) -> None:
        """Begin with what takes long, while the workers start."""

    def open(self, host: EngineHost, ready: Ready) -> Serving:
        """What serves the requests of workers that are ready. May block.

        Raises:
            ValueError, RuntimeError: the options or the files of the model do not fit; the text says why.
        """

    def close(self) -> None:
        """End what was begun."""


class EngineCore:
    """The loop that connects scheduler, worker and frontends.

    opener: opens what runs requests, once the workers are ready.
    lifeline_fd: a file descriptor that becomes readable when the process that spawned this core has ended, upon
        which the core stops; -1 for none.

    Attributes:
        serving: what runs requests; None until the first worker is ready.
        on_ready: called then.
    """

    def __init__(
        self,
        worker: WorkerGroup,
        clients: Clients,
        opener: EngineOpener,
        lifeline_fd: int = -1,
    ) -> None:
        self.worker, self.clients, self._opener = worker, clients, opener
        self.supervisor = WorkerSupervisor(worker, self._awaits_workers)
        self.serving: Serving | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self._early = EarlyFrontends(clients)
        self._started_at = time.monotonic()
        self._lifeline_fd = lifeline_fd
        self._poller = zmq.Poller()
        for source in (clients.socket, worker.socket, worker.exit_fd):
            self._poller.register(source, zmq.POLLIN)
        self._wake_fd, self._wake_write_fd = os.pipe()
        os.set_blocking(self._wake_write_fd, False)
        for fd in (self._wake_fd, lifeline_fd):
            if fd >= 0:
                self._poller.register(fd, zmq.POLLIN)
        self._stop_by: float | None = None
        self._save_by = 0.0
        self._next_heartbeat = self._next_tidying = 0.0

    # ------------------------------------------------------------ life

    def run(self) -> None:
        """Serve until `stop` is called or the parent process has ended.

        Raises:
            CoreError: the worker cannot be started, or a new one has too little memory.
            ValueError: the model cannot be loaded with these options; the text says why.
        """
        cause: BaseException = EngineStoppedError("the engine core has shut down")
        try:
            self._start_worker()
            self._opener.begin()
            while not self._is_over():
                self._iterate()
        except BaseException as error:
            cause = error
            raise
        finally:
            self._announce_end(cause)

    def stop(self, drain_seconds: float, save_seconds: float = SAVE_SECONDS) -> None:
        """Refuse new requests, give running ones `drain_seconds` to finish, then end; a second call ends at once.

        May be called in a signal handler. save_seconds: for saving what the next start can use, after that.
        """
        now, again = time.monotonic(), self._stop_by is not None
        self._stop_by = now if again else now + drain_seconds
        self._save_by = now if again else self._stop_by + save_seconds
        self._wake()

    def _wake(self) -> None:
        """Interrupt the wait of the loop. May be called in a signal handler and in any thread."""
        with suppress(BlockingIOError):  # the pipe is full, so the loop wakes up anyway
            os.write(self._wake_write_fd, b"x")

    def _is_stopping(self) -> bool:
        """True once `stop` was called: no new requests are accepted."""
        return self._stop_by is not None

    def _is_over(self) -> bool:
        if self._stop_by is None:
            return False
        if (serving := self.serving) is None:
            return True
        now = time.monotonic()
        if not serving.is_idle and now < self._stop_by:
            return False
        return now >= self._save_by or serving.has_saved()

    def _iterate(self) -> None:
        serving = self.serving
        wait = BEHIND_SECONDS if self.clients.behind else TICK_SECONDS
        if serving is not None and serving.has_work:
            wait = 0.0
        elif (due := self.supervisor.next_start) is not None:
            wait = min(wait, max(0.0, due - time.monotonic()))
        if serving is not None:
            wait = min(wait, serving.wait(time.monotonic()))
        ready = {source for source, _ in self._poller.poll(math.ceil(wait * 1000))}
        awake_at = time.monotonic()
        if self._lifeline_fd in ready:
            self.stop(0.0, 0.0)
        if self._wake_fd in ready:
            os.read(self._wake_fd, 64)
        if self.worker.socket in ready:
            self._receive_from_worker()
        if self.worker.exit_fd in ready:
            self._worker_lost()
        self._receive_from_frontends(arrived=self.clients.socket in ready)
        self._check_timers()
        if (serving := self.serving) is not None:
            serving.advance(awake_at)
        if (now := time.monotonic()) >= self._next_tidying:  # steps are launched first: it takes milliseconds
            self._next_tidying = now + TIDY_SECONDS
            if serving is not None:
                serving.tidy()
            release_spare_memory()

    def _receive_from_frontends(self, *, arrived: bool) -> None:
        if self.serving is None:
            if arrived:
                self._early.receive()
        elif arrived or self.serving.intake.has_work:
            self.serving.intake.receive()

    def _check_timers(self) -> None:
        now = time.monotonic()
        self.clients.flush()
        self._check_worker(now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + TICK_SECONDS
            self.clients.heartbeat(now)

    def _announce_end(self, cause: BaseException) -> None:
        told = self._early.refuse(cause) or isinstance(cause, EngineStoppedError)
        if self.serving is None:
            # A worker may fail before the frontend that spawned this core has greeted.
            self.clients.refuse_all(cause, wait_ms=0 if told else GREETING_MS)
        else:
            self.serving.close()
        self._opener.close()
        for client in list(self.clients.attached.values()):
            stopped = isinstance(cause, EngineStoppedError)
            self.clients.send(client.identity, messages.CoreDying(error_text(cause), stopped))
        self.worker.stop()

    # ------------------------------------------------------------ the worker

    def _awaits_workers(self) -> bool:
        """True if requests or calls wait for workers."""
        return self.serving is not None and self.serving.awaits_workers

    def _check_worker(self, now: float) -> None:
        """Kill workers that hang, and start new ones when their time has come; end what has waited for too long."""
        self.supervisor.check(now)
        if self.serving is not None:
            self.serving.check_timers(now)
        if (due := self.supervisor.next_start) is not None and now >= due:
            self._start_worker()

    def _receive_from_worker(self) -> None:
        for message in self.worker.messages():
            if isinstance(message, Ready):
                self._worker_ready(message)
            elif isinstance(message, WorkerFailed):
                if self.serving is not None or message.traceback:  # else said later
                    trace = {"traceback": message.traceback}
                    logger.error("the worker failed: %s", message.error, extra=trace)
            elif self.serving is not None:
                self.serving.receive(message)

    def _worker_ready(self, ready: Ready) -> None:
        serving = self.serving
        if serving is not None and (why := shortage(ready, serving.engine.info)) is not None:
            if not self.supervisor.is_waking:
                raise CoreError(why)
            return self.worker.kill(why)  # the call `wake_up` gets this as its error
        self.supervisor.ready(time.monotonic())
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.startup_seconds.items())
        logger.info("worker ready: %s", phases)
        (serving or self._begin_serving(ready)).worker_ready(ready)

    def _begin_serving(self, ready: Ready) -> Serving:
        """Open the engine, and attach the frontends that wait for it."""
        serving = self._opener.open(self._host(), ready)
        self.serving, info = serving, serving.engine.info
        names = info.model, info.architecture, info.dtype
        numbers = info.num_blocks, info.block_size, info.max_model_len
        logger.info(
            "engine ready: %s (%s, %s), %d KV blocks of %d tokens, max_model_len %d", *names, *numbers
        )
        if info.num_states:
            logger.info("%d state slots of %d bytes", info.num_states, ready.bytes_per_state)
        freeze_heap()
        serving.intake.welcome(self._early.take())
        self.on_ready()
        return serving

    def _host(self) -> EngineHost:
        """What there is of the engine before."""
        return EngineHost(
            self.worker, self.supervisor, self.clients, self._wake, self._is_stopping, self._started_at
        )

    def _worker_lost(self) -> None:
        self._receive_from_worker()
        was_ready, failure, serving = self.worker.ready is not None, self.worker.failure, self.serving
        was_ready = was_ready and not self.supervisor.is_waking
        why = self.worker.reap()
        if not self.supervisor.has_rested(why, time.monotonic()):
            if failure is not None and failure.fatal and not (failure.lacks_memory and serving is not None):
                raise received_error(failure.error, failure.error_type)
            self.supervisor.plan_restart(f"the worker was lost ({why})", why, time.monotonic())
        if serving is not None:
            serving.worker_lost(why, was_ready=was_ready)

    def _start_worker(self) -> None:
        if (why := self.supervisor.start(time.monotonic())) is not None and self.serving is not None:
            self.serving.start_failed(why)
