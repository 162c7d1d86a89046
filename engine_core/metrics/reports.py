"""Reports of the core on itself, as plain values: its state, and its unfinished sequences."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from pagewire.engine_core.adapters.table import AdapterTable
from pagewire.engine_core.admission.lobby import Lobby
from pagewire.engine_core.clients.clients import AttachedClient, Clients
from pagewire.engine_core.media.store import MediaStore
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tiers.tier import ColdTier
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.supervisor import WorkerSupervisor
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.steps import Way


class Switches(Protocol):
    """The part of `WorkerSleep` that reports read."""

    @property
    def asleep(self) -> set[str]:
        """What the workers have given back ("weights", "kv_cache")."""

    @property
    def level(self) -> int:
        """0: awake; 1 or 2: see `WorkerSleep.level`."""


class StepTimes(Protocol):
    """The part of `StepDriver` that reports read."""

    busy_us: int
    idle_us: int
    by_way: Counter[Way]


class ReportedEngine(Protocol):
    """The part of the core that reports read."""

    info: EngineInfo
    scheduler: Scheduler
    worker: WorkerGroup
    supervisor: WorkerSupervisor
    clients: Clients
    started_at: float
    adapters: AdapterTable | None
    media: MediaStore | None
    tier: ColdTier | None

    @property
    def steps(self) -> StepTimes:
        """How long the workers have run steps, and waited for some."""

    @property
    def sleep(self) -> Switches:
        """What the workers have given back."""

    @property
    def lobby(self) -> Lobby:
        """The sequences that are not scheduled yet."""

    @property
    def requests(self) -> Iterable[tuple[AttachedClient, Sequence]]:
        """Every unfinished sequence, with the frontend that submitted it."""


def status(core: ReportedEngine) -> dict[str, Any]:
    """The state of scheduler, caches and worker, and each frontend. Counts are since the core started."""
    scheduler, stats, pool = core.scheduler, core.scheduler.stats, core.scheduler.kv.pool
    states, by_phase = scheduler.kv.group(StateSlots), phases(core)
    return {
        "model": core.info.served_model_names[0],
        "uptime_s": time.monotonic() - core.started_at,
        "running": len(scheduler.running),
        "waiting": scheduler.sequences.num_waiting + len(core.lobby),
        "in_flight": len(scheduler.in_flight),
        "num_blocks": len(pool),
        "num_free_blocks": pool.num_free,
        "num_states": 0 if states is None else len(states.pool),
        "num_free_states": 0 if states is None else states.pool.num_free,
        "num_steps": stats.num_steps,
        "num_preemptions": stats.num_preemptions,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_output_tokens": stats.num_output_tokens,
        "num_prefix_queries": stats.num_prefix_queries,
        "num_prefix_hits": stats.num_prefix_hits,
        "num_draft_tokens": scheduler.speculation.stats.num_drafts,
        "num_accepted_tokens": scheduler.speculation.stats.num_accepted,
        "worker_pid": next(iter(core.worker.pids), None),
        "worker_starts": core.worker.num_starts,
        "worker_restarts": num_restarts(core),  # of those starts, after a loss
        "worker_busy_s": core.steps.busy_us / 1e6,
        "worker_idle_s": core.steps.idle_us / 1e6,  # while requests were unfinished
        "worker_ready": core.worker.ready is not None,
        "paused": core.lobby.held,
        "sleeping": bool(core.sleep.asleep),
        "sleep_level": core.sleep.level,
        "weights": scheduler.sequences.weights.name,
        "clients": [
            {
                "number": client.number,
                "name": client.name,
                "pid": client.pid,
                "peer": client.peer,
                "requests": len(client.requests),
                "phases": by_phase[client.number],
            }
            for client in core.clients.attached.values()
        ],
    }


def num_restarts(core: ReportedEngine) -> int:
    """How often the workers were started in place of others that were lost."""
    return core.worker.num_starts - 1 - core.supervisor.num_wakes


def phases(core: ReportedEngine) -> dict[int, dict[str, int]]:
    """Sequences in each phase, by `AttachedClient.number`. Waiting ones are not visited: they may be many."""
    clients = core.clients.attached
    numbers = {
        client.number: {"waiting": client.requests.num_sequences, "prefill": 0, "decode": 0}
        for client in clients.values()
    }
    for request in core.scheduler.running:
        if (client := clients.get(request.client)) is not None:
            numbers[client.number]["waiting"] -= 1
            numbers[client.number][phase(request)] += 1
    return numbers


def requests(core: ReportedEngine, limit: int) -> list[dict[str, Any]]:
    """At most `limit` unfinished sequences, those that run before those that wait."""
    now = time.monotonic()
    return [describe(client, request, now) for client, request in islice(in_order(core), limit)]


def adapters(table: AdapterTable) -> list[dict[str, Any]]:
    """The registered adapters, as plain values."""
    rows = []
    for source in table.registry.named.values():
        adapter = table.registry.of(source)
        rows.append(
            {
                "name": source.name,
                "adapter_id": source.adapter_id,
                "path": source.path,
                "resident": adapter.resident,
                "num_bytes": adapter.num_bytes,
                "rank": adapter.rank,
                "pinned": adapter.pinned,
            }
        )
    return rows


def in_order(core: ReportedEngine) -> Iterator[tuple[AttachedClient, Sequence]]:
    """Every unfinished sequence: first those that run, then those that wait, frontend by frontend."""
    for request in core.scheduler.running:
        if (client := core.clients.attached.get(request.client)) is not None:
            yield client, request
    for client, request in core.requests:
        if request.state is State.WAITING:
            yield client, request


def describe(client: AttachedClient, request: Sequence, now: float) -> dict[str, Any]:
    """One sequence in plain values; times in seconds."""
    token_time = request.last_token_time
    return {
        "frontend": client.name,
        "frontend_number": client.number,
        "frontend_pid": client.pid,
        "request_id": request.request_id,
        "index": request.index,
        "phase": phase(request),
        "priority": request.request.priority,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens or 0,
        "num_output_tokens": request.num_output_tokens,
        "max_output_tokens": request.max_output,
        "age": now - request.arrival_time,
        "seconds_since_token": now - token_time if token_time else None,
    }


def phase(request: Sequence) -> str:
    """ "waiting" (for its turn, again after a preemption, or held back), "prefill", or "decode"."""
    if request.state is not State.RUNNING:
        return "waiting"
    return "decode" if request.first_token_time else "prefill"
