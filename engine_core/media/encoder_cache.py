"""What the workers' encoder has made of media: entries by name, which requests with the same medium share.

A row that reaches the tokens of a medium needs its entry: it is there, or the same step makes it. Entries that no
sequence needs stay until others need their room, those used least recently first.

The encoder's budget of a step keeps other streams going. Where steps end in time (`step_time`), a medium is encoded
in slices of the encoder's layers while a sequence waits for a token: a row ends before a medium that is not encoded
yet, and the sequence goes on once the last slice is planned. One medium at a time is begun; another has its turn
when no sequence needs that one any more. Without a limit, or where the encoder cannot be cut, a step encodes one
medium while sequences decode; a row that would need another one ends before it.

Workers run plans in order, and free entries before they run rows. So an entry that a row of a plan was the last to
need can be freed by the next plan (`settle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pagewire.engine_core.media.features import Features
from pagewire.engine_core.schedule.cache_group import CacheGroup
from pagewire.engine_core.schedule.sequence import Sequence as RunningSequence
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.steps import Encode, Row, StepPlan


@dataclass(slots=True, eq=False)
class EncoderEntry:
    """An entry.

    number: by which workers know it. size: embeddings. num_refs: sequences that need it. num_layers: that have run
    in slices. is_whole: its pass is planned up to its end.
    """

    name: bytes
    number: int
    size: int
    num_refs: int = 0
    num_layers: int = 0
    is_whole: bool = False


@dataclass(slots=True)
class StepEntries:
    """What the plan that is being made does to entries.

    encodes, freed: for the plan. last_used: entries that a row is the last of its sequence to need.
    num_encoded: embeddings that are made. decoding: some sequence decodes. in_slices: media are encoded in slices.
    """

    encodes: list[Encode] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    last_used: list[EncoderEntry] = field(default_factory=list)
    num_encoded: int = 0
    decoding: bool = False
    in_slices: bool = False


class EncoderCache(CacheGroup):
    """The entries in terms of sequences and tokens. They limit which tokens a row runs, and nothing else: a prefix
    may end within a medium, which is then encoded again, and a sequence waits for entries while it runs.

    capacity: embeddings of all entries; at least those of the largest medium. budget: embeddings that a step may
    make where no sequence decodes; a single medium may have more. num_layers: of the encoder; 0: it cannot be cut.

    Attributes:
        num_queries, num_hits: media that sequences came to, and those whose entry was there. num_slices: of passes.
    """

    def __init__(self, capacity: int, budget: int, num_layers: int = 0) -> None:
        self.capacity, self._budget, self._num_layers = capacity, budget, num_layers
        self.num_queries = self.num_hits = self.num_slices = 0
        self._entries: dict[bytes, EncoderEntry] = {}  # those that none needs in the order of their last use
        self._held: dict[RunningSequence, dict[int, EncoderEntry]] = {}  # by the place of the medium
        self._begun: EncoderEntry | None = None  # the one whose pass has stopped between layers
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

    def begin(self, running: Sequence[RunningSequence], limited: bool) -> None:
        """Begin a plan; see `CacheGroup.begin`."""
        self._step.decoding = any(sequence.decodes for sequence in running)
        self._step.in_slices = limited and self._num_layers > 0

    # ------------------------------------------------------------ rows

    def chunk(self, sequence: RunningSequence, count: int) -> int:
        """How many of the next `count` tokens a row may run: up to a medium whose entry this step cannot have."""
        start, room = sequence.computed, self._room
        num_encoded, num_new = self._step.num_encoded, len(self._step.encodes)
        seen: set[bytes] = set()
        for medium, features in media_in(sequence, start, start + count):
            entry = self._entries.get(features.name)
            is_needed = entry is not None and self._is_needed(entry)
            is_new = entry is None or not entry.is_whole
            if is_new and self._step.in_slices:
                return max(0, medium.start - start)
            if features.name in seen or (is_needed and not is_new):
                continue
            seen.add(features.name)
            room -= 0 if is_needed else features.size
            if is_new:
                num_encoded += features.size
                num_new += 1
            is_over = num_new > 1 and (self._step.decoding or num_encoded > self._budget)
            if room < 0 or (is_new and is_over):
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
            if not held[medium.start].is_whole:
                self._run(held[medium.start], features)
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
        self._entries[features.name] = entry
        entry.num_refs += 1
        return entry

    def _run(self, entry: EncoderEntry, features: Features, num_layers: int = 0) -> None:
        """Have this plan go on with an entry's pass. num_layers: that it runs; 0: all that are left."""
        tensors = {} if entry.num_layers else dict(features.tensors)
        entry.num_layers += num_layers
        entry.is_whole = num_layers == 0 or entry.num_layers >= self._num_layers
        until = 0 if entry.is_whole else entry.num_layers
        if until:
            self._begun = entry
        elif entry is self._begun:
            self._begun = None
        self._step.encodes.append(Encode(entry.number, features.kind, tensors, until))
        self._step.num_encoded += features.size

    # ------------------------------------------------------------ slices

    def pending(self, sequence: RunningSequence) -> tuple[int, int] | None:
        """The medium at a sequence's next token; see `CacheGroup.pending`. It waits while another one is begun."""
        if not self._step.in_slices or self._step.encodes:
            return None
        for _, features in media_in(sequence, sequence.computed, sequence.computed + 1):
            entry = self._entries.get(features.name)
            if entry is None or not entry.is_whole:
                return self._slices(entry, features.size)
        return None

    def _slices(self, entry: EncoderEntry | None, size: int) -> tuple[int, int] | None:
        """What is left of an entry, or of one that is to be made; None if it has to wait."""
        if entry is not None and self._is_needed(entry):
            return size, self._num_layers - entry.num_layers
        if size > self._room or (entry is None and self._begun is not None and self._is_needed(self._begun)):
            return None
        return size, self._num_layers - (0 if entry is None else entry.num_layers)

    def advance(self, sequence: RunningSequence, num_layers: int) -> None:
        """Run a slice of the medium at a sequence's next token, which needs its entry from now on."""
        ((medium, features),) = media_in(sequence, sequence.computed, sequence.computed + 1)
        if self._begun is not None and self._begun.name != features.name:
            self._drop(self._begun)
        held = self._held.setdefault(sequence, {})
        if medium.start not in held:
            held[medium.start] = self._acquire(features)
        self._run(held[medium.start], features, num_layers)
        self.num_slices += 1

    # ------------------------------------------------------------ room

    @property
    def _room(self) -> int:
        """Embeddings for which there is room beside the entries that sequences need."""
        return self.capacity - sum(entry.size for entry in self._entries.values() if self._is_needed(entry))

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
        if entry is self._begun:
            self._begun = None
        self._step.freed.append(entry.number)

    def _is_needed(self, entry: EncoderEntry) -> bool:
        return entry.num_refs > 0

    def settle(self, plan: StepPlan) -> None:
        """Say in a plan what is encoded and freed. What its rows needed last can be freed by the next one."""
        plan.encodes, plan.freed_entries = self._step.encodes, self._step.freed
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
        self._begun = None
        self._step = StepEntries()


def media_in(sequence: RunningSequence, start: int, end: int) -> Iterator[tuple[Media, Features]]:
    """The pictures and sounds that have tokens from position `start` to `end`."""
    if start >= sequence.num_prompt_tokens:
        return
    for medium, features in zip(sequence.request.prompt.encoded, sequence.features, strict=True):
        assert isinstance(features, Features), "the lobby sets them"
        if medium.start < end and medium.end > start:
            yield medium, features
