"""Opens the scheduler with what may keep prefixes beside its cache: promises, and cold tiers here and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from pagewire.engine_core.retention.promises import PrefixPromises
from pagewire.engine_core.schedule.cache_group import CacheGroup
from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.speculation import Speculation
from pagewire.engine_core.schedule.turns import TurnQueue
from pagewire.engine_core.tiers.costs import ReadCosts
from pagewire.engine_core.tiers.lending import BlockLending
from pagewire.engine_core.tiers.peer_links import PeerLinks
from pagewire.engine_core.tiers.peer_tier import PeerTier
from pagewire.engine_core.tiers.reads import Preemption, PrefixReads
from pagewire.engine_core.tiers.tier import ColdTier
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.ipc.wire.tier_messages import TierConfig


@dataclass(frozen=True, slots=True)
class TierPlaces:
    """What cold tiers an engine has, and what they need.

    config: those of the workers. block_bytes, state_bytes: of a KV block, and of a state slot.
    peers: the other cores; None: there are none. attached: the connections to this core.
    wake: interrupts the wait of the core's loop.
    preemption: see `PrefixReads`.
    """

    config: TierConfig
    block_bytes: int
    state_bytes: int
    peers: PeerLinks | None
    attached: Container[bytes]
    wake: Callable[[], None]
    preemption: Preemption


def open_scheduler(
    config: SchedulerConfig,
    waiting: TurnQueue,
    speculation: Speculation | None,
    groups: Iterable[CacheGroup],
    promises: PrefixPromises,
    worker: WorkerGroup,
    places: TierPlaces | None,
) -> tuple[Scheduler, ColdTier | None]:
    """A scheduler, and the cold tiers from which it reads prefixes. places: None: there are none."""
    if places is None:
        return Scheduler(config, waiting, speculation, groups=groups, retained=promises), None
    block_bytes, state_bytes = places.block_bytes, places.state_bytes
    costs = ReadCosts(config.block_size, block_bytes, state_bytes)
    keeps = bool(places.config.folder)
    reads = PrefixReads(costs, on_disk=keeps, preemption=places.preemption)
    scheduler = Scheduler(config, waiting, speculation, reads, groups, promises)
    peers = lending = None
    if places.peers is not None:
        places.peers.start(places.wake, max(block_bytes, state_bytes))
        peers = PeerTier(places.peers, reads, costs, scheduler, worker)
        lending = BlockLending(scheduler.kv, reads.names, worker, places.attached, block_bytes, state_bytes)
    tier = ColdTier(
        reads,
        costs,
        scheduler,
        worker,
        block_bytes,
        state_bytes,
        keeps=keeps,
        swaps=places.config.swap_bytes > 0,
        peers=peers,
        lending=lending,
    )
    return scheduler, tier
