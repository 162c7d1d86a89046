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

from collections.abc import Iterable, Sequence

from pagewire.frontend.requests.outputs import RequestState
from pagewire.ipc.suspicion import NO_SUSPICION, REQUEST_RULE, Suspicion

TRIALS = 16  # suspects tried after a death: the others would wait too long for them
TRIAL_TOKENS = 4  # for each output, after the first death


class Blame:
    """The suspicion of each request that a core had when it died, and the trials that it has passed, by key."""

    def __init__(self) -> None:
        self._suspicions: dict[int, Suspicion] = {}
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
        known = [state for state in in_flight if self._is_suspect(state)]
        alone = known[0] if len(known) == 1 and (len(in_flight) == 1 or known[0] is on_trial) else None
        suspicions = {state.key: self._suspicions[state.key] for state in held if self._is_suspect(state)}
        for state in in_flight:
            before = self._suspicions.get(state.key, NO_SUSPICION)
            suspicions[state.key] = before.after_crash(alone=state is alone)
        self._suspicions = suspicions
        self._passed = {key: count for key, count in self._passed.items() if key in suspicions}
        if alone is None or not suspicions[alone.key].is_guilty(REQUEST_RULE):
            return None
        self._suspicions, self._passed = {}, {}
        return alone

    def suspects(self, states: Iterable[RequestState]) -> list[RequestState]:
        """The requests to try, in this order: at most `TRIALS`.

        Most likely to blame is what has brought no token: the newest, whose arrival may have been the last that the
        core saw, and the oldest, whose turn it may have been. Those that passed most trials come last.
        """
        suspects = sorted(filter(self._is_suspect, states), key=lambda state: state.key)
        silent = [state for state in suspects if not state.num_output_tokens]
        from_both_ends = [silent[-1 - i // 2] if i % 2 == 0 else silent[i // 2] for i in range(len(silent))]
        ordered = from_both_ends + [state for state in reversed(suspects) if state.num_output_tokens]
        return sorted(ordered, key=lambda state: self._passed.get(state.key, 0))[:TRIALS]

    def tokens_to_bring(self, state: RequestState) -> int:
        """How many tokens more a request brings in its trial."""
        num_deaths = self._suspicions[state.key].num_in_all if self._is_suspect(state) else 1
        return TRIAL_TOKENS * state.num_outputs << 4 * (num_deaths - 1)

    def passed(self, state: RequestState) -> None:
        """Record that a request has passed a trial."""
        self._passed[state.key] = self._passed.get(state.key, 0) + 1

    def _is_suspect(self, state: RequestState) -> bool:
        return self._suspicions.get(state.key, NO_SUSPICION).is_suspect(REQUEST_RULE)
