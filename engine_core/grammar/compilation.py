"""A grammar on its way from a request to the scheduler."""

from __future__ import annotations

import time

from pagewire.engine_core.grammar.matcher import Grammar, GrammarError
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.fair_queue import FairQueue
from pagewire.ipc.shares import Name
from pagewire.ipc.wire.params import StructuredOutputsParams


class Compilation:
    """A grammar that is being compiled, or has been.

    size: bytes of the encoded structure. tenant: that has submitted it, at the monotonic time `now`.
    seconds: time limit of the wait for a thread, and then of the compilation.

    Attributes:
        structure: what to compile; None once there is an outcome. kind: of the structure.
        tenant: that has submitted it first. tenants: that have submitted it.
        lane: where it waits for a thread; None once one compiles it.
        outcome: set once, by the thread that compiles it.
    """

    def __init__(
        self, structure: StructuredOutputsParams, size: int, tenant: Name, now: float, seconds: float
    ) -> None:
        self.structure: StructuredOutputsParams | None = structure
        self.kind, self.size, self.tenant = structure.kind, size, tenant
        self.lane: FairQueue[Compilation] | None = None
        self.tenants = {tenant}
        self.outcome: Grammar | Exception | None = None
        self._seconds, self._deadline = seconds, now + seconds

    def wait(self, lane: FairQueue[Compilation], now: float) -> None:
        """Wait in a lane for a thread, with the whole time limit from now on."""
        self.lane, self._deadline = lane, now + self._seconds

    def begin(self) -> bool:
        """Begin to compile it, in a thread; False if it has waited too long for that."""
        if self.expired(now := time.monotonic()):
            return False
        self._deadline, self.lane = now + self._seconds, None
        return True

    def finish(self, outcome: Grammar | Exception) -> None:
        """Set the outcome."""
        self.outcome, self.structure = outcome, None

    def expired(self, now: float) -> bool:
        """True if the time limit has passed without an outcome."""
        return self.outcome is None and now > self._deadline

    def abandoned(self, now: float) -> bool:
        """True if it ended for reasons that say nothing about the grammar, such as the lack of a free thread."""
        return isinstance(self.outcome, EngineBusyError) or (self.expired(now) and self.lane is not None)

    def poll(self, now: float) -> Grammar | None:
        """The compiled grammar, or None while it is being compiled.

        Raises:
            GrammarError: the grammar is invalid, or takes too much time or memory to compile.
            EngineBusyError: no thread was free to compile it within the time limit, or no memory.
        """
        if isinstance(self.outcome, EngineBusyError):
            raise EngineBusyError(*self.outcome.args)
        if isinstance(self.outcome, Exception):
            raise GrammarError(*self.outcome.args)
        if self.abandoned(now):
            raise EngineBusyError(f"{self.kind}: waited {self._seconds:g} s for other grammars to compile")
        if self.expired(now):
            raise too_slow(self.kind, self._seconds)
        return self.outcome


def too_slow(kind: str, seconds: float) -> GrammarError:
    """The error of a grammar that takes too long to compile."""
    return GrammarError(
        f"{kind}: not compiled within {seconds:g} s: too complex (limit: PAGEWIRE_GRAMMAR_TIMEOUT_S)"
    )
