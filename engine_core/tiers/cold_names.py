"""How much of a sequence's prefix there is, in the KV cache and in the cold tiers. Pure: no IO, no clock."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from pagewire.engine_core.schedule.blocks import Block
from pagewire.engine_core.schedule.kv_cache import KVCache, prefix_names
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tiers.peer_names import PeerNames
from pagewire.engine_core.tiers.swap import SwapSpace
from pagewire.ipc.wire.tier_messages import state_name


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


class ColdNames:
    """The names in all cold tiers, which others change.

    on_disk: of blocks there, and of states (`state_name`). swap: those in swap space. peers: those of other cores.
    """

    def __init__(self, on_disk: Set[bytes], swap: SwapSpace, peers: PeerNames) -> None:
        self._on_disk, self._swap, self._peers = on_disk, swap, peers

    def has(self, name: bytes, *, peers: bool = False) -> bool:
        """True if a block or states are in swap space or on disk. peers: or if another core has them."""
        return name in self._swap or name in self._on_disk or (peers and self._peers.has(name))

    def is_there(self, name: bytes, kv: KVCache, *, peers: bool = False) -> bool:
        """True if a block is cached, or in a tier; see `has`."""
        return kv.pool.find(name) is not None or self.has(name, peers=peers)

    def prefix(self, sequence: Sequence, kv: KVCache, *, peers: bool = False) -> FoundPrefix:
        """The longest prefix in cache and tiers; with the states behind it, if the model keeps any."""
        slots = kv.group(StateSlots)
        names = prefix_names(sequence, kv.block_size)
        lacking = (i for i, name in enumerate(names) if not self.is_there(name, kv, peers=peers))
        count = next(lacking, len(names))
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

    def _last_states(self, sequence: Sequence, end: int, kv: KVCache, states: StateSlots, peers: bool) -> int:
        """The last of the first `end` blocks behind which there are states, and a prefix may end; 0: none."""
        for count in range(end, 0, -1):
            name, num_tokens = sequence.block_names[count - 1], count * kv.block_size
            is_there = name in states.pool.named or self.has(state_name(name), peers=peers)
            if is_there and sequence.prefix_end(num_tokens, kv.block_size) == num_tokens:
                return count
        return 0
