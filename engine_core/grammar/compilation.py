"""A grammar on its way from a request to the scheduler."""

from __future__ import annotations

import math
import time

from pagewire.engine_core.grammar.matcher import Grammar
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.errors import EngineBusyError, EngineStalledError
from pagewire.ipc.fair_queue import FairQueue
from pagewire.ipc.shares import Name
from pagewire.ipc.wire.params import StructuredOutputsParams


class Compilation:
    """A grammar that is being compiled, or has been.

    size: bytes of the encoded structure. tenant: that has submitted it.
    seconds: time limit of the wait for a thread, and then of the compilation.

    Attributes:
        structure: what to compile; None once there is an outcome. kind: of the structure.
        tenant: that has submitted it first. tenants: that have submitted it.
        lane: where it waits for a thread; None once one compiles it.
        outcome: set once, by the thread that compiles it.
    """

    def __init__(self, structure: StructuredOutputsParams, size: int, tenant: Name, seconds: float) -> None:
        self.structure: StructuredOutputsParams | None = structure
        self.kind, self.size, self.tenant = structure.kind, size, tenant
        self.lane: FairQueue[Compilation] | None = None
        self.tenants = {tenant}
        self.outcome: Grammar | Exception | None = None
        self._seconds, self._deadline = seconds, math.inf
        self._late: EngineBusyError = EngineBusyError()

    def wait(self, lane: FairQueue[Compilation], now: float, load_seconds: float = 0.0) -> None:
        """Wait in a lane for a thread, with the whole time limit from the monotonic time `now` on.

        load_seconds: the tokenizer is being loaded, which has this limit instead; then `wait` is called again.
        """
        self.lane, self._deadline = lane, now + (load_seconds or self._seconds)
        if load_seconds:
            late = f"the tokenizer for grammars was not loaded within {load_seconds:g} s: try again later"
            self._late = EngineStalledError(f"{self.kind}: {late}")
        else:
            self._late = EngineBusyError(
                f"{self.kind}: waited {self._seconds:g} s for other grammars to compile"
            )

    def begin(self) -> bool:
        """Begin to compile it, in a thread; False if it has waited too long for that."""
        if self.expired(now := time.monotonic()):
            return False
        self.lane = None
        self.extend(now)
        return True

    def extend(self, now: float) -> None:
        """Begin the time limit of the compilation anew, for somebody who has not waited yet."""
        self._deadline = now + self._seconds
        self._late = EngineStalledError(
            f"{self.kind}: not compiled within {self._seconds:g} s, for which it got too little of a processor: "
            "try again later"
        )

    def finish(self, outcome: Grammar | Exception) -> None:
        """Set the outcome."""
        self.outcome, self.structure = outcome, None

    def expired(self, now: float) -> bool:
        """True if the time limit has passed without an outcome."""
        return self.outcome is None and now > self._deadline

    def abandoned(self, now: float) -> bool:
        """True if it will have no outcome, for reasons that say nothing about the grammar: no thread was free."""
        return isinstance(self.outcome, EngineBusyError) or (self.expired(now) and self.lane is not None)

    def poll(self, now: float) -> Grammar | None:
        """The compiled grammar, or None while it is being compiled.

        Raises:
            GrammarError: the grammar is invalid, or takes too much processor time or memory to compile.
            EngineBusyError: no thread was free to compile it within the time limit, or no memory.
            EngineStalledError: it got too little of a processor within the time limit.
        """
        if isinstance(self.outcome, EngineBusyError):
            raise type(self.outcome)(*self.outcome.args)
        if isinstance(self.outcome, Exception):
            raise GrammarError(*self.outcome.args)
        if self.expired(now):
            raise type(self._late)(*self._late.args)
        return self.outcome


def too_slow(kind: str, cpu_seconds: float) -> GrammarError:
    """The error of a grammar that takes too much processor time to compile."""
    return GrammarError(
        f"{kind}: not compiled within {cpu_seconds:g} s of processor time: too complex "
        "(limit: half of PAGEWIRE_GRAMMAR_TIMEOUT_S)"
    )
