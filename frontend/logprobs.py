"""Log probabilities as the public sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """One candidate for one position. rank: 1 = most likely. decoded_token: its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
