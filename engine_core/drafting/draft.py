"""Drafts, and what proposes them for one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class TokenDraft:
    """Tokens that are proposed to follow a sequence.

    chances: for each token, how likely it is right if those before it are, 0 to 1, as its source sees it; what a
        request's drafts have been worth is not in it.
    """

    token_ids: list[int]
    chances: list[float]

    def part(self, begin: int, end: int | None = None) -> TokenDraft | None:
        """The tokens from `begin` to `end`, given that those before are right; None if there are none."""
        token_ids = self.token_ids[begin:end]
        return TokenDraft(token_ids, self.chances[begin:end]) if token_ids else None


class Source(Protocol):
    """Proposes drafts for one sequence, whose tokens it was given as a list that grows."""

    @property
    def num_missing(self) -> int:
        """Tokens of the sequence that the next call of `propose` takes in first, or begins to."""

    def propose(self, limit: int) -> TokenDraft | None:
        """At most `limit` (1 or more) tokens to follow the sequence; None if nothing is known."""


class TextDrafter(Protocol):
    """Makes the sources of all sequences."""

    def open(self, token_ids: list[int], *, shared: bool) -> Source:
        """The source of a sequence. token_ids: all its tokens; the list grows with it.

        shared: what the sequence generates may serve others, and they it.
        """

    def learn(self, token_ids: list[int]) -> None:
        """Take in the output of a sequence that has ended and was `shared`."""


def after_matches(length: int) -> float:
    """How likely one more token agrees after `length` in a row have: Laplace's rule of succession."""
    return (length + 1) / (length + 2)
