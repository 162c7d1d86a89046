"""Drafts: tokens that are proposed to follow a sequence, computed and verified in one step."""

from __future__ import annotations

from typing import Protocol

from pagewire.engine_core.schedule.sequence import Sequence


class Drafter(Protocol):
    """Proposes drafts. They never change an output: a draft counts only if it is the token sampled there."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """At most `limit` (1 or more) tokens that may follow the sequence, all of whose tokens are known."""
