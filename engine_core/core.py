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

import zmq

from pagewire.engine_core.adapters.table import AdapterTable
from pagewire.engine_core.admission.lobby import Lobby, ended
from pagewire.engine_core.clients.block_events import BlockEvents
from pagewire.engine_core.clients.clients import GREETING_MS, Clients
from pagewire.engine_core.clients.control import Control
from pagewire.engine_core.clients.intake import MessageIntake
from pagewire.engine_core.clients.kv_events import KVPublisher
from pagewire.engine_core.clients.metrics import Metrics, summary
from pagewire.engine_core.clients.requests import EngineRequests
from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.grammar.start import begin_tokenizer, open_grammars
from pagewire.engine_core.media.start import open_media, start_media
from pagewire.engine_core.media.store import MediaStore
from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.speculation import open_speculation
from pagewire.engine_core.steps import StepDriver
from pagewire.engine_core.workers.group import GroupReply, WorkerGroup
from pagewire.engine_core.workers.supervisor import CoreError, WorkerSupervisor
from pagewire.ipc.errors import EngineStoppedError, error_text, received_error
from pagewire.ipc.host.heap import freeze_heap, release_spare_memory
from pagewire.ipc.wire import messages
from pagewire.ipc.wire.lora import AdapterLoaded
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.worker_messages import Ready, StepResult, WorkerFailed

logger = logging.getLogger("pagewire.core")

TICK_SECONDS = (
    1.0  # interval of heartbeats, and the longest wait for a message: timeouts are checked this often
)
TIDY_SECONDS = 1.0  # between two times that spare memory is given back
# The longest wait while a frontend has unsent deltas. No event says when its socket has room again, so sending
# is retried this often.
BEHIND_SECONDS = 0.02


class EngineCore:
    """The loop that connects scheduler, worker and frontends.

    lifeline_fd: a file descriptor that becomes readable when the process that spawned this core has ended, upon
        which the core stops; -1 for none.
    publisher: publishes what becomes of KV blocks; None if nothing is published.

    Attributes:
        adapters: LoRA adapters; None if none are served. media: pictures and sound; None if none are taken.

    Attributes without a value in `__init__` exist once the first worker is ready (`started`).
    """

    scheduler: Scheduler
    metrics: Metrics
    requests: EngineRequests
    steps: StepDriver
    block_events: BlockEvents
    grammars: Grammars
    lobby: Lobby
    info: EngineInfo
    adapters: AdapterTable | None
    media: MediaStore | None

    def __init__(
        self,
        config: EngineConfig,
        worker: WorkerGroup,
        clients: Clients,
        lifeline_fd: int = -1,
        publisher: KVPublisher | None = None,
    ) -> None:
        self.config = config
        self.worker = worker
        self.supervisor = WorkerSupervisor(worker, lambda: self.started and self.control.awaits_workers)
        self.clients = clients
        self.control: Control = Control(self)
        self.intake = MessageIntake(self)
        self.started: bool = False
        self.started_at = time.monotonic()
        self.on_ready: Callable[[], None] = lambda: None
        self._lifeline_fd, self._publisher = lifeline_fd, publisher
        self._poller = zmq.Poller()
        for source in (clients.socket, worker.socket, worker.exit_fd):
            self._poller.register(source, zmq.POLLIN)
        self._wake_fd, self._wake_write_fd = os.pipe()
        os.set_blocking(self._wake_write_fd, False)
        for fd in (self._wake_fd, lifeline_fd):
            if fd >= 0:
                self._poller.register(fd, zmq.POLLIN)
        self._media_start = start_media(config)
        self._stop_by: float | None = None
        self._next_heartbeat = self._next_stats = self._next_tidying = 0.0

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
            self._tokenizer = begin_tokenizer(self.config)
            while not self._is_over():
                self._iterate()
        except BaseException as error:
            cause = error
            raise
        finally:
            self._announce_end(cause)

    def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, give running ones `drain_seconds` to finish, then end; a second call ends at once.

        May be called in a signal handler.
        """
        now = time.monotonic()
        self._stop_by = now if self._stop_by is not None else now + drain_seconds
        self._wake()

    def _wake(self) -> None:
        """Interrupt the wait of the loop. May be called in a signal handler and in any thread."""
        with suppress(BlockingIOError):  # the pipe is full, so the loop wakes up anyway
            os.write(self._wake_write_fd, b"x")

    @property
    def stopping(self) -> bool:
        """True once `stop` was called: no new requests are accepted."""
        return self._stop_by is not None

    def _is_over(self) -> bool:
        if self._stop_by is None:
            return False
        idle = not self.started or not (
            self.scheduler.num_unfinished
            or self.lobby.num_processing
            or self.lobby.num_compiling
            or self.lobby.num_loading
            or self.clients.behind
        )
        return idle or time.monotonic() >= self._stop_by

    def _iterate(self) -> None:
        wait = BEHIND_SECONDS if self.clients.behind else TICK_SECONDS
        if self.started and (self.lobby.has_work or self.intake.has_work):
            wait = 0.0
        elif (due := self.supervisor.next_start) is not None:
            wait = min(wait, max(0.0, due - time.monotonic()))
        if self.started:
            wait = min(wait, self.block_events.wait(time.monotonic()))
        ready = {source for source, _ in self._poller.poll(math.ceil(wait * 1000))}
        awake_at = time.monotonic()
        if self._lifeline_fd in ready:
            self.stop(0.0)
        if self._wake_fd in ready:
            os.read(self._wake_fd, 64)
        if self.worker.socket in ready:
            self._receive_from_worker()
        if self.worker.exit_fd in ready:
            self._worker_lost()
        if self.clients.socket in ready or self.intake.has_work:
            self.intake.receive()
        self._check_timers()
        if self.started:
            self._advance()
            self.metrics.iteration_seconds.observe(time.monotonic() - awake_at)
        if (now := time.monotonic()) >= self._next_tidying:  # steps are launched first: it takes milliseconds
            self._next_tidying = now + TIDY_SECONDS
            if self.started:
                self.grammars.limit_memory()
            release_spare_memory()

    def _advance(self) -> None:
        for client in self.clients.lost():
            self.requests.drop(client.requests)
        self.admit()
        self.control.advance()
        if not self._holds_steps:
            self.steps.launch()
        self.requests.deliver()
        self.block_events.flush(time.monotonic())

    def _check_timers(self) -> None:
        now = time.monotonic()
        self.clients.flush()
        self._check_worker(now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + TICK_SECONDS
            self.clients.heartbeat(now)
        if self.started and now >= self._next_stats:
            self._next_stats = now + self.config.args.log_stats_interval
            self._log_stats(now)

    def _check_worker(self, now: float) -> None:
        """Kill workers that hang, and start new ones when their time has come; end what has waited for too long."""
        self.supervisor.check(now)
        if self.started:
            self.control.check_timers(now)
            if self.adapters is not None:
                self.requests.refuse([ended(*refused) for refused in self.adapters.expire(now)])
        if (due := self.supervisor.next_start) is not None and now >= due:
            self._start_worker()

    def _log_stats(self, now: float) -> None:
        """Compute the rates of the last interval, and log them unless the engine was idle; warn of preemptions."""
        self.requests.deliver()  # requests count as finished when their end is sent
        self.metrics.rates.update(self.scheduler.stats, now)
        number = self.scheduler.stats.num_cache_preemptions
        if (warning := self.metrics.preemption_warnings.text(number, now)) is not None:
            logger.warning("%s", warning)
        busy = self.scheduler.num_unfinished or self.metrics.rates.prompt or self.metrics.rates.output
        if busy and not self.config.args.disable_log_stats:
            line, facts = summary(self)
            logger.info("%s", line, extra={"facts": facts})

    def _announce_end(self, cause: BaseException) -> None:
        told = self.intake.refuse_early(cause) or isinstance(cause, EngineStoppedError)
        if not self.started:
            # A worker may fail before the frontend that spawned this core has greeted.
            self.clients.refuse_all(cause, wait_ms=0 if told else GREETING_MS)
        else:
            self.grammars.close()
        if self._media_start is not None:
            self._media_start.processor.close()
        for client in list(self.clients.attached.values()):
            stopped = isinstance(cause, EngineStoppedError)
            self.clients.send(client.identity, messages.CoreDying(error_text(cause), stopped))
        self.worker.stop()

    # ------------------------------------------------------------ the worker

    def _receive_from_worker(self) -> None:
        for message in self.worker.messages():
            if isinstance(message, StepResult):
                self.steps.commit(message)
            elif isinstance(message, GroupReply):
                self.control.receive(message)
            elif isinstance(message, AdapterLoaded):
                self._adapter_loaded(message)
            elif isinstance(message, Ready):
                self._worker_ready(message)
            elif isinstance(message, WorkerFailed) and (self.started or message.traceback):  # else said later
                logger.error("the worker failed: %s", message.error, extra={"traceback": message.traceback})

    def _worker_ready(self, ready: Ready) -> None:
        self.supervisor.ready(time.monotonic())
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.startup_seconds.items())
        logger.info("worker ready: %s", phases)
        if not self.started:
            pipelined = self.config.args.pipeline_parallel_size > 1
            speculation = open_speculation(self.config.speculation, pipelined=pipelined)
            self.scheduler = Scheduler(self.config.scheduler_config(ready), speculation)
            self.media = open_media(self._media_start, ready, self.scheduler.config, self._wake)
            self.info = self.config.engine_info(ready, None if self.media is None else self.media.info)
            self.clients.accept(self.info)
            self.grammars = open_grammars(self.config, self._tokenizer, ready, self._wake)
            self.metrics = Metrics(self.info.max_model_len)
            limits = self.config.adapter_limits(ready)
            self.adapters = None if limits is None else AdapterTable(limits)
            max_waiting, on_compiled = self.config.args.max_waiting, self.metrics.grammar.observe
            self.lobby = Lobby(self.grammars, max_waiting, on_compiled, self.adapters, self.media)
            self.requests = EngineRequests(
                self.clients, self.lobby, self.scheduler, self.metrics, self.adapters
            )
            self.steps = StepDriver(
                self.scheduler, self.worker, self.supervisor.stopwatch, self.requests.outbox, self.metrics
            )
            self.block_events = BlockEvents(self.clients, self.scheduler.kv.pool, self._publisher)
            self._load_first_adapter()
            self.started = True
            info = self.info
            names = info.model, info.architecture, info.dtype
            numbers = info.num_blocks, info.block_size, info.max_model_len
            logger.info(
                "engine ready: %s (%s, %s), %d KV blocks of %d tokens, max_model_len %d", *names, *numbers
            )
            if self.info.num_states:
                logger.info("%d state slots of %d bytes", self.info.num_states, ready.bytes_per_state)
            freeze_heap()
            self.intake.welcome_early()
            self.on_ready()
        else:
            check_size(ready, self.scheduler.config)
        self.control.worker_ready()

    def _worker_lost(self) -> None:
        self._receive_from_worker()
        was_ready, failure = self.worker.ready is not None, self.worker.failure
        why = self.worker.reap()
        if failure is not None and failure.fatal and not (failure.lacks_memory and self.started):
            raise received_error(failure.error, failure.error_type)
        self.supervisor.plan_restart(f"the worker was lost ({why})", why, time.monotonic())
        if self.started:
            self.requests.outbox.add(self.scheduler.fail(time.monotonic()))
            self._adapters_lost(time.monotonic())
            self.control.worker_lost(why, was_ready=was_ready)

    def _load_first_adapter(self) -> None:
        """Load and keep the adapter that the engine starts with; without it, the engine ends."""
        source, adapters = self.config.first_adapter, self.adapters
        if source is not None and adapters is not None:
            adapters.preload(source, time.monotonic(), raise_error)

    def _adapter_loaded(self, loaded: AdapterLoaded) -> None:
        if self.adapters is not None:
            self.requests.refuse([ended(*refused) for refused in self.adapters.loaded(loaded)])

    def _adapters_lost(self, now: float) -> None:
        """Take sequences with an adapter back from the scheduler, until a new worker has loaded it."""
        if self.adapters is not None:
            refused = self.adapters.workers_lost(now, self.worker.last_message)
            self.requests.refuse([ended(*refusal) for refusal in refused])
            self.adapters.queue.take_back(self.scheduler.waiting.withdraw(has_adapter), now)

    def _start_worker(self) -> None:
        if (why := self.supervisor.start(time.monotonic())) is not None and self.started:
            self.control.worker_lost(why, was_ready=False)

    @property
    def _holds_steps(self) -> bool:
        """True while a call or an adapter lets no step be launched."""
        if self.adapters is not None and self.adapters.memory.holds_steps(self.worker.last_message):
            return True
        return self.control.holds_plans

    # ------------------------------------------------------------ requests

    def admit(self) -> None:
        """Schedule the sequences that need wait no longer, and have the adapters read that others wait for."""
        self.requests.admit()
        if self.adapters is not None and self.worker.accepting and not self.control.asleep:
            idle = not self.scheduler.in_flight
            for command in self.adapters.commands(time.monotonic(), idle=idle):
                self.worker.send(command)


def raise_error(error: Exception | None) -> None:
    """Raise an error, if there is one."""
    if error is not None:
        raise error


def has_adapter(sequence: Sequence) -> bool:
    """True if a sequence runs with an adapter."""
    return sequence.adapter is not None


def check_size(ready: Ready, config: SchedulerConfig) -> None:
    """Check that a new worker has as many blocks and state slots as the one before.

    Raises:
        CoreError: it has not.
    """
    for name, number, needed in (
        ("KV blocks", ready.num_blocks, config.num_blocks),
        ("state slots", ready.num_states, config.num_states),
    ):
        if number < needed:
            raise CoreError(f"not enough memory: the new worker has only {number} {name}")
