"""Where sequences wait that cannot be scheduled yet: their grammar is being compiled, or the engine is paused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from pagewire.engine_core.grammar.matcher import Grammar, GrammarError
from pagewire.engine_core.schedule.scheduler import Outcome
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.messages import TokenDelta
from pagewire.ipc.params import StructuredOutputsParams


class PendingGrammar(Protocol):
    """A grammar that is being compiled, or has been."""

    def poll(self, now: float) -> Grammar | None:
        """The grammar, or None while it is being compiled; raises GrammarError or EngineBusyError."""


class GrammarCompiler(Protocol):
    """Compiles grammars in the background."""

    def submit(self, structure: StructuredOutputsParams, now: float) -> PendingGrammar:
        """Begin to compile a grammar; raises EngineBusyError."""


class Lobby:
    """Sequences between submission and the scheduler. Pure, as the scheduler is: no IO, no clock.

        add() -> compiling -> ready() -> Scheduler.add

    max_waiting: maximum number of waiting sequences, here and in the scheduler's queue.
    on_compiled: called once for each request with the seconds that it waited for its grammar.

    Attributes:
        held: nothing leaves the lobby, because the engine is paused.
    """

    def __init__(
        self, grammars: GrammarCompiler, max_waiting: int, on_compiled: Callable[[float], None]
    ) -> None:
        self.held = False
        self._grammars, self._max_waiting, self._on_compiled = grammars, max_waiting, on_compiled
        self._compiling: dict[Sequence, PendingGrammar] = {}
        self._ready: dict[Sequence, None] = {}  # in order

    def __len__(self) -> int:
        return len(self._compiling) + len(self._ready)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._compiling
        yield from self._ready

    @property
    def num_compiling(self) -> int:
        """Number of sequences whose grammar is being compiled."""
        return len(self._compiling)

    def add(self, group: Iterable[Sequence], num_queued: int, now: float) -> None:
        """Take in the sequences of a request. num_queued: those that wait in the scheduler.

        Raises:
            EngineBusyError: too many sequences or grammars are waiting; nothing was taken in.
        """
        group = list(group)
        num_waiting = num_queued + len(self)
        if num_waiting + len(group) > self._max_waiting:
            raise EngineBusyError(f"{num_waiting} requests are already waiting (limit: max_waiting)")
        structure = None if group[0].pools else group[0].params.structured_outputs
        if structure is None:
            self._ready.update(dict.fromkeys(group))
        else:
            self._compiling.update(dict.fromkeys(group, self._grammars.submit(structure, now)))

    def ready(self, now: float) -> tuple[list[Sequence], list[Outcome]]:
        """The sequences that may be scheduled from now on, in order; and the ends of those that are refused."""
        refusals = self._poll(now) if self._compiling else []
        if self.held or not self._ready:
            return [], refusals
        ready, self._ready = list(self._ready), {}
        return ready, refusals

    def hold(self) -> None:
        """Keep every sequence here until `release`."""
        self.held = True

    def release(self) -> None:
        """Let sequences leave again."""
        self.held = False

    def drop(self, sequence: Sequence) -> bool:
        """End a sequence without a delta; False if it is not here."""
        if sequence not in self._compiling and sequence not in self._ready:
            return False
        self._compiling.pop(sequence, None)
        self._ready.pop(sequence, None)
        sequence.state = State.FINISHED
        return True

    def _poll(self, now: float) -> list[Outcome]:
        """Give sequences their compiled grammars. Returns the ends of those whose grammar is refused."""
        refusals = []
        for sequence, pending in list(self._compiling.items()):
            try:
                grammar = pending.poll(now)
                if grammar is None:
                    continue
                sequence.matcher = grammar.matcher(sequence.output_token_ids, sequence.params.ignore_eos)
                self._ready[sequence] = None
                if sequence.index == 0:
                    self._on_compiled(now - sequence.arrival_time)
            except (GrammarError, EngineBusyError) as error:
                sequence.state = State.FINISHED
                refusals.append((sequence, refusal(sequence, error)))
            del self._compiling[sequence]
        return refusals


def refusal(sequence: Sequence, error: Exception) -> TokenDelta:
    """The end of a sequence that is not scheduled. A `GrammarError` is a ValueError for the frontend."""
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return TokenDelta(
        sequence.key, sequence.index, [], finish_reason="error", error=str(error), error_type=kind
    )
