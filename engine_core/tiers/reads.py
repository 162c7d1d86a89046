"""Prefixes that are read from cold tiers before their sequences are admitted. Pure: no IO, no clock.

    waiting -- delays() --> held, its blocks allocated -- finish() --> waiting, its prefix cached

A sequence waits for a read only when it would be admitted. So what is read has room, and is used at once. Others
are admitted and run meanwhile. The blocks that are read into, and those before them that are cached already, belong
to the read. They get names once their content is there, and are then like any cached block that no sequence uses.
If the model keeps states, those behind the prefix are read with it.

What is in the swap space or on disk is read in one part, what other cores have in parts of limited size; a read
ends with its last part.

A preempted sequence comes back on the same road, for the blocks of its output have names, too. Its last block,
which is not full, is computed anew by the step that resumes it: that has to run a token in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pagewire.engine_core.schedule.blocks import Block, BlockPool, EvictedBlock
from pagewire.engine_core.schedule.kv_cache import KVCache, prefix_names
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tiers.cold_names import ColdNames, FoundPrefix
from pagewire.engine_core.tiers.costs import ReadCosts
from pagewire.engine_core.tiers.peer_names import PeerNames
from pagewire.engine_core.tiers.swap import SwapSpace
from pagewire.ipc.wire.tier_messages import (
    PART_BYTES,
    BlockBack,
    BlockOut,
    BlocksMoved,
    MoveBlocks,
    SwapCopy,
    state_name,
)

READ_SECONDS = 30.0  # that a sequence waits for its prefix at most; then it is computed
FETCH_SECONDS = 5.0  # of these, if other cores have a part of it, and computing takes less

Preemption: TypeAlias = Literal["auto", "swap", "recompute"]


@dataclass(slots=True, eq=False)
class FetchedPart:
    """Blocks of a read that come from another core in one message.

    number: of the `BlocksMoved` that ends it. peer: the core. num_bytes: of the blocks.
    """

    number: int
    peer: int
    blocks: list[BlockBack]
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class PrefixRead:
    """A prefix that is being read.

    sequence: whose it is. names: those that its blocks had when the read began.
    cached: its blocks that were cached. blocks: those that are read, by their index in it.
    states: the slot of its states, if the model keeps any. end: number of blocks before these.
    reads_states: they are read; else they were cached.
    copies: of what is in the swap space, from `places`, which keep it until then. on_disk, fetched: the rest.
    num_parts: those that have not ended. missing: what could not be read.
    waiting: sequences that are held until it ends.
    found: False: what its blocks hold is no longer what it was.
    seconds: that its sequences wait for it. since: when it was sent, in seconds; None: it was not sent yet.
    """

    number: int
    sequence: Sequence
    names: list[bytes]
    cached: list[Block]
    blocks: dict[int, Block]
    states: Block | None = None
    end: int = 0
    reads_states: bool = False
    copies: list[SwapCopy] = field(default_factory=list)
    places: list[Block] = field(default_factory=list)
    on_disk: list[BlockBack] = field(default_factory=list)
    fetched: list[FetchedPart] = field(default_factory=list)
    num_parts: int = 0
    missing: set[bytes] = field(default_factory=set)
    waiting: list[Sequence] = field(default_factory=list)
    found: bool = True
    seconds: float = READ_SECONDS
    since: float | None = None

    @property
    def backs(self) -> list[BlockBack]:
        """All that is read."""
        backs = [BlockBack(block.block_id, self.names[index]) for index, block in self.blocks.items()]
        if self.reads_states and self.states is not None:
            backs.append(BlockBack(self.states.block_id, self.state_name, True))
        return backs

    @property
    def state_name(self) -> bytes:
        """The name in the tier of the states behind it."""
        return state_name(self.names[self.end - 1])

    @property
    def is_found(self) -> bool:
        """True if its blocks get names: its sequence, which may not have waited, has not got others since."""
        return self.found and self.sequence.block_names[: self.end] == self.names


class PrefixReads:
    """The names in the cold tiers, and what is being read of them; a `ColdPrefixes` of the scheduler.

    costs: decide whether a prefix is read.
    on_disk: what is evicted goes to disk. preemption: "auto" if preempted sequences are read by cost, too; "swap"
    if always, "recompute" if never.

    Attributes:
        names: of the blocks on disk, and of states there (`state_name`). peers: those of other cores.
        swap: the swap space, which has no places unless it is opened.
        num_hits, num_peer_hits, num_swap_hits: blocks that were read from disk, came from other cores, or from the
            swap space, and were then found, since the core started.
        num_first_hits: of those from here (disk and swap space), those of sequences that had not run before.
    """

    def __init__(
        self,
        costs: ReadCosts,
        *,
        on_disk: bool = True,
        preemption: Preemption = "auto",
    ) -> None:
        self.names: set[bytes] = set()
        self.peers = PeerNames()
        self.swap = SwapSpace()
        self._cold = ColdNames(self.names, self.swap, self.peers)
        self.num_hits = self.num_peer_hits = self.num_swap_hits = self.num_first_hits = 0
        self._costs, self._on_disk, self._preemption = costs, on_disk, preemption
        self._reads: dict[int, PrefixRead] = {}
        self._parts: dict[int, PrefixRead] = {}  # by the number of a part
        self._unsent: list[PrefixRead] = []
        self._unsent_parts: list[FetchedPart] = []
        self._reading: dict[bytes, PrefixRead] = {}
        self._next_number = 1

    @property
    def num_reads(self) -> int:
        """Number of prefixes that are being read."""
        return len(self._reads)

    @property
    def held(self) -> Iterator[Sequence]:
        """The sequences that wait for what is being read or asked for; some may have ended meanwhile."""
        for read in self._reads.values():
            yield from read.waiting
        yield from self.peers.held

    def is_away(self, sequence: Sequence, kv: KVCache) -> bool:
        """True if a sequence that waits has run before, and has blocks in the swap space or on disk alone."""
        if not has_run(sequence):
            return False
        return any(kv.pool.find(name) is None and self._cold.has(name) for name in sequence.block_names)

    # ------------------------------------------------------------ as the scheduler sees it

    def delays(self, sequence: Sequence, kv: KVCache, watermark: int) -> bool:
        """True if a sequence is to wait, because a part of its prefix is being read from now on."""
        if sequence.was_read or (self._preemption == "recompute" and has_run(sequence)):
            return False
        if self._asks(sequence, kv, watermark):
            return True
        if self.peers.places and self._waits_for_read(sequence, kv, watermark, peers=True):
            return True
        is_any = bool(self.names or len(self.swap) or self._reading)
        return is_any and self._waits_for_read(sequence, kv, watermark)

    def _asks(self, sequence: Sequence, kv: KVCache, watermark: int) -> bool:
        """True if a sequence is to wait, because other cores are asked which of its blocks they have."""
        names = prefix_names(sequence, kv.block_size)
        if not names or self.peers.is_known(names[-1]):
            return False
        slots = kv.group(StateSlots)
        unknown = [name for name in names if not self._cold.is_there(name, kv, peers=True)]
        if not self._costs.asks(len(unknown)) or not kv.fits(sequence, watermark):
            return False
        states = [] if slots is None else [state_name(name) for name in names]
        self.peers.ask(names[-1], unknown + states, sequence)
        return True

    def _waits_for_read(
        self, sequence: Sequence, kv: KVCache, watermark: int, *, peers: bool = False
    ) -> bool:
        """True if a sequence is to wait for a read. peers: also of blocks that other cores have."""
        found = self._cold.prefix(sequence, kv, peers=peers)
        if not found.missing and not found.reads_states:
            return False
        names = found.names_in_tier(sequence)
        if (read := next((self._reading[name] for name in names if name in self._reading), None)) is None:
            num_saved = found.end - len(kv.cached_prefix(sequence))
            if not (kv.fits(sequence, watermark) and found.has_room(kv)):
                return False
            if not self._is_worth_it(sequence, found, names, num_saved):
                return False
            read = self._begin(sequence, kv, found)
        read.waiting.append(sequence)
        return True

    def _is_worth_it(
        self, sequence: Sequence, found: FoundPrefix, names: list[bytes], num_saved: int
    ) -> bool:
        """True if a prefix is to be read.

        names: of what is in the tiers alone. num_saved: blocks that need not be computed then.
        """
        if self._preemption == "swap" and has_run(sequence):
            return num_saved > 0
        num_swapped = sum(name in self.swap for name in names)
        num_fetched = sum(name not in self.swap and name not in self.names for name in names)
        return self._costs.reads(
            len(found.missing),
            num_saved,
            state=found.reads_states,
            num_fetched=num_fetched,
            num_swapped=num_swapped,
        )

    def _begin(self, sequence: Sequence, kv: KVCache, found: FoundPrefix) -> PrefixRead:
        """Take the blocks for a read, of which the cached ones must not be evicted meanwhile."""
        slots = kv.group(StateSlots)
        kv.pool.share(found.cached)
        blocks = dict(zip(found.missing, kv.pool.allocate(len(found.missing)), strict=True))
        states = found.states
        if slots is not None:
            if states is None:
                (states,) = slots.pool.allocate(1)
            else:
                slots.pool.share([states])
        names = sequence.block_names[: found.end]
        read = PrefixRead(
            self._take_number(), sequence, names, found.cached, blocks, states, found.end, found.reads_states
        )
        self._reads[read.number] = read
        self._divide(read)
        self._reading |= dict.fromkeys(found.names_in_tier(sequence), read)
        self._unsent.append(read)
        return read

    def _take_number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def _divide(self, read: PrefixRead) -> None:
        """Divide a read into its parts."""
        last: FetchedPart | None = None
        for back in read.backs:
            if back.name in self.swap:
                copy, place = self.swap.pin(back)
                read.copies.append(copy)
                read.places.append(place)
                continue
            if back.name in self.names:
                read.on_disk.append(back)
                continue
            peer, num_bytes = self.peers.places[back.name], self._costs.bytes_of(back.is_state)
            if last is None or last.peer != peer or last.num_bytes + num_bytes > PART_BYTES:
                last = FetchedPart(self._take_number(), peer, [])
                read.fetched.append(last)
            last.blocks.append(back)
            last.num_bytes += num_bytes
        if read.fetched and (seconds := self._costs.compute(len(read.blocks))):
            read.seconds = min(max(seconds, FETCH_SECONDS), READ_SECONDS)
        is_here = bool(read.copies or read.on_disk)
        numbers = [part.number for part in read.fetched] + ([read.number] if is_here else [])
        read.num_parts = len(numbers)
        self._parts |= dict.fromkeys(numbers, read)

    def forget(self) -> None:
        """What is being read shall not be found: all names of the KV cache are dropped."""
        for read in self._reads.values():
            read.found = False
        self.swap.forget()
        self.peers.forget()

    # ------------------------------------------------------------ what is moved

    def take_moves(self, kv: KVCache, now: float) -> list[MoveBlocks]:
        """What the workers are to move before the next plan: what was evicted goes out before anything comes in."""
        evicted = take_evicted(kv)
        out = [block for block in evicted if self._on_disk and block.name not in self.names]
        swap_out = [copy for block in evicted if (copy := self.swap.take(block)) is not None]
        messages = [
            MoveBlocks(read.number, back=read.on_disk, swap_back=read.copies)
            for read in self._unsent
            if read.on_disk or read.copies
        ]
        for read in self._unsent:
            read.since = now
            self._unsent_parts += read.fetched
        self._unsent = []
        if (out or swap_out) and not messages:
            messages = [MoveBlocks()]
        if messages:
            messages[0].out, messages[0].swap_out = out, swap_out
        return messages

    def take_parts(self) -> list[FetchedPart]:
        """What is to be fetched from other cores, once all that was evicted for it is sent."""
        parts, self._unsent_parts = self._unsent_parts, []
        return parts

    def finish(self, moved: BlocksMoved, kv: KVCache) -> list[Sequence]:
        """End a part of a read. With the last, its blocks are cached, but for those that are missing.

        Returns the sequences that waited for it.
        """
        slots = kv.group(StateSlots)
        read = self._parts.pop(moved.number, None)
        if read is None:
            return []
        read.missing.update(moved.missing)
        self._lose_names(read, moved)
        read.num_parts -= 1
        if read.num_parts:
            return []
        del self._reads[read.number]
        missing, names, is_found = read.missing, read.names, read.is_found
        for index, block in read.blocks.items():
            self._reading.pop(names[index], None)
            if names[index] not in missing and is_found:
                kv.name(block, read.sequence, index)
        self.swap.num_back += len(read.copies)
        if is_found:
            self._count_hits(read)
        if read.reads_states and read.states is not None and slots is not None:
            self._reading.pop(read.state_name, None)
            if read.state_name not in missing and is_found:
                slots.pool.register(read.states, names[read.end - 1])
        self._give_back(read, kv)
        return self._waiting_for(read)

    def _count_hits(self, read: PrefixRead) -> None:
        """Count the blocks of a read that is over by where they came from; states are none."""
        blocks = {read.names[index] for index in read.blocks} - read.missing
        fetched = {block.name for part in read.fetched for block in part.blocks} & blocks
        on_disk = {block.name for block in read.on_disk} & blocks
        self.num_peer_hits += len(fetched)
        self.num_hits += len(on_disk)
        self.num_swap_hits += len(blocks) - len(fetched) - len(on_disk)
        if not has_run(read.sequence):
            self.num_first_hits += len(blocks) - len(fetched)

    def _lose_names(self, read: PrefixRead, moved: BlocksMoved) -> None:
        """Forget that what is missing was on disk, or with the core that was asked for it."""
        for name in moved.missing:
            if moved.number == read.number:
                self.names.discard(name)
            else:
                self.peers.places.pop(name, None)

    def _waiting_for(self, read: PrefixRead) -> list[Sequence]:
        """The sequences that waited for a read; the one that it was for is not delayed again."""
        waiting, read.waiting = read.waiting, []
        read.sequence.was_read = True
        return waiting

    def expire(self, now: float) -> list[Sequence]:
        """The sequences that have waited for too long for their reads, whose blocks stay."""
        sent = [read for read in self._reads.values() if read.since is not None]
        late = [read for read in sent if now - (read.since or 0.0) > read.seconds]
        sequences = [sequence for read in late for sequence in self._waiting_for(read)]
        for sequence in sequences:
            sequence.was_read = True
        return sequences

    def lose(self, kv: KVCache) -> list[Sequence]:
        """End all reads, because the workers are lost, and forget all names. Returns the sequences that waited."""
        sequences = []
        for read in self._reads.values():
            self._give_back(read, kv)
            sequences += read.waiting
        sequences += self.peers.end_all()
        self.peers.forget_asked()
        self._reads.clear()
        self._parts.clear()
        self._reading.clear()
        self._unsent.clear()
        self._unsent_parts.clear()
        self.names.clear()
        self.swap.forget()
        return sequences

    def _give_back(self, read: PrefixRead, kv: KVCache) -> None:
        """Free what a read has held."""
        slots = kv.group(StateSlots)
        kv.pool.free(reversed([*read.cached, *read.blocks.values()]))
        if read.states is not None and slots is not None:
            slots.pool.free([read.states])
        self.swap.unpin(read.copies, read.places)


def has_run(sequence: Sequence) -> bool:
    """True if a sequence that waits has run before: it was preempted, or its workers were lost."""
    return sequence.num_cached_tokens is not None


def take_evicted(kv: KVCache) -> list[BlockOut]:
    """What the caches have evicted since the last call: blocks, then states."""
    slots = kv.group(StateSlots)
    out = [BlockOut(*block) for block in drained(kv.pool)]
    for slot in drained(slots.pool) if slots is not None else ():
        out.append(BlockOut(slot.block_id, state_name(slot.name), slot.parent, True))
    return out


def drained(pool: BlockPool) -> list[EvictedBlock]:
    """What a pool has evicted since the last call."""
    evicted = list(pool.evicted or ())
    if pool.evicted is not None:
        pool.evicted.clear()
    return evicted
