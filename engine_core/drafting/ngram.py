"""Prompt lookup: what followed the last tokens where they stood before, in the same sequence.

After Saxena, "Prompt Lookup Decoding" (2023): output that repeats its input, such as edited code or a summary, is
copied from there.
"""

from __future__ import annotations

from pagewire.engine_core.drafting.draft import TokenDraft, after_matches
from pagewire.engine_core.drafting.token_index import TokenIndex, match_length

MOST_PLACES = 32  # places of an n-gram that are compared
MOST_COMPARED = 32  # tokens before each of them


class NgramSource:
    """Looks up the last `longest` to `shortest` tokens.

    Of several places of an n-gram it takes the one before which most tokens agree, and of these the latest.
    """

    __slots__ = ("_indexes", "_token_ids")

    def __init__(self, token_ids: list[int], shortest: int, longest: int) -> None:
        self._token_ids = token_ids
        # The places of a short n-gram may be too many to compare, so the longest one has an index of its own.
        widths = sorted({shortest, longest}, reverse=True)
        self._indexes = [TokenIndex(token_ids, width) for width in widths]

    @property
    def num_missing(self) -> int:
        """Tokens that are not indexed yet."""
        return self._indexes[0].num_missing

    def propose(self, limit: int) -> TokenDraft | None:
        """Propose the tokens that followed there; behind the end of the sequence, the proposal repeats itself."""
        tokens = self._token_ids
        if not min(index.update() for index in self._indexes):  # of all of them, in any case
            return None
        length, place = self._find()
        if not length:
            return None
        period = len(tokens) - place
        token_ids = tokens[place : place + limit]
        token_ids += [token_ids[i % period] for i in range(len(token_ids), limit)]
        return TokenDraft(token_ids, [after_matches(length + i) for i in range(limit)])

    def _find(self) -> tuple[int, int]:
        """The length of the longest match and the position behind it; (0, 0) if there is none."""
        tokens, found = self._token_ids, (0, 0)
        for index in self._indexes:
            for place in index.earlier(MOST_PLACES):
                length = match_length(tokens, place, tokens, MOST_COMPARED)
                if length > found[0]:
                    found = length, place
                if length == MOST_COMPARED:
                    break
            if found[0]:
                break
        return found


class NgramDrafter:
    """Opens a `NgramSource` for each sequence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def open(self, token_ids: list[int], *, shared: bool) -> NgramSource:
        """The source of a sequence."""
        return NgramSource(token_ids, self._shortest, self._longest)

    def learn(self, token_ids: list[int]) -> None:
        """Nothing: each sequence is its own source."""
