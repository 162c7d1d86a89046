"""The tenants that share the scheduler: what each was given, in tokens, and where its next request queues.

The counter by which the least served tenant is next (`ipc.shares`) grows by each prompt token that an
admission has to compute, and by each output token.

A request without a tenant belongs to the frontend that submitted it. So with one frontend and no names there is one
tenant, and sequences are served in order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pagewire.ipc.shares import Share, Shares

PASSES = 64  # later sequences that may pass each further sequence of a batch


@dataclass(slots=True, eq=False)
class TenantAccount(Share):
    """What the scheduler keeps of one tenant, whose work is sequences in the queue and in slots.

    num_requests, num_prompt_tokens, num_output_tokens: counts since the tenant is known; prompt tokens without
        those found in the cache, and once for a sequence, however often it is preempted.
    clock: the place in its own order at which its next request queues.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    clock: int = 0

    @property
    def served(self) -> float:
        """The virtual counter, in tokens."""
        return self.raised + self.num_prompt_tokens + self.num_output_tokens

    def turn(self, rank: int) -> int:
        """The place in the tenant's order of a new request with `rank` sequences of its batch before it.

        A batch queues as if its sequences came one by one, `PASSES` others apart. So a later request passes the end
        of a batch, and each sequence of a batch is passed by a bounded number.
        """
        return self.clock + PASSES * rank

    def admit(self, turn: int, num_tokens: int) -> None:
        """Count the admission of a sequence at place `turn`, with `num_tokens` prompt tokens to compute."""
        self.num_running += 1
        self.num_prompt_tokens += num_tokens
        self.clock = max(self.clock, turn) + 1


Tenants: TypeAlias = Shares[TenantAccount]
