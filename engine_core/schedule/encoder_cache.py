"""What the workers' encoder has made of media: entries by name, which requests with the same medium share.

A row that reaches the tokens of a medium needs its entry: it is there, or the same step makes it. Entries that no
sequence needs stay until others need their room, those used least recently first.

The encoder's budget of a step keeps other streams going: while sequences decode, a step encodes one medium. A row
that would need another one ends before it, and goes on in the next step.

Workers run plans in order, and free entries before they run rows. So an entry that a row of a plan was the last to
need can be freed by the next plan (`settle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pagewire.engine_core.schedule.features import Features
from pagewire.engine_core.schedule.sequence import Sequence as RunningSequence
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.worker_messages import Encode, Row


@dataclass(slots=True, eq=False)
class EncoderEntry:
    """An entry. number: by which workers know it. size: embeddings. num_refs: sequences that need it."""

    name: bytes
    number: int
    size: int
    num_refs: int = 0


@dataclass(slots=True)
class StepEntries:
    """What the plan that is being made does to entries.

    encodes, freed: for the plan. last_used: entries that a row is the last of its sequence to need.
    num_encoded: embeddings that are made. decoding: some sequence decodes.
    """

    encodes: list[Encode] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    last_used: list[EncoderEntry] = field(default_factory=list)
    num_encoded: int = 0
    decoding: bool = False


class EncoderCache:
    """The entries in terms of sequences and tokens; one of the groups of `KVCache`.

    capacity: embeddings of all entries; at least those of the largest medium. budget: embeddings that a step may
    make where no sequence decodes; a single medium may have more.

    Attributes:
        num_queries, num_hits: media that sequences came to, and those whose entry was there.
    """

    def __init__(self, capacity: int, budget: int) -> None:
        self.capacity, self._budget = capacity, budget
        self.num_queries = self.num_hits = 0
        self._entries: dict[bytes, EncoderEntry] = {}  # those that none needs in the order of their last use
        self._held: dict[RunningSequence, dict[int, EncoderEntry]] = {}  # by the place of the medium
        self._step = StepEntries()
        self._next_number = 0

    @property
    def num_used(self) -> int:
        """Embeddings of all entries."""
        return sum(entry.size for entry in self._entries.values())

    @property
    def usage(self) -> float:
        """Fraction of the capacity that entries take, 0 to 1."""
        return self.num_used / self.capacity

    def begin(self, running: Sequence[RunningSequence]) -> None:
        """Begin a plan, with these sequences running."""
        self._step.decoding = any(sequence.decodes for sequence in running)

    # ------------------------------------------------------------ rows

    def chunk(self, sequence: RunningSequence, count: int) -> int:
        """How many of the next `count` tokens a row may run: up to a medium whose entry this step cannot have."""
        start = sequence.computed
        held = self._held.get(sequence, {})
        room = self.capacity - sum(entry.size for entry in self._entries.values() if self._is_needed(entry))
        num_encoded, num_new = self._step.num_encoded, len(self._step.encodes)
        seen: set[bytes] = set()
        for medium, features in media_in(sequence, start, start + count):
            entry = self._entries.get(features.name)
            if (
                medium.start in held
                or features.name in seen
                or (entry is not None and self._is_needed(entry))
            ):
                continue
            seen.add(features.name)
            room -= features.size
            if entry is None:
                num_encoded += features.size
                num_new += 1
            is_over = num_new > 1 and (self._step.decoding or num_encoded > self._budget)
            if room < 0 or (entry is None and is_over):
                return max(0, medium.start - start)
        return count

    def fill(self, sequence: RunningSequence, row: Row) -> None:
        """Say in a row which entries it needs, and have those made that are not there."""
        end = row.start + row.num_tokens
        media = list(media_in(sequence, row.start, end))
        if not media:
            return
        held = self._held.pop(sequence, {})
        # Those that are there come first: one that is made could take their room.
        for medium, features in sorted(media, key=lambda each: each[1].name not in self._entries):
            if medium.start not in held:
                held[medium.start] = self._acquire(features)
        row.entries = [(medium.start, medium.end, held[medium.start].number) for medium, _ in media]
        for medium, _ in media:
            if medium.end <= end:
                self._step.last_used.append(held.pop(medium.start))
        if held:
            self._held[sequence] = held

    def _acquire(self, features: Features) -> EncoderEntry:
        self.num_queries += 1
        entry = self._entries.pop(features.name, None)
        if entry is not None:
            self.num_hits += 1
        else:
            self._make_room(features.size)
            entry = EncoderEntry(features.name, self._next_number, features.size)
            self._next_number += 1
            self._step.encodes.append(Encode(entry.number, features.kind, dict(features.tensors)))
            self._step.num_encoded += features.size
        self._entries[features.name] = entry
        entry.num_refs += 1
        return entry

    def _make_room(self, size: int) -> None:
        excess = self.num_used + size - self.capacity
        for entry in list(self._entries.values()):
            if excess <= 0:
                return
            if not self._is_needed(entry):
                excess -= entry.size
                self._drop(entry)

    def _drop(self, entry: EncoderEntry) -> None:
        del self._entries[entry.name]
        self._step.freed.append(entry.number)

    def _is_needed(self, entry: EncoderEntry) -> bool:
        return entry.num_refs > 0

    def take(self) -> tuple[list[Encode], list[int]]:
        """What the plan that was made encodes, and the numbers of the entries that it frees."""
        return self._step.encodes, self._step.freed

    def settle(self) -> None:
        """End a plan: what its rows needed last can be freed by the next one."""
        for entry in self._step.last_used:
            self._release(entry)
        self._step = StepEntries()

    def _release(self, entry: EncoderEntry) -> None:
        entry.num_refs -= 1
        if self._entries.get(entry.name) is entry:  # it was used last
            self._entries[entry.name] = self._entries.pop(entry.name)

    # ------------------------------------------------------------ sequences

    def free(self, sequence: RunningSequence) -> None:
        """Release a sequence's entries. It has no row in the plan that is being made."""
        for entry in self._held.pop(sequence, {}).values():
            self._release(entry)

    def reset(self) -> None:
        """Drop the entries that no sequence needs; those that are needed go with their last sequence."""
        for entry in list(self._entries.values()):
            if not self._is_needed(entry):
                self._drop(entry)

    def lose(self) -> None:
        """Forget all entries, because the workers are lost; no sequence runs."""
        self._entries.clear()
        self._held.clear()
        self._step = StepEntries()

    # ------------------------------------------------------------ as a group that does not limit anything else

    def reach(self, sequence: RunningSequence, end: int) -> int:
        """A cached prefix may end anywhere: what goes on within a medium is encoded again."""
        return end

    def fits(self, sequence: RunningSequence, end: int) -> bool:
        """True: a sequence waits for entries while it runs."""
        return True

    def admit(self, sequence: RunningSequence, end: int) -> None:
        """Nothing: the rows of a sequence get entries."""

    def takes_drafts(self, sequence: RunningSequence) -> bool:
        """True: drafts have no entries."""
        return True

    def verify(self, sequence: RunningSequence, row: Row, num_rejected: int) -> int:
        """All tokens of a row count."""
        return row.start + row.num_tokens

    def register(self, sequence: RunningSequence) -> None:
        """Nothing: entries have names from the start."""

    def forget(self) -> None:
        """Nothing: cached prefixes are other groups'."""


def media_in(sequence: RunningSequence, start: int, end: int) -> Iterator[tuple[Media, Features]]:
    """The pictures and sounds that have tokens from position `start` to `end`."""
    if start >= sequence.num_prompt_tokens:
        return
    for medium, features in zip(sequence.request.prompt.encoded, sequence.features, strict=True):
        if medium.start < end and medium.end > start:
            yield medium, features
