"""Prefixes that were promised to stay cached: their blocks are not evicted before the promise ends. Pure.

    retain() --> promise(tenant, name, blocks, end) -- tick(), release(), forget() --> its references are given back

All promises together hold at most `Limits.num_blocks`, which leaves room for the longest sequence. Among tenants
this is divided equally: those that hold promises, and those that were lately refused one. A promise is never broken
for another tenant; but what a tenant has over its share is not renewed.

A sequence of a model that keeps states goes on where there is a checkpoint of them. So there a promise ends at one,
and holds it as well.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from pagewire.engine_core.schedule.blocks import Block, BlockPool
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.scheduler import SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.ipc.shares import Name
from pagewire.ipc.wire.items import RetainedPrefix, Retention

MAX_PROMISES = 4096  # of a tenant: each takes memory, however few blocks it has
MAX_STALE = 64  # ended promises that may be watched beside as many as have not ended
REFUSED_SECONDS = 300.0  # for which a refused tenant has a share at most: it may not ask again
NO_CACHE = "no prefix is cached (--no-enable-prefix-caching)"
NO_SHARE = "this engine keeps nothing on promise (--max-retained-share, or all KV memory is for one request)"
TOO_MANY = "as many promises of this tenant as there may be have not ended: release some"


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """What all promises may hold at most: KV blocks, and state slots (0 for a model without states).

    why: the reason for no room at all.
    """

    num_blocks: int
    num_states: int = 0
    why: str = NO_SHARE

    @classmethod
    def of(
        cls, config: SchedulerConfig, num_states: int, share: float, *, caches: bool = True
    ) -> RetentionLimits:
        """A share of what a scheduler has, 0 to 1, but for what the longest sequence needs.

        num_states: state slots that there are. caches: prefixes are cached at all.
        """
        if not caches:
            return cls(0, why=NO_CACHE)
        longest = -(-config.max_model_len // config.block_size)
        num_blocks = min(int(share * config.num_blocks), config.num_blocks - longest)
        kept_states = min(int(share * num_states), num_states // 2)
        return cls(0 if num_states and not kept_states else num_blocks, kept_states)


@dataclass(slots=True, eq=False)
class Promise:
    """Blocks that stay until a time. states: the checkpoint behind them, if there is one; at most one."""

    tenant: Name
    key: tuple[str, bytes]
    blocks: list[Block]
    states: list[Block]
    end: float
    is_kept: bool = True


@dataclass(slots=True, eq=False)
class TenantPromises:
    """The promises of one tenant by their name and that of their last block. held: by block, how many hold it."""

    promises: dict[tuple[str, bytes], Promise] = field(default_factory=dict)
    held: Counter[Block] = field(default_factory=Counter)


class PrefixPromises:
    """The promises of all tenants; a `RetainedPrefixes` of the scheduler.

    Attributes:
        limits: of all of them. num_refused: wishes that got less than they asked for, since the core started.
    """

    def __init__(self, limits: RetentionLimits) -> None:
        self.limits = limits
        self.num_refused = 0
        self._now = 0.0
        self._tenants: dict[Name, TenantPromises] = {}
        self._refused: dict[Name, float] = {}  # until when a refused tenant counts for the shares
        self._held: Counter[Block] = Counter()  # KV blocks, by how many promises hold each
        self._held_states: Counter[Block] = Counter()
        self._ends: list[
            tuple[float, int, Promise]
        ] = []  # a heap, with each promise once, by an end that it had
        self._next_number = self._num_kept = 0

    @property
    def num_promises(self) -> int:
        """Number of promises that have not ended."""
        return self._num_kept

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks that promises hold."""
        return len(self._held)

    # ------------------------------------------------------------ as the scheduler sees it

    def tick(self, now: float, kv: KVCache) -> None:
        """End the promises whose time has come."""
        self._now = now
        while self._ends and self._ends[0][0] <= now:
            promise = heapq.heappop(self._ends)[2]
            if promise.is_kept and promise.end <= now:
                self._end(promise, kv)
            elif promise.is_kept:
                self._push(promise)
        if self._refused:
            self._refused = {name: end for name, end in self._refused.items() if end > now}

    def retain(self, sequence: Sequence, kv: KVCache) -> None:
        """Promise what a running sequence's request asks for, as far as it is computed, and say so in it.

        Of the n sequences of a request, the first one does.
        """
        wishes = sequence.request.retention
        if not wishes or sequence.index or sequence.state is not State.RUNNING:
            return
        kv.keep(sequence)
        sequence.retained = [self._promise(sequence, wish, kv) for wish in wishes]

    def forget(self, kv: KVCache) -> None:
        """End all promises, because all names of the KV cache are dropped."""
        for tenant in list(self._tenants.values()):
            for promise in list(tenant.promises.values()):
                self._end(promise, kv)
        self._ends.clear()

    # ------------------------------------------------------------ calls

    def release(self, tenant: Name, name: str, kv: KVCache) -> int:
        """End a tenant's promises of a name. Returns how many KV blocks are not promised to it any more."""
        if (own := self._tenants.get(tenant)) is None:
            return 0
        num_before = len(own.held)
        for promise in [promise for promise in own.promises.values() if promise.key[0] == name]:
            self._end(promise, kv)
        return num_before - len(own.held)

    # ------------------------------------------------------------ promises

    def _promise(self, sequence: Sequence, wish: Retention, kv: KVCache) -> RetainedPrefix:
        """Promise the blocks of a wish, or as many of the first ones as there is room for."""
        wanted = computed_blocks(sequence, wish, kv)
        name = sequence.tenant.name
        tenant = self._tenants.setdefault(name, TenantPromises())
        room, refusal = self._room(name, tenant, wanted)
        blocks, states = self._with_states(wanted[:room], kv)
        if room < len(wanted):
            self.num_refused += 1
            self._refused[name] = self._now + min(wish.seconds, REFUSED_SECONDS)
        elif len(blocks) < len(wanted) and len(self._held_states) >= self.limits.num_states:
            refusal = f"of {self.limits.num_states} state slots for promises, all are taken"
            self.num_refused += 1
        elif wanted and not blocks:
            refusal = "the model's states were kept nowhere in this prefix"
            self.num_refused += 1
        elif len(tenant.promises) >= MAX_PROMISES and key_of(wish, blocks) not in tenant.promises:
            blocks, refusal = [], TOO_MANY
            self.num_refused += 1
        if blocks:
            self._add(name, tenant, wish, blocks, states, kv)
        elif not tenant.promises:
            del self._tenants[name]
        return RetainedPrefix(len(blocks) * kv.block_size, refusal)

    def _room(self, name: Name, tenant: TenantPromises, wanted: list[Block]) -> tuple[int, str]:
        """How many of the first blocks of a wish may be promised, and why not all of them."""
        limit = self.limits.num_blocks
        if limit <= 0:
            return 0, self.limits.why if wanted else ""
        num_tenants = len({name, *self._tenants, *self._refused})
        share = max(1, limit // num_tenants)
        left, own = limit - len(self._held), share - len(tenant.held)
        if own < 0:
            return 0, over_share(share, num_tenants, len(tenant.held))
        for index, block in enumerate(wanted):
            left -= block not in self._held
            own -= block not in tenant.held
            if left < 0:
                return index, f"of {limit} KV blocks for promises, {len(self._held)} are taken"
            if own < 0:
                return index, over_share(share, num_tenants, len(tenant.held))
        return len(wanted), ""

    def _with_states(self, blocks: list[Block], kv: KVCache) -> tuple[list[Block], list[Block]]:
        """The blocks up to the last checkpoint of states that can be kept, and that one; all, if there are none."""
        slots = kv.group(StateSlots)
        if slots is None:
            return blocks, []
        for end in range(len(blocks), 0, -1):
            name = blocks[end - 1].name
            slot = None if name is None else slots.pool.find(name)
            if slot is not None and (
                slot in self._held_states or len(self._held_states) < self.limits.num_states
            ):
                return blocks[:end], [slot]
        return [], []

    def _add(
        self,
        name: Name,
        tenant: TenantPromises,
        wish: Retention,
        blocks: list[Block],
        states: list[Block],
        kv: KVCache,
    ) -> None:
        """Make a promise, or prolong the one of the same blocks; it replaces shorter ones that end no later."""
        slots = kv.group(StateSlots)
        key, end = key_of(wish, blocks), self._now + wish.seconds
        if (promise := tenant.promises.get(key)) is None:
            promise = tenant.promises[key] = Promise(name, key, blocks, states, end)
            self._num_kept += 1
            self._push(promise)
            tenant.held.update(blocks)
            hold(self._held, blocks, kv.pool)
            if slots is not None:
                hold(self._held_states, states, slots.pool)
        elif promise.end >= end:
            return
        promise.end = end
        for block in blocks[:-1] if slots is None else ():  # else each one's checkpoint was promised, too
            other = tenant.promises.get((wish.name, block.name or b""))
            if other is not None and other.end <= end:
                self._end(other, kv)

    def _push(self, promise: Promise) -> None:
        """Watch the end of a promise. Those that have ended otherwise are forgotten once they are most."""
        self._next_number += 1
        heapq.heappush(self._ends, (promise.end, self._next_number, promise))
        if len(self._ends) > 2 * self._num_kept + MAX_STALE:
            self._ends = [entry for entry in self._ends if entry[2].is_kept]
            heapq.heapify(self._ends)

    def _end(self, promise: Promise, kv: KVCache) -> None:
        """Give back what a promise holds."""
        slots = kv.group(StateSlots)
        promise.is_kept = False
        self._num_kept -= 1
        tenant = self._tenants[promise.tenant]
        del tenant.promises[promise.key]
        if not tenant.promises:
            del self._tenants[promise.tenant]
        drop(tenant.held, promise.blocks)
        kv.pool.free(reversed(drop(self._held, promise.blocks)))
        if slots is not None:
            slots.pool.free(drop(self._held_states, promise.states))


def key_of(wish: Retention, blocks: Sequence_[Block]) -> tuple[str, bytes]:
    """The key of a promise among those of its tenant; no blocks have none."""
    return wish.name, (blocks[-1].name or b"") if blocks else b""


def computed_blocks(sequence: Sequence, wish: Retention, kv: KVCache) -> list[Block]:
    """The full blocks of a running sequence that a wish is for, as far as they are computed.

    Those that others find by their names: of two with the same content, that is the one that was named first. If
    the other one has gone since, the sequence's own gets the name.
    """
    num_tokens = len(sequence.token_ids) if wish.with_output else sequence.num_prompt_tokens
    num_tokens = min(num_tokens, wish.num_tokens or num_tokens)
    blocks = []
    for index in range(min(num_tokens // kv.block_size, sequence.num_registered)):
        name = sequence.block_names[index]
        if (block := kv.pool.find(name)) is None:
            kv.name(sequence.blocks[index], sequence, index)
            block = kv.pool.find(name)
        if block is None:
            break
        blocks.append(block)
    return blocks


def hold(held: Counter[Block], blocks: Iterable[Block], pool: BlockPool) -> None:
    """Count one more promise for each block; those that had none get a reference."""
    pool.share([block for block in blocks if block not in held])
    held.update(blocks)


def drop(held: Counter[Block], blocks: Iterable[Block]) -> list[Block]:
    """Count one promise less for each block; returns those that have none any more, in their order."""
    last = []
    for block in blocks:
        held[block] -= 1
        if not held[block]:
            del held[block]
            last.append(block)
    return last


def over_share(share: int, num_tenants: int, num_held: int) -> str:
    """The reason for which a tenant gets no more."""
    return f"a tenant's share is {share} KV blocks ({num_tenants} have promises or want some), {num_held} are taken"
