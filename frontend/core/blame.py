"""Finds the request that kills engine cores, without ending another in its place.

A core can die of anything: a signal, a lack of memory, or a request. What was in flight when it died (submitted,
and not ended) is suspect. On the next core, suspects are tried first: one at a time, nothing else in flight, until
the request has brought some tokens. Those that pass, and everything else, then go on together. Where other cores
serve meanwhile (`route`), only the suspects wait, and what has seen no core die may be in flight beside a trial.

A request is to blame if a core dies while it alone is in flight, and it was in flight at an earlier death. All
others are then free of suspicion. A request that kills only later passes its trial; it is in flight at the next
death, too, and each further trial takes sixteen times as many tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from pagewire.frontend.requests.outputs import RequestState

TRIALS = 16  # suspects tried after a death: the others would wait too long for them
TRIAL_TOKENS = 4  # for each output, after the first death


class Blame:
    """The deaths of cores at which each request was in flight, and the trials that it has passed, by key."""

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}
        self._passed: dict[int, int] = {}

    def core_died(
        self,
        in_flight: Sequence[RequestState],
        held: Iterable[RequestState],
        on_trial: RequestState | None = None,
    ) -> RequestState | None:
        """Record that a core died. Returns the request that killed it; None if that is not certain.

        held: the other open requests, which the core did not have. on_trial: the suspect that was tried just then.
            With it, others may have been in flight that have seen no core die before: they are not to blame.
        """
        deaths = {state.key: self._deaths[state.key] for state in held if state.key in self._deaths}
        for state in in_flight:
            deaths[state.key] = self._deaths.get(state.key, 0) + 1
        self._deaths = deaths
        self._passed = {key: count for key, count in self._passed.items() if key in deaths}
        suspects = [state for state in in_flight if deaths[state.key] >= 2]
        if len(suspects) != 1 or not (len(in_flight) == 1 or suspects[0] is on_trial):
            return None
        self._deaths, self._passed = {}, {}
        return suspects[0]

    def suspects(self, states: Iterable[RequestState]) -> list[RequestState]:
        """The requests to try, in this order: at most `TRIALS`.

        Most likely to blame is what has brought no token: the newest, whose arrival may have been the last that the
        core saw, and the oldest, whose turn it may have been. Those that passed most trials come last.
        """
        suspects = sorted(
            (state for state in states if state.key in self._deaths), key=lambda state: state.key
        )
        silent = [state for state in suspects if not state.num_output_tokens]
        from_both_ends = [silent[-1 - i // 2] if i % 2 == 0 else silent[i // 2] for i in range(len(silent))]
        ordered = from_both_ends + [state for state in reversed(suspects) if state.num_output_tokens]
        return sorted(ordered, key=lambda state: self._passed.get(state.key, 0))[:TRIALS]

    def tokens_to_bring(self, state: RequestState) -> int:
        """How many tokens more a request brings in its trial."""
        return TRIAL_TOKENS * state.num_outputs << 4 * (self._deaths.get(state.key, 1) - 1)

    def passed(self, state: RequestState) -> None:
        """Record that a request has passed a trial."""
        self._passed[state.key] = self._passed.get(state.key, 0) + 1


class SuspectTrial:
    """One suspect that runs alone on a core, until it has brought enough tokens or any thread ends the wait."""

    def __init__(self) -> None:
        self._running: tuple[RequestState, int] | None = None  # the suspect, its goal
        self._over = threading.Event()

    def begin(self, state: RequestState, goal: int) -> None:
        """Start a trial. goal: the number of output tokens that clears the suspect."""
        self._running = state, goal
        self._over.clear()

    def end(self) -> None:
        """The suspect runs alone no longer."""
        self._running = None

    def check_progress(self) -> None:
        """End the wait if the suspect has enough tokens."""
        if self._running is not None and self._running[0].num_output_tokens >= self._running[1]:
            self._over.set()

    def dropped(self, state: RequestState) -> None:
        """A request has ended: end the wait if it is the suspect."""
        if self._running is not None and self._running[0] is state:
            self._over.set()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the trial, or what was begun with `wait_anew`, is over."""
        self._over.wait(seconds)

    def wait_anew(self) -> None:
        """Let the next `wait` wait until `stop_waiting`."""
        self._over.clear()

    def stop_waiting(self) -> None:
        """End the wait."""
        self._over.set()
