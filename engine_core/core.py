"""The engine core's loop: one thread that handles all messages and keeps the worker busy.

    wait -> worker's messages (commit) -> frontends' messages (add, abort, call) -> plan and launch -> deliver

Launching comes before delivering: the worker computes the next step while the core encodes the last results.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import zmq

from pagewire.engine_core.adapters import AdapterTable
from pagewire.engine_core.clients.block_events import BlockEvents
from pagewire.engine_core.clients.clients import AttachedClient, Clients
from pagewire.engine_core.clients.control import Control
from pagewire.engine_core.clients.intake import MessageIntake
from pagewire.engine_core.clients.kv_events import KVPublisher
from pagewire.engine_core.clients.metrics import Metrics, summary
from pagewire.engine_core.clients.outbox import DeltaOutbox
from pagewire.engine_core.config import EngineConfig
from pagewire.engine_core.grammar.compile import load_tokenizer
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.grammar.prover import ConfinedProver
from pagewire.engine_core.lobby import Lobby, ended
from pagewire.engine_core.schedule.scheduler import Outcome, Scheduler
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.speculation import open_speculation
from pagewire.engine_core.workers.group import GroupReply, WorkerGroup
from pagewire.engine_core.workers.restarts import Restarts
from pagewire.engine_core.workers.stopwatch import Stopwatch
from pagewire.ipc import messages
from pagewire.ipc.environment import env_float
from pagewire.ipc.errors import EngineDeadError, EngineStoppedError, error_text, received_error
from pagewire.ipc.heap import freeze_heap, release_spare_memory
from pagewire.ipc.lora import AdapterLoaded
from pagewire.ipc.messages import EngineInfo, TokenDelta
from pagewire.ipc.tasks import name_tasks_once
from pagewire.ipc.worker_messages import Ready, StepResult, WorkerFailed

logger = logging.getLogger("pagewire.core")

TICK_SECONDS = (
    1.0  # interval of heartbeats, and the longest wait for a message: timeouts are checked this often
)
TIDY_SECONDS = 1.0  # between two times that spare memory is given back
# The longest wait while a frontend has unsent deltas. No event says when its socket has room again, so sending
# is retried this often.
BEHIND_SECONDS = 0.02


class CoreError(EngineDeadError):
    """A failure that ends the core. Its text is the cause that frontends and the log report."""


class EngineCore:
    """The loop that connects scheduler, worker and frontends.

    lifeline_fd: a file descriptor that becomes readable when the process that spawned this core has ended, upon
        which the core stops; -1 for none.
    publisher: publishes what becomes of KV blocks; None if nothing is published.

    Attributes:
        adapters: LoRA adapters; None if none are served.

    Attributes without a value in `__init__` exist once the first worker is ready (`started`).
    """

    scheduler: Scheduler
    metrics: Metrics
    outbox: DeltaOutbox
    block_events: BlockEvents
    grammars: Grammars
    lobby: Lobby
    info: EngineInfo
    adapters: AdapterTable | None

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
        self.clients = clients
        self.control = Control(self)
        self.intake = MessageIntake(self)
        self.started = False
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
        self._stop_by: float | None = None
        self._restarts = Restarts()
        self._start_limit = env_float("PAGEWIRE_WORKER_START_TIMEOUT_S", 300.0)
        self.stopwatch = Stopwatch(env_float("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", 300.0))
        self._next_heartbeat = self._next_stats = self._next_tidying = 0.0
        self._was_busy = False
        self.worker_busy_us = self.worker_idle_us = 0

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
            or self.lobby.num_compiling
            or self.lobby.num_loading
            or self.clients.behind
        )
        return idle or time.monotonic() >= self._stop_by

    def _iterate(self) -> None:
        wait = BEHIND_SECONDS if self.clients.behind else TICK_SECONDS
        if self.started and (self.lobby.has_work or self.intake.has_work):
            wait = 0.0
        elif self._restarts.due is not None:
            wait = min(wait, max(0.0, self._restarts.due - time.monotonic()))
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

    def _advance(self) -> None:
        for client in self.clients.lost():
            self.drop(client.requests)
        self.admit()
        self.control.advance()
        self._launch()
        self.deliver()
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
        if now >= self._next_tidying:
            self._next_tidying = now + TIDY_SECONDS
            release_spare_memory()

    def _check_worker(self, now: float) -> None:
        """Kill workers that hang, and start new ones when their time has come."""
        if self.stopwatch.expired:
            logger.error(
                "no result of a step from the worker for over %.0f s; killing it", self.stopwatch.limit
            )
            self.stopwatch.restart(False)
            self.worker.kill()
        if self.worker.silence(now) > self._start_limit:
            text = f"the start of the worker has made no progress for {self._start_limit:g} s"
            if obstacles := self.worker.obstacles:
                text += f": {obstacles}"
            logger.error("%s; killing it (PAGEWIRE_WORKER_START_TIMEOUT_S)", text)
            self.worker.kill(text)
        if self.started:
            self.control.check_timers(now)
            if self.adapters is not None:
                self._refuse([ended(*refused) for refused in self.adapters.expire(now)])
        if self._restarts.due is not None and now >= self._restarts.due:
            self._start_worker()

    def _log_stats(self, now: float) -> None:
        """Compute the rates of the last interval, and log them unless the engine was idle; warn of preemptions."""
        self.deliver()  # requests count as finished when their end is sent
        self.metrics.rates.update(self.scheduler.stats, now)
        number = self.scheduler.stats.num_cache_preemptions
        if (warning := self.metrics.preemption_warnings.text(number, now)) is not None:
            logger.warning("%s", warning)
        busy = self.scheduler.num_unfinished or self.metrics.rates.prompt or self.metrics.rates.output
        if busy and not self.config.args.disable_log_stats:
            line, facts = summary(self)
            logger.info("%s", line, extra={"facts": facts})

    def _announce_end(self, cause: BaseException) -> None:
        self.intake.refuse_early(cause)
        if not self.started:
            self.clients.refuse_all(cause, wait_ms=0)
        else:
            self.grammars.close()
        for client in list(self.clients.attached.values()):
            stopped = isinstance(cause, EngineStoppedError)
            self.clients.send(client.identity, messages.CoreDying(error_text(cause), stopped))
        self.worker.stop()

    # ------------------------------------------------------------ the worker

    def _receive_from_worker(self) -> None:
        for message in self.worker.messages():
            if isinstance(message, StepResult):
                self._commit(message)
            elif isinstance(message, GroupReply):
                self.control.receive(message)
            elif isinstance(message, AdapterLoaded):
                self._adapter_loaded(message)
            elif isinstance(message, Ready):
                self._worker_ready(message)
            elif isinstance(message, WorkerFailed):
                logger.error("the worker failed: %s", message.error, extra={"traceback": message.traceback})

    def _worker_ready(self, ready: Ready) -> None:
        self._restarts.ready(time.monotonic())
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.startup_seconds.items())
        logger.info("worker ready: %s", phases)
        if not self.started:
            pipelined = self.config.args.pipeline_parallel_size > 1
            speculation = open_speculation(self.config.speculation, pipelined=pipelined)
            self.scheduler = Scheduler(self.config.scheduler_config(ready), speculation)
            self.info = self.config.engine_info(ready)
            self.clients.accept(self.info)
            self.grammars = self._open_grammars()
            self.metrics = Metrics(self.info.max_model_len)
            limits = self.config.adapter_limits(ready)
            self.adapters = None if limits is None else AdapterTable(limits)
            max_waiting, on_compiled = self.config.args.max_waiting, self.metrics.grammar.observe
            self.lobby = Lobby(self.grammars, max_waiting, on_compiled, self.adapters)
            self.outbox = DeltaOutbox(self.clients, self._ended)
            self.block_events = BlockEvents(self.clients, self.scheduler.kv.pool, self._publisher)
            self._load_first_adapter()
            self.started = True
            logger.info(
                "engine ready: %s (%s, %s), %d KV blocks of %d tokens, max_model_len %d",
                *(self.info.model, self.info.architecture, self.info.dtype, self.info.num_blocks),
                *(self.info.block_size, self.info.max_model_len),
            )
            freeze_heap()
            self.intake.welcome_early()
            self.on_ready()
        elif ready.num_blocks < self.scheduler.config.num_blocks:
            raise CoreError(f"not enough memory: the new worker has only {ready.num_blocks} KV blocks")
        self.control.worker_ready()

    def _worker_lost(self) -> None:
        self._receive_from_worker()
        was_ready, failure = self.worker.ready is not None, self.worker.failure
        why = self.worker.reap()
        if failure is not None and failure.fatal and not (failure.lacks_memory and self.started):
            raise received_error(failure.error, failure.error_type)
        self._plan_restart(f"the worker was lost ({why})", why)
        self.stopwatch.restart(False)
        if self.started:
            self.outbox.add(self.scheduler.fail(time.monotonic()))
            self._adapters_lost(time.monotonic())
            self.control.worker_lost(why, was_ready=was_ready)

    def _load_first_adapter(self) -> None:
        """Load and keep the adapter that the engine starts with; without it, the engine ends."""
        source, adapters = self.config.first_adapter, self.adapters
        if source is None or adapters is None:
            return

        def loaded(error: Exception | None) -> None:
            if error is not None:
                raise error

        adapters.preload(source, time.monotonic(), loaded)

    def _adapter_loaded(self, loaded: AdapterLoaded) -> None:
        if self.adapters is not None:
            self._refuse([ended(*refused) for refused in self.adapters.loaded(loaded)])

    def _adapters_lost(self, now: float) -> None:
        """Take sequences with an adapter back from the scheduler, until a new worker has loaded it."""
        if self.adapters is not None:
            refused = self.adapters.workers_lost(now, self.worker.last_message)
            self._refuse([ended(*refusal) for refusal in refused])
            self.adapters.queue.take_back(self.scheduler.waiting.withdraw(has_adapter), now)

    def _start_worker(self) -> None:
        """Start the worker. What the machine lacks for that now, it may have a moment later."""
        self._restarts.due = None
        try:
            self.worker.start()
        except (OSError, MemoryError) as error:
            why = error_text(error)
            self._plan_restart(f"the worker cannot be started ({why})", why)
            if self.started:
                self.control.worker_lost(why, was_ready=False)

    def _plan_restart(self, text: str, why: str) -> None:
        pause = self._restarts.lost(time.monotonic())
        if self._restarts.hopeless:
            raise CoreError(f"the worker did not start: {why}")
        logger.error("%s; starting another%s", text, f" in {pause:g} s" if pause else "")

    def _commit(self, result: StepResult) -> None:
        now = time.monotonic()
        num_prompt = self.scheduler.in_flight[0].num_prompt_tokens if self.scheduler.in_flight else 0
        try:
            outcomes = self.scheduler.commit(result, now)
        except ValueError as error:
            logger.error("unexpected step result from the worker, killing it: %s", error)
            self.worker.kill()
            return
        self.outbox.add(outcomes)
        self._send_masks(now)
        self.stopwatch.restart(bool(self.scheduler.in_flight))
        self.worker_busy_us += result.busy_us
        self.worker_idle_us += result.idle_us if self._was_busy else 0
        self._was_busy = self.scheduler.num_unfinished > 0
        self.metrics.step(outcomes, num_prompt, result.busy_us, now)

    def _launch(self) -> None:
        while (
            self.worker.accepting
            and not self._holds_steps
            and len(self.scheduler.in_flight) < self.scheduler.config.depth
            and (plan := self.scheduler.plan(time.monotonic())) is not None
        ):
            if len(self.scheduler.in_flight) == 1:
                self.stopwatch.restart(True)
            name_tasks_once(plan.inits)
            self.worker.send(plan)
            if len(self.scheduler.in_flight) == 1:
                self._send_masks(time.monotonic())

    @property
    def _holds_steps(self) -> bool:
        """True while a call or an adapter lets no step be launched."""
        if self.adapters is not None and self.adapters.memory.holds_steps(self.worker.last_message):
            return True
        return self.control.holds_plans

    def _send_masks(self, now: float) -> None:
        """Send the grammar masks of the oldest step in flight, if it needs any; all earlier tokens are known."""
        masks, outcomes = self.scheduler.masks(now)
        self.outbox.add(outcomes)
        if masks is not None:
            self.worker.send(masks)

    # ------------------------------------------------------------ requests

    def _open_grammars(self) -> Grammars:
        config = self.config
        return Grammars(
            lambda: load_tokenizer(config.tokenizer_folder(), config.eos_token_ids),
            self.info.vocab_size,
            open_prover=lambda: ConfinedProver(
                config.tokenizer_folder(), config.eos_token_ids, self.info.vocab_size
            ),
            seconds=env_float("PAGEWIRE_GRAMMAR_TIMEOUT_S", 10.0),
            wake=self._wake,
        )

    def admit(self) -> None:
        """Schedule the sequences that need wait no longer; end those whose grammar or adapter is refused."""
        ready, refusals = self.lobby.ready(time.monotonic())
        for sequence in ready:
            self.scheduler.add(sequence)
        self._refuse(refusals)
        if self.adapters is not None and self.worker.accepting and not self.control.asleep:
            idle = not self.scheduler.in_flight
            for command in self.adapters.commands(time.monotonic(), idle=idle):
                self.worker.send(command)

    def _refuse(self, refusals: list[Outcome]) -> None:
        """Log and send the ends of sequences that are not scheduled."""
        for sequence, delta in refusals:
            if sequence.index == 0:
                logger.warning(
                    "refused request %s: %s", sequence.request_id, " ".join(str(delta.error).split())
                )
        self.outbox.add(refusals)

    def drop(self, sequences: Iterable[Sequence], reason: str = "abort") -> None:
        """End sequences that their frontend no longer waits for; no delta is sent."""
        now = time.monotonic()
        for sequence in sequences:
            if not sequence.finished:
                self._remove(sequence)
                self._ended(sequence, reason, now)

    def _ended(self, sequence: Sequence, reason: str, now: float) -> None:
        """Record the end of a sequence."""
        self.metrics.finished(sequence, reason, now)
        if self.adapters is not None:
            self.adapters.ended(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if not self.lobby.drop(sequence):
            self.scheduler.abort([sequence])

    def abort(self, sequences: Iterable[Sequence]) -> int:
        """End sequences of any frontend with finish reason "abort"; returns how many were unfinished."""
        live = [sequence for sequence in sequences if not sequence.finished]
        for sequence in live:
            self._remove(sequence)
            self.outbox.add([(sequence, TokenDelta(sequence.key, sequence.index, [], "abort"))])
        return len(live)

    def requests(self) -> Iterator[tuple[AttachedClient, Sequence]]:
        """Every unfinished sequence and the frontend that submitted it."""
        for client in self.clients.attached.values():
            for sequence in client.requests:
                if not sequence.finished:
                    yield client, sequence

    def deliver(self) -> None:
        """Send all queued deltas to the frontends."""
        self.outbox.send(time.monotonic())


def has_adapter(sequence: Sequence) -> bool:
    """True if a sequence runs with an adapter."""
    return sequence.adapter is not None
