"""Where sequences wait that cannot be scheduled yet: the features of their media are being made, their grammar is
being compiled, their adapter is being read, or the engine is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sequence_
from itertools import islice
from typing import Protocol

from pagewire.engine_core.schedule.attachments import EncoderInput, GrammarError, GrammarPosition
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.schedule.step import Outcome
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.shares import Name
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.params import StructuredOutputsParams
from pagewire.ipc.wire.requests import TokenDelta


class CompiledGrammar(Protocol):
    """A grammar that sequences can follow."""

    def matcher(self, token_ids: Sequence_[int] = (), ignore_eos: bool = False) -> GrammarPosition:
        """The position of a sequence that has generated `token_ids`; raises GrammarError."""


class PendingGrammar(Protocol):
    """A grammar that is being compiled, or has been."""

    def poll(self, now: float) -> CompiledGrammar | None:
        """The grammar, or None while it is being compiled; raises GrammarError or EngineBusyError."""


class GrammarCompiler(Protocol):
    """Compiles grammars in the background."""

    def submit(self, structure: StructuredOutputsParams, tenant: Name, now: float) -> PendingGrammar:
        """Begin to compile a grammar for a tenant; raises EngineBusyError."""


class PendingFeatures(Protocol):
    """The media of a prompt, whose features are being made, or have been."""

    def poll(self) -> Sequence_[EncoderInput] | None:
        """The features, or None while they are being made; raises ValueError or EngineBusyError."""


class MediaProcessing(Protocol):
    """Makes features of media in the background."""

    def submit(self, prompt: Prompt, tenant: Name, frontend: bytes, now: float) -> PendingFeatures:
        """Begin to make the features of a prompt's media for a frontend's tenant; raises EngineBusyError."""


class WaitingSequences(Protocol):
    """Sequences in turn."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class AdapterRoom(Protocol):
    """Where sequences wait for their adapter."""

    @property
    def queue(self) -> WaitingSequences:
        """Those that wait."""

    def enter(self, sequence: Sequence, now: float) -> None:
        """Let a sequence wait for its adapter, until `admit` returns it."""

    def drop(self, sequence: Sequence) -> bool:
        """Take a sequence out of those that wait; False if it is none of them."""

    def admit(self, now: float) -> tuple[list[Sequence], list[tuple[Sequence, Exception]]]:
        """The sequences that may be scheduled from now on, in order; and those that cannot run, with the reason."""


MAX_REPLAYED = 256  # matchers, and tokens that they start with, for which one call of `ready` does the work


class Lobby:
    """Sequences between submission and the scheduler. Pure, as the scheduler is: no IO, no clock.

        add() -> [media] -> [compiling] -> [adapter] -> ready() -> Scheduler.add

    max_waiting: maximum number of waiting sequences, here and in the scheduler's queue.
    on_compiled: called once for each request with the seconds that it waited for its grammar.
    adapters: where sequences wait for their adapter; None: no sequence has one.
    media: makes the features of pictures and sounds; None: no prompt has any.

    Attributes:
        held: nothing leaves the lobby, because the engine is paused.
        awaits_weights: likewise, because the workers are to have other weights first.
        has_work: `ready` has left work for its next call, for which the loop should not wait.
    """

    def __init__(
        self,
        grammars: GrammarCompiler,
        max_waiting: int,
        on_compiled: Callable[[float], None],
        adapters: AdapterRoom | None = None,
        media: MediaProcessing | None = None,
    ) -> None:
        self.held = self.awaits_weights = self.has_work = False
        self._grammars, self._max_waiting, self._on_compiled = grammars, max_waiting, on_compiled
        self._grammar_of: dict[Sequence, PendingGrammar] = {}
        self._compiling: dict[PendingGrammar, dict[Sequence, None]] = {}  # one entry however many wait for it
        self._ready: dict[Sequence, None] = {}  # in order
        self._adapters, self._media = adapters, media
        self._processing: dict[PendingFeatures, dict[Sequence, None]] = {}

    def __len__(self) -> int:
        return self.num_processing + len(self._grammar_of) + len(self._ready) + self.num_loading

    def __iter__(self) -> Iterator[Sequence]:
        for group in self._processing.values():
            yield from group
        yield from self._grammar_of
        yield from self._ready
        if self._adapters is not None:
            yield from self._adapters.queue

    @property
    def num_processing(self) -> int:
        """Number of sequences whose media are being processed."""
        return sum(map(len, self._processing.values()))

    @property
    def num_compiling(self) -> int:
        """Number of sequences whose grammar is being compiled."""
        return len(self._grammar_of)

    @property
    def num_loading(self) -> int:
        """Number of sequences that wait for their adapter."""
        return 0 if self._adapters is None else len(self._adapters.queue)

    def add(self, group: Iterable[Sequence], num_queued: int, now: float) -> None:
        """Take in the sequences of a request. num_queued: those that wait in the scheduler.

        Raises:
            EngineBusyError: too many sequences or grammars are waiting; nothing was taken in.
        """
        group = list(group)
        num_waiting = num_queued + len(self)
        if num_waiting + len(group) > self._max_waiting:
            raise EngineBusyError(f"{num_waiting} requests are already waiting (limit: max_waiting)")
        if self._media is not None and (prompt := group[0].request.prompt).encoded:
            features = self._media.submit(prompt, group[0].tenant.name, group[0].client, now)
            self._processing[features] = dict.fromkeys(group)
            return
        self._compile(group, now)

    def _compile(self, group: list[Sequence], now: float) -> None:
        """Have the grammar of a request compiled, if it has one; raises EngineBusyError."""
        structure = None if group[0].pools else group[0].params.structured_outputs
        if structure is None:
            self._ready.update(dict.fromkeys(group))
            return
        pending = self._grammars.submit(structure, group[0].tenant.name, now)
        self._grammar_of.update(dict.fromkeys(group, pending))
        self._compiling.setdefault(pending, {}).update(dict.fromkeys(group))

    def ready(self, now: float) -> tuple[list[Sequence], list[Outcome]]:
        """The sequences that may be scheduled from now on, in order; and the ends of those that are refused.

        A call does a bounded amount of work; `has_work` says whether more is left.
        """
        refusals = self._poll_media(now) if self._processing else []
        refusals += self._poll(now) if self._compiling else []
        if self.held or self.awaits_weights:
            return [], refusals
        ready, self._ready = list(self._ready), {}
        if self._adapters is not None:
            ready, refused = self._with_adapters(self._adapters, ready, now)
            refusals += refused
        return ready, refusals

    def _with_adapters(
        self, adapters: AdapterRoom, sequences: list[Sequence], now: float
    ) -> tuple[list[Sequence], list[Outcome]]:
        """Those of `sequences` that need no adapter, and all whose adapter is there; the ends of those refused."""
        for sequence in sequences:
            if sequence.adapter is not None:
                adapters.enter(sequence, now)
        admitted, refused = adapters.admit(now)
        ready = [sequence for sequence in sequences if sequence.adapter is None] + admitted
        return ready, [ended(sequence, error) for sequence, error in refused]

    def hold(self) -> None:
        """Keep every sequence here until `release`."""
        self.held = True

    def release(self) -> None:
        """Let sequences leave again."""
        self.held = False

    def drop(self, sequence: Sequence) -> bool:
        """End a sequence without a delta; False if it is not here."""
        if sequence in self._grammar_of:
            self._leave(sequence)
        elif sequence in self._ready:
            del self._ready[sequence]
        elif (features := self._processing_of(sequence)) is not None:
            del self._processing[features][sequence]
            if not self._processing[features]:
                del self._processing[features]
        elif self._adapters is None or not self._adapters.drop(sequence):
            return False
        sequence.state = State.FINISHED
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence from those that wait for their grammar."""
        pending = self._grammar_of.pop(sequence)
        del self._compiling[pending][sequence]
        if not self._compiling[pending]:
            del self._compiling[pending]

    def _processing_of(self, sequence: Sequence) -> PendingFeatures | None:
        found = (features for features, group in self._processing.items() if sequence in group)
        return next(found, None)

    def _poll_media(self, now: float) -> list[Outcome]:
        """Give sequences the features of their media. Returns the ends of those whose media are refused."""
        refusals: list[Outcome] = []
        for pending in list(self._processing):
            try:
                if (features := pending.poll()) is None:
                    continue
                group = list(self._processing.pop(pending))
                for sequence in group:
                    sequence.features = features
                self._compile(group, now)
            except (ValueError, EngineBusyError) as error:
                refused = self._processing.pop(pending, None)
                refusals += [ended(sequence, error) for sequence in (group if refused is None else refused)]
        return refusals

    def _poll(self, now: float) -> list[Outcome]:
        """Give sequences their compiled grammars. Returns the ends of those whose grammar is refused."""
        refusals: list[Outcome] = []
        allowance = MAX_REPLAYED
        self.has_work = False
        for pending, waiting in list(self._compiling.items()):
            try:
                outcome: CompiledGrammar | Exception | None = pending.poll(now)
            except (GrammarError, EngineBusyError) as error:
                outcome = error
            if outcome is None:
                continue
            for sequence in list(islice(waiting, max(0, allowance))):
                if allowance <= 0:
                    break
                allowance -= 1 + sequence.num_output_tokens
                self._leave(sequence)
                refusals += self._enter(sequence, outcome, now)
            self.has_work |= bool(waiting)
        return refusals

    def _enter(self, sequence: Sequence, outcome: CompiledGrammar | Exception, now: float) -> list[Outcome]:
        """Make a sequence ready to leave; returns its end if it is refused."""
        try:
            if isinstance(outcome, GrammarError) and is_optional(sequence):
                self._ready[sequence] = None
                return []
            if isinstance(outcome, Exception):
                raise outcome
            sequence.matcher = outcome.matcher(sequence.output_token_ids, sequence.params.ignore_eos)
        except (GrammarError, EngineBusyError) as error:
            return [ended(sequence, error)]
        self._ready[sequence] = None
        if sequence.index == 0:
            self._on_compiled(now - sequence.arrival_time)
        return []


def is_optional(sequence: Sequence) -> bool:
    """True if a sequence may be generated without its grammar."""
    structure = sequence.params.structured_outputs
    return structure is not None and structure.optional


def ended(sequence: Sequence, error: Exception) -> Outcome:
    """End a sequence that is not scheduled with an error."""
    sequence.state = State.FINISHED
    return sequence, refusal(sequence, error)


def refusal(sequence: Sequence, error: Exception) -> TokenDelta:
    """The end of a sequence that is not scheduled. A `GrammarError` is a ValueError for the frontend."""
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return TokenDelta(
        sequence.key, sequence.index, [], finish_reason="error", error=str(error), error_type=kind
    )
