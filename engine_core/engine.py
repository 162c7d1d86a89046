"""What an engine consists of once its workers are ready, and how it is opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.engine_core.adapters.table import AdapterTable
from pagewire.engine_core.admission.lobby import Lobby
from pagewire.engine_core.clients.block_events import BlockEvents
from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.clients.kv_events import KVPublisher
from pagewire.engine_core.clients.metrics import Metrics
from pagewire.engine_core.clients.requests import EngineRequests
from pagewire.engine_core.clients.worker_calls import PendingCalls
from pagewire.engine_core.clients.worker_sleep import WorkerSleep
from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.grammar.start import LoadedTokenizer, open_grammars
from pagewire.engine_core.media.start import MediaStart, open_media
from pagewire.engine_core.media.store import MediaStore
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.schedule.speculation import open_speculation
from pagewire.engine_core.steps import StepDriver
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.supervisor import WorkerSupervisor
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.worker_messages import Ready


@dataclass
class EngineHost:
    """What there is of an engine before its workers are ready.

    media: the processor of the model, which starts; None if it takes no media.
    tokenizer: waits for that of grammars.
    publisher: publishes what becomes of KV blocks; None if nothing is published.
    wake: interrupts the wait of the core's loop; for any thread. is_stopping: no new requests are accepted.
    started_at: monotonic time.
    """

    config: EngineConfig
    worker: WorkerGroup
    supervisor: WorkerSupervisor
    clients: Clients
    media: MediaStart | None
    tokenizer: Callable[[], LoadedTokenizer]
    publisher: KVPublisher | None
    wake: Callable[[], None]
    is_stopping: Callable[[], bool]
    started_at: float


@dataclass
class OpenEngine:
    """An engine that serves requests.

    adapters: LoRA adapters; None if none are served. media: pictures and sound; None if none are taken.
    calls: of the workers. sleep: what the workers have given back. Otherwise as `EngineHost`.
    """

    config: EngineConfig
    worker: WorkerGroup
    supervisor: WorkerSupervisor
    clients: Clients
    started_at: float
    is_stopping: Callable[[], bool]
    info: EngineInfo
    scheduler: Scheduler
    metrics: Metrics
    grammars: Grammars
    adapters: AdapterTable | None
    media: MediaStore | None
    lobby: Lobby
    requests: EngineRequests
    steps: StepDriver
    block_events: BlockEvents
    calls: PendingCalls
    sleep: WorkerSleep

    @classmethod
    def open(cls, host: EngineHost, ready: Ready) -> OpenEngine:
        """The engine of workers that are ready. Blocks until its tokenizer and its media processor are there.

        Raises:
            ValueError, RuntimeError: the options or the files of the model do not fit; the text says why.
        """
        config, clients, worker = host.config, host.clients, host.worker
        speculation = open_speculation(config.speculation, pipelined=config.args.pipeline_parallel_size > 1)
        scheduler = Scheduler(config.scheduler_config(ready), speculation)
        media = open_media(host.media, ready, scheduler.config, host.wake)
        info = config.engine_info(ready, None if media is None else media.info)
        clients.accept(info)
        grammars = open_grammars(config, host.tokenizer, ready, host.wake)
        metrics = Metrics(info.max_model_len)
        limits = config.adapter_limits(ready)
        adapters = None if limits is None else AdapterTable(limits)
        lobby = Lobby(grammars, config.args.max_waiting, metrics.grammar.observe, adapters, media)
        requests = EngineRequests(clients, lobby, scheduler, metrics, adapters)
        steps = StepDriver(scheduler, worker, host.supervisor.stopwatch, requests.outbox, metrics)
        block_events = BlockEvents(clients, scheduler.kv.pool, host.publisher)
        calls = PendingCalls(worker)
        sleep = WorkerSleep(scheduler, worker, calls)
        return cls(
            config,
            worker,
            host.supervisor,
            clients,
            host.started_at,
            host.is_stopping,
            info,
            scheduler,
            metrics,
            grammars,
            adapters,
            media,
            lobby,
            requests,
            steps,
            block_events,
            calls,
            sleep,
        )

    @property
    def stopping(self) -> bool:
        """True once the core accepts no new requests."""
        return self.is_stopping()

    def admit(self) -> None:
        """Schedule the sequences that need wait no longer, and have the adapters read that others wait for."""
        self.requests.admit()
        if self.adapters is not None and self.worker.accepting and not self.sleep.asleep:
            idle = not self.scheduler.in_flight
            for command in self.adapters.commands(time.monotonic(), idle=idle):
                self.worker.send(command)
