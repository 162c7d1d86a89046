"""To which core a request goes. Pure.

    cost(core) = tokens of the prompt that it would have to compute
               + prompt tokens that wait there already
               + RUNNING_TOKENS for each sequence that runs there

The cheapest core gets the request, so a long prefix outweighs a short queue, and a long queue any prefix. Among
equally cheap ones a request goes where the last one with the same beginning went.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

# What a running sequence costs a new request, in prompt tokens: one in each step, while both run. The number of
# these steps is not known before an output ends; many answers have about this many tokens.
RUNNING_TOKENS = 64
Policy: TypeAlias = Literal["prefix", "round-robin"]
POLICIES: tuple[Policy, ...] = ("prefix", "round-robin")


class CoreLoad(NamedTuple):
    """A core that may get a request.

    core: its number. num_cached: tokens of the prompt that it has. num_waiting: prompt tokens that were sent there
    and are not computed yet. num_running: sequences there beyond their prompt. num_placed: requests it was sent.
    """

    core: int
    num_cached: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_placed: int = 0


def cost(candidate: CoreLoad, num_tokens: int) -> int:
    """The cost of a prompt of `num_tokens` there, in tokens. At least one token is always computed."""
    to_compute = max(1, num_tokens - candidate.num_cached)
    return to_compute + candidate.num_waiting + RUNNING_TOKENS * candidate.num_running


def choose_core(num_tokens: int, candidates: Iterable[CoreLoad], last: int | None = None) -> int:
    """The core for a prompt of `num_tokens`. last: where the last request with the same beginning went.

    Raises:
        ValueError: there are no candidates.
    """
    costs = {candidate: cost(candidate, num_tokens) for candidate in candidates}
    lowest = min(costs.values())
    cheapest = [candidate for candidate, each in costs.items() if each == lowest]
    if last in {candidate.core for candidate in cheapest}:
        assert last is not None
        return last
    return min(cheapest, key=lambda candidate: (candidate.num_placed, candidate.core)).core


def next_in_turn(candidates: Iterable[CoreLoad], turn: int) -> int:
    """One core after the other: the policy "round-robin", which ignores prefixes. turn: counts requests."""
    cores = sorted(candidate.core for candidate in candidates)
    return cores[turn % len(cores)]
