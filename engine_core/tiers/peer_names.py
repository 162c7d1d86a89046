"""Which blocks other cores have, as far as they were asked. Pure: no IO, no clock.

    waiting -- ask() --> held -- answered(), expire() --> waiting, and it is known who has its prefix

Cores are asked for the names that a sequence has; none says which names there are. What they have said is believed
until a block does not come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from pagewire.engine_core.schedule.sequence import Sequence

MAX_KNOWN = 1 << 16  # names whose core is remembered; they take 8 MiB
MAX_ASKED = 1 << 12  # prefixes that are not asked for again until `forget_asked`


@dataclass(slots=True, eq=False)
class PrefixQuestion:
    """What other cores are asked: which of these names they have.

    key: the name of the prefix's last block. waiting: sequences that are held until it is answered.
    open: the answers that are awaited, by core and index of the first name.
    until: when it is no longer waited for, in seconds; None: it was not sent yet.
    """

    number: int
    key: bytes
    names: list[bytes]
    waiting: list[Sequence] = field(default_factory=list)
    open: set[tuple[int, int]] = field(default_factory=set)
    until: float | None = None


class PeerNames:
    """What is known of other cores, each by its index among them.

    Attributes:
        places: the core that has a block, by name; for states `state_name`. reachable: cores that may be asked now.
    """

    def __init__(self) -> None:
        self.places: dict[bytes, int] = {}
        self.reachable: Collection[int] = ()
        self._questions: dict[int, PrefixQuestion] = {}
        self._by_key: dict[bytes, PrefixQuestion] = {}
        self._unsent: list[PrefixQuestion] = []
        self._asked: set[bytes] = set()
        self._next_number = 1

    def has(self, name: bytes) -> bool:
        """True if a core that may be asked has said that it has a block."""
        peer = self.places.get(name)
        return peer is not None and peer in self.reachable

    def is_known(self, key: bytes) -> bool:
        """True if others were asked for a prefix a moment ago, or none can be asked. key: of `PrefixQuestion`."""
        return key in self._asked or not (self.reachable or key in self._by_key)

    def ask(self, key: bytes, names: list[bytes], sequence: Sequence) -> None:
        """Ask which of these names others have; the sequence is held meanwhile."""
        question = self._by_key.get(key)
        if question is None:
            question = self._by_key[key] = PrefixQuestion(self._next_number, key, names)
            self._questions[self._next_number] = question
            self._next_number += 1
            self._unsent.append(question)
        question.waiting.append(sequence)

    @property
    def held(self) -> Iterator[Sequence]:
        """The sequences that wait for answers; some may have ended meanwhile."""
        for question in self._questions.values():
            yield from question.waiting

    def take_questions(self) -> list[PrefixQuestion]:
        """The questions that are to be sent; the caller says in each what it awaits, and until when."""
        unsent, self._unsent = self._unsent, []
        return unsent

    @property
    def next_end(self) -> float | None:
        """When the next question is no longer waited for; None if there is none."""
        ends = [question.until for question in self._questions.values() if question.until is not None]
        return min(ends, default=None)

    def answered(self, number: int, peer: int, first: int, flags: bytes) -> list[Sequence]:
        """Take an answer: a byte for each name from the index `first` on; too few say no.

        Returns the sequences that wait no longer: all cores have answered, or one has everything.
        """
        if (question := self._questions.get(number)) is None:
            return []
        for name, flag in zip(question.names[first:], flags, strict=False):
            if flag and not self.has(name):
                self.places[name] = peer
        while len(self.places) > MAX_KNOWN:
            del self.places[next(iter(self.places))]
        question.open.discard((peer, first))
        if question.open and not all(map(self.has, question.names)):
            return []
        return self._end(question)

    def expire(self, now: float) -> tuple[list[Sequence], set[int]]:
        """The sequences whose questions have waited for too long, and the cores that have not answered."""
        late = [each for each in self._questions.values() if each.until is not None and each.until <= now]
        peers = {peer for question in late for peer, _ in question.open}
        return [sequence for question in late for sequence in self._end(question)], peers

    def _end(self, question: PrefixQuestion) -> list[Sequence]:
        del self._questions[question.number], self._by_key[question.key]
        if len(self._asked) >= MAX_ASKED:
            self._asked.clear()
        self._asked.add(question.key)
        return question.waiting

    def end_all(self) -> list[Sequence]:
        """End all questions. Returns the sequences that have waited."""
        self._unsent.clear()
        return [sequence for question in list(self._questions.values()) for sequence in self._end(question)]

    def forget_asked(self) -> None:
        """Ask again for what was asked: others may have computed it by now."""
        self._asked.clear()

    def forget(self) -> None:
        """Forget which blocks others have."""
        self.places.clear()
        self._asked.clear()


def chunks(names: Sequence_[bytes], size: int) -> list[tuple[int, Sequence_[bytes]]]:
    """The names in parts of a size, each with the index of its first."""
    return [(first, names[first : first + size]) for first in range(0, len(names), size)]
