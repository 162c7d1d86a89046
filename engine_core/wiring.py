"""The parts of an engine beside what every request needs: each is chosen here, by the options, and opened.

The loop (`core.py`) and the scheduler name none of them: what they call is a `Wing`, a `Speculation`,
`ColdPrefixes`, a `TurnQueue` or a `CacheGroup`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.engine_core.adapters.service import AdapterService
from pagewire.engine_core.adapters.table import AdapterTable
from pagewire.engine_core.admission.lobby import Lobby
from pagewire.engine_core.calls.control import Control
from pagewire.engine_core.calls.weight_updates import WeightUpdates
from pagewire.engine_core.calls.worker_calls import PendingCalls
from pagewire.engine_core.calls.worker_sleep import WorkerSleep
from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.clients.requests import EngineRequests
from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.core import EngineCore
from pagewire.engine_core.drafting.open import open_speculation
from pagewire.engine_core.engine import EngineHost, OpenEngine
from pagewire.engine_core.events.block_events import BlockEvents
from pagewire.engine_core.events.kv_events import KVPublisher
from pagewire.engine_core.grammar.open import LoadedTokenizer, begin_tokenizer, open_grammars
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.media.open import open_encoder, open_media, start_media
from pagewire.engine_core.media.store import MediaStore
from pagewire.engine_core.metrics.metrics import Metrics
from pagewire.engine_core.metrics.stats_log import StatsLog
from pagewire.engine_core.retention.promises import PrefixPromises
from pagewire.engine_core.retention.timer import PromiseTimer
from pagewire.engine_core.schedule.cache_group import CacheGroup
from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.turns import TurnQueue
from pagewire.engine_core.serving import Serving
from pagewire.engine_core.states.open import open_states
from pagewire.engine_core.steps import StepDriver
from pagewire.engine_core.tenants.accounts import Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.engine_core.tiers.open import TierPlaces, open_scheduler
from pagewire.engine_core.tiers.peer_links import PeerLinks
from pagewire.engine_core.tiers.tier import ColdTier
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.supervisor import WorkerSupervisor
from pagewire.ipc.wire.worker_messages import Ready


def open_core(
    config: EngineConfig,
    worker: WorkerGroup,
    clients: Clients,
    lifeline_fd: int = -1,
    publisher: KVPublisher | None = None,
    peers: PeerLinks | None = None,
) -> EngineCore:
    """The core of an engine with these options. Its media processor starts at once.

    lifeline_fd: see `EngineCore`. publisher: publishes what becomes of KV blocks; None if nothing is published.
    peers: other cores from which KV blocks are fetched; None: there are none.
    """
    return EngineCore(worker, clients, EngineWiring(config, publisher, peers), lifeline_fd)


@dataclass
class WiredEngine(OpenEngine):
    """An engine, and by name the parts of it that calls, reports and metrics read.

    tenants: their accounts. adapters: LoRA adapters; None if none are served.
    media: pictures and sound; None if none are taken.
    tier: KV blocks on disk and of other cores; None if there are none.
    promises: prefixes that stay cached for a time.
    calls: of the workers. sleep: what the workers have given back. weights: changes those of the workers.
    control: runs the calls of frontends.
    Otherwise as `EngineHost`.
    """

    supervisor: WorkerSupervisor
    started_at: float
    config: EngineConfig
    metrics: Metrics
    grammars: Grammars
    tenants: Accounts
    adapters: AdapterTable | None
    media: MediaStore | None
    tier: ColdTier | None
    promises: PrefixPromises
    block_events: BlockEvents
    calls: PendingCalls
    sleep: WorkerSleep
    weights: WeightUpdates = field(init=False)
    control: Control = field(init=False)


class EngineWiring:
    """Opens the engine of a core; see `EngineOpener`."""

    def __init__(
        self, config: EngineConfig, publisher: KVPublisher | None, peers: PeerLinks | None = None
    ) -> None:
        self._config, self._publisher, self._peers = config, publisher, peers
        self._media = start_media(config)
        self._tokenizer: Callable[[], LoadedTokenizer] | None = None

    def begin(self) -> None:
        """Begin to load the tokenizer of grammars."""
        self._tokenizer = begin_tokenizer(self._config)

    def close(self) -> None:
        """End the processes of the media processor."""
        if self._media is not None:
            self._media.processor.close()

    def open(self, host: EngineHost, ready: Ready) -> Serving:
        """What serves the requests of workers that are ready. Blocks until tokenizer and media processor are there.

        Raises:
            ValueError, RuntimeError: the options or the files of the model do not fit; the text says why.
        """
        engine = self._open_engine(host, ready)
        engine.weights = WeightUpdates(engine, self._config.args.weights_dir)
        engine.control = Control(engine)
        engine.wings += self._wings_of(engine)
        return Serving(engine, engine.control, None if engine.adapters is None else engine.adapters.registry)

    def _wings_of(self, engine: WiredEngine) -> list[Wing]:
        """The parts that the loop calls, in its order."""
        adapters = None
        if engine.adapters is not None:
            adapters = AdapterService(
                engine.adapters, engine.scheduler, engine.requests, engine.worker, engine.sleep
            )
            if self._config.first_adapter is not None:
                adapters.preload(self._config.first_adapter)
        wings: list[Wing | None] = [
            engine.media,
            engine.sleep,  # what it calls goes before what waits with the control
            engine.control,
            engine.weights,
            PromiseTimer(engine.scheduler),
            engine.tier,
            None if engine.tier is None else engine.tier.peers,
            adapters,
            engine.block_events,
            engine.grammars,
            engine.metrics,
            StatsLog(engine),
        ]
        return [wing for wing in wings if wing is not None]

    def _open_engine(self, host: EngineHost, ready: Ready) -> WiredEngine:
        config, clients, worker = self._config, host.clients, host.worker
        assert self._tokenizer is not None, "it was begun"
        limits = config.scheduler_config(ready)
        media = open_media(self._media, ready, limits, host.wake)
        info = config.engine_info(ready, None if media is None else media.info)
        promises = PrefixPromises(config.retention_limits(limits, ready.num_states))
        tenants = Accounts(info.max_unfinished_bytes)
        waiting = WaitingQueue(limits.policy, tenants)
        scheduler, tier = self._open_scheduler(limits, waiting, promises, host, ready)
        clients.accept(info)
        grammars = open_grammars(config, self._tokenizer, ready, host.wake)
        metrics = Metrics(info.max_model_len)
        adapter_limits = config.adapter_limits(ready)
        adapters = None if adapter_limits is None else AdapterTable(adapter_limits)
        lobby = Lobby(grammars, config.args.max_waiting, metrics.grammar.observe, adapters, media)
        wings: list[Wing] = []
        requests = EngineRequests(clients, lobby, scheduler, wings)
        calls = PendingCalls(worker)
        return WiredEngine(
            worker=worker,
            clients=clients,
            is_stopping=host.is_stopping,
            info=info,
            tenants=tenants,
            scheduler=scheduler,
            lobby=lobby,
            requests=requests,
            steps=StepDriver(scheduler, worker, host.supervisor.stopwatch, requests.outbox, wings),
            wings=wings,
            shares_prefixes=config.args.enable_prefix_caching,
            keeps_extra_args=bool(config.args.logits_processors),
            supervisor=host.supervisor,
            started_at=host.started_at,
            config=config,
            metrics=metrics,
            grammars=grammars,
            adapters=adapters,
            media=media,
            tier=tier,
            promises=promises,
            block_events=BlockEvents(clients, scheduler.kv.pool, self._publisher),
            calls=calls,
            sleep=WorkerSleep(scheduler, worker, calls, host.supervisor, config.args.while_asleep),
        )

    def _open_scheduler(
        self,
        limits: SchedulerConfig,
        waiting: TurnQueue,
        promises: PrefixPromises,
        host: EngineHost,
        ready: Ready,
    ) -> tuple[Scheduler, ColdTier | None]:
        """The scheduler with what plugs into it, and the cold tiers that it reads from."""
        config = self._config
        speculation = open_speculation(config.speculation, pipelined=config.args.pipeline_parallel_size > 1)
        groups: list[CacheGroup | None] = [open_states(ready, limits.block_size), open_encoder(ready, limits)]
        present = [group for group in groups if group is not None]
        places = None
        if config.tier is not None:
            block_bytes, state_bytes = ready.bytes_per_block, ready.bytes_per_state
            attached = host.clients.attached
            preemption = config.args.resolved_preemption()
            places = TierPlaces(
                config.tier, block_bytes, state_bytes, self._peers, attached, host.wake, preemption
            )
        return open_scheduler(limits, waiting, speculation, present, promises, host.worker, places)
