"""Counts of crashes, which say whether a request, a sequence or an adapter may be the cause.

Whatever was in flight when a process crashed may be the cause. After some crashes it is suspect: it runs alone from
then on, so that the next crash says whether it was. Then it is guilty, and not tried again.

    free --crashes--> suspect --crashes--> guilty
     ^                   |
     +--survives alone---+

| who | in flight where | rule |
|---|---|---|
| `engine_core/schedule/` | a sequence in a step of a worker | `SEQUENCE_RULE` |
| `engine_core/adapters/` | an adapter that a worker reads | `ADAPTER_RULE` |
| `frontend/core/`, also under a router | a request in a core | `REQUEST_RULE` |
"""

from __future__ import annotations

import msgspec

NEVER = 1 << 62  # crashes, or steps


class SuspicionRule(msgspec.Struct, frozen=True):
    """The numbers of crashes that make something suspect, and guilty; by default none does.

    in_row: crashes since it last gave a sign of life. in_all: since it was last free of suspicion.
    guilty_alone: crashes while nothing else was in flight that may be the cause.
    clear_after: steps that it survives alone, after which its crashes are forgotten.
    """

    suspect_in_row: int = NEVER
    suspect_in_all: int = NEVER
    guilty_in_row: int = NEVER
    guilty_in_all: int = NEVER
    guilty_alone: int = NEVER
    clear_after: int = NEVER


# A worker may crash of anything, and many sequences are in flight: one is suspect if it saw several crashes.
SEQUENCE_RULE = SuspicionRule(
    suspect_in_row=2, guilty_in_row=3, suspect_in_all=3, guilty_in_all=5, clear_after=8
)
ADAPTER_RULE = SuspicionRule(suspect_in_all=1, guilty_alone=1, guilty_in_all=4)
REQUEST_RULE = SuspicionRule(suspect_in_all=1, guilty_alone=1)


class Suspicion(msgspec.Struct, frozen=True):
    """The crashes that one thing has seen; see `SuspicionRule`.

    num_survived: steps that it has run alone since the last crash.
    """

    num_in_row: int = 0
    num_in_all: int = 0
    num_alone: int = 0
    num_survived: int = 0

    def after_crash(self, *, alone: bool = False) -> Suspicion:
        """The suspicion after one more crash. alone: nothing else was in flight that may be the cause."""
        return Suspicion(self.num_in_row + 1, self.num_in_all + 1, self.num_alone + alone)

    def after_step(self, rule: SuspicionRule, *, alone: bool) -> Suspicion:
        """The suspicion after a sign of life; `NO_SUSPICION` once there were enough of them alone."""
        num_survived = self.num_survived + alone
        if num_survived >= rule.clear_after:
            return NO_SUSPICION
        return Suspicion(0, self.num_in_all, self.num_alone, num_survived)

    def is_suspect(self, rule: SuspicionRule) -> bool:
        """True if it may be the cause of crashes, so that it runs alone."""
        return self.num_in_row >= rule.suspect_in_row or self.num_in_all >= rule.suspect_in_all

    def is_guilty(self, rule: SuspicionRule) -> bool:
        """True if it is the cause for all that is known, so that it is not tried again."""
        return (
            self.num_in_row >= rule.guilty_in_row
            or self.num_in_all >= rule.guilty_in_all
            or self.num_alone >= rule.guilty_alone
        )


NO_SUSPICION = Suspicion()
