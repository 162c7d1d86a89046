"""Prefixes that are read from cold tiers before their sequences are admitted. Pure: no IO, no clock.

    waiting -- delays() --> held, its blocks allocated -- finish() --> waiting, its prefix cached

A sequence waits for a read only when it would be admitted. So what is read has room, and is used at once. Others
are admitted and run meanwhile. The blocks that are read into, and those before them that are cached already, belong
to the read. They get names once their content is there, and are then like any cached block that no sequence uses.
If the model keeps states, those behind the prefix are read with it.

What is on disk is read in one part, what other cores have in parts of limited size; a read ends with its last part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagewire.engine_core.schedule.blocks import Block, BlockPool, EvictedBlock
from pagewire.engine_core.schedule.kv_cache import KVCache, prefix_names
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tiers.costs import ReadCosts
from pagewire.engine_core.tiers.peer_names import PeerNames
from pagewire.ipc.wire.tier_messages import (
    PART_BYTES,
    BlockBack,
    BlockOut,
    BlocksMoved,
    MoveBlocks,
    state_name,
)

READ_SECONDS = 30.0  # that a sequence waits for its prefix at most; then it is computed
FETCH_SECONDS = 5.0  # of these, if other cores have a part of it, and computing takes less


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
    on_disk, fetched: its parts. num_parts: those that have not ended. missing: what could not be read.
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


@dataclass(slots=True, eq=False)
class FoundPrefix:
    """The longest prefix of a sequence in cache and tiers, of `end` blocks.

    cached: its blocks that are cached. missing: indices of those that are in the tiers alone.
    states: those behind it, if the model keeps any and they are cached. reads_states: they are in the tier alone.
    """

    end: int
    cached: list[Block] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    states: Block | None = None
    reads_states: bool = False

    def names_in_tier(self, sequence: Sequence) -> list[bytes]:
        """The names of all that is in the tier alone."""
        names = [sequence.block_names[index] for index in self.missing]
        return names + [state_name(sequence.block_names[self.end - 1])] if self.reads_states else names

    def has_room(self, kv: KVCache) -> bool:
        """True if there is a slot for its states, beside that of the sequence."""
        slots = kv.group(StateSlots)
        return slots is None or not self.reads_states or slots.pool.num_free >= 2


class PrefixReads:
    """The names in the cold tiers, and what is being read of them; a `ColdPrefixes` of the scheduler.

    Attributes:
        names: of the blocks on disk, and of states there (`state_name`). peers: those of other cores.
        num_hits, num_peer_hits: blocks that were read from disk, or came from other cores, and were then found,
            since the core started.
    """

    def __init__(self, costs: ReadCosts) -> None:
        self.names: set[bytes] = set()
        self.peers = PeerNames()
        self.num_hits = self.num_peer_hits = 0
        self._costs = costs
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

    # ------------------------------------------------------------ as the scheduler sees it

    def delays(self, sequence: Sequence, kv: KVCache, watermark: int) -> bool:
        """True if a sequence is to wait, because a part of its prefix is being read from now on."""
        if sequence.was_read:
            return False
        if self._asks(sequence, kv, watermark):
            return True
        if self.peers.places and self._waits_for_read(sequence, kv, watermark, peers=True):
            return True
        return bool(self.names or self._reading) and self._waits_for_read(sequence, kv, watermark)

    def _asks(self, sequence: Sequence, kv: KVCache, watermark: int) -> bool:
        """True if a sequence is to wait, because other cores are asked which of its blocks they have."""
        names = prefix_names(sequence, kv.block_size)
        if not names or self.peers.is_known(names[-1]):
            return False
        slots = kv.group(StateSlots)
        unknown = [name for name in names if not self._is_there(name, kv, peers=True)]
        if not self._costs.asks(len(unknown)) or not kv.fits(sequence, watermark):
            return False
        states = [] if slots is None else [state_name(name) for name in names]
        self.peers.ask(names[-1], unknown + states, sequence)
        return True

    def _waits_for_read(
        self, sequence: Sequence, kv: KVCache, watermark: int, *, peers: bool = False
    ) -> bool:
        """True if a sequence is to wait for a read. peers: also of blocks that other cores have."""
        found = self._prefix(sequence, kv, peers)
        if not found.missing and not found.reads_states:
            return False
        names = found.names_in_tier(sequence)
        if (read := next((self._reading[name] for name in names if name in self._reading), None)) is None:
            num_saved = found.end - len(kv.cached_prefix(sequence))
            if not (kv.fits(sequence, watermark) and found.has_room(kv)):
                return False
            num_fetched = sum(name not in self.names for name in names)
            state = found.reads_states
            if not self._costs.reads(len(found.missing), num_saved, state=state, num_fetched=num_fetched):
                return False
            read = self._begin(sequence, kv, found)
        read.waiting.append(sequence)
        return True

    def _prefix(self, sequence: Sequence, kv: KVCache, peers: bool) -> FoundPrefix:
        """The longest prefix in cache and tiers; with the states behind it, if the model keeps any."""
        slots = kv.group(StateSlots)
        names = prefix_names(sequence, kv.block_size)
        count = next((i for i, name in enumerate(names) if not self._is_there(name, kv, peers)), len(names))
        end = sequence.prefix_end(count * kv.block_size, kv.block_size) // kv.block_size
        if slots is not None:
            end = self._last_states(sequence, end, kv, slots, peers)
        found = FoundPrefix(end)
        for index, name in enumerate(names[:end]):
            if (block := kv.pool.find(name)) is None:
                found.missing.append(index)
            else:
                found.cached.append(block)
        if slots is not None and end:
            found.states = slots.pool.find(names[end - 1])
            found.reads_states = found.states is None
        return found

    def _is_there(self, name: bytes, kv: KVCache, peers: bool) -> bool:
        return kv.pool.find(name) is not None or self._is_cold(name, peers)

    def _is_cold(self, name: bytes, peers: bool) -> bool:
        return name in self.names or (peers and self.peers.has(name))

    def _last_states(self, sequence: Sequence, end: int, kv: KVCache, states: StateSlots, peers: bool) -> int:
        """The last of the first `end` blocks behind which there are states, and a prefix may end; 0: none."""
        for count in range(end, 0, -1):
            name, num_tokens = sequence.block_names[count - 1], count * kv.block_size
            is_there = name in states.pool.named or self._is_cold(state_name(name), peers)
            if is_there and sequence.prefix_end(num_tokens, kv.block_size) == num_tokens:
                return count
        return 0

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
        numbers = [part.number for part in read.fetched] + ([read.number] if read.on_disk else [])
        read.num_parts = len(numbers)
        self._parts |= dict.fromkeys(numbers, read)

    def forget(self) -> None:
        """What is being read shall not be found: all names of the KV cache are dropped."""
        for read in self._reads.values():
            read.found = False
        self.peers.forget()

    # ------------------------------------------------------------ what is moved

    def take_moves(self, kv: KVCache, now: float) -> list[MoveBlocks]:
        """What the workers are to move before the next plan: what was evicted goes out before anything comes in."""
        slots = kv.group(StateSlots)
        out = [BlockOut(*block) for block in take_evicted(kv.pool) if block.name not in self.names]
        for slot in take_evicted(slots.pool) if slots is not None else ():
            if (name := state_name(slot.name)) not in self.names:
                out.append(BlockOut(slot.block_id, name, slot.parent, True))
        messages = [MoveBlocks(read.number, back=read.on_disk) for read in self._unsent if read.on_disk]
        for read in self._unsent:
            read.since = now
            self._unsent_parts += read.fetched
        self._unsent = []
        if out and not messages:
            messages = [MoveBlocks()]
        if out:
            messages[0].out = out
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
        fetched = {block.name for part in read.fetched for block in part.blocks}
        for index, block in read.blocks.items():
            self._reading.pop(names[index], None)
            if names[index] not in missing and is_found:
                kv.name(block, read.sequence, index)
                self.num_peer_hits += names[index] in fetched
                self.num_hits += names[index] not in fetched
        if read.reads_states and read.states is not None and slots is not None:
            self._reading.pop(read.state_name, None)
            if read.state_name not in missing and is_found:
                slots.pool.register(read.states, names[read.end - 1])
        give_back(read, kv)
        return self._waiting_for(read)

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
            give_back(read, kv)
            sequences += read.waiting
        sequences += self.peers.end_all()
        self.peers.forget_asked()
        self._reads.clear()
        self._parts.clear()
        self._reading.clear()
        self._unsent.clear()
        self._unsent_parts.clear()
        self.names.clear()
        return sequences


def give_back(read: PrefixRead, kv: KVCache) -> None:
    """Free what a read has held."""
    slots = kv.group(StateSlots)
    kv.pool.free(reversed([*read.cached, *read.blocks.values()]))
    if read.states is not None and slots is not None:
        slots.pool.free([read.states])


def take_evicted(pool: BlockPool) -> list[EvictedBlock]:
    """What a pool has evicted since the last call."""
    evicted = list(pool.evicted or ())
    if pool.evicted is not None:
        pool.evicted.clear()
    return evicted
