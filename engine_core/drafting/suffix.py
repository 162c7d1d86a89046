"""Suffix drafts: what most often followed the last tokens, in the sequence itself and in the outputs of others.

After Oliaro et al., "SuffixDecoding" (2024), with an index of places in the place of suffix trees: all places where
the last tokens stood before vote for the token that followed them, the longer the match, the more; those that named
the winner vote for the next one. How likely a draft is right is its share of the votes, so its length follows from
that.
"""

from __future__ import annotations

from array import array

from pagewire.engine_core.drafting.draft import TokenDraft, after_matches
from pagewire.engine_core.drafting.token_index import TokenIndex, Tokens, match_length

WIDTHS = (6, 2)  # tokens of the n-grams that are looked up; the second if the first has no place
MOST_PLACES = 24  # that vote
LONGEST = 16  # tokens of a match that count
LEAST_CHANCE = 0.05  # that a whole draft is right
HISTORY_TOKENS = 1 << 18  # of each of the two halves of the history; 20 to 44 bytes each, with both indexes
SEPARATOR = -1  # between outputs


class IndexedText:
    """A text and its indexes."""

    __slots__ = ("indexes", "text")

    def __init__(self, text: Tokens) -> None:
        self.text = text
        self.indexes = [TokenIndex(text, width) for width in WIDTHS]

    def update(self) -> bool:
        """Index tokens that were appended; False if some are still missing."""
        return min(index.update() for index in self.indexes)  # of all of them, in any case


class History:
    """Outputs of finished sequences, the latest of them. Once one half is full, the older one is dropped."""

    def __init__(self, num_tokens: int = HISTORY_TOKENS) -> None:
        self._num_tokens = num_tokens
        self.halves = [IndexedText(array("i"))]

    def add(self, token_ids: list[int]) -> None:
        """Add an output; if it is longer than a half, its last tokens alone."""
        latest = self.halves[0]
        if len(latest.text) and len(latest.text) + len(token_ids) >= self._num_tokens:
            latest = IndexedText(array("i"))
            self.halves = [latest, self.halves[0]]
        latest.text.extend(token_ids[-self._num_tokens :])
        latest.text.append(SEPARATOR)

    @property
    def num_tokens(self) -> int:
        """Tokens that it holds."""
        return sum(len(half.text) for half in self.halves)


class SuffixSource:
    """Votes among the places in one sequence and, where that is shared, in the history."""

    __slots__ = ("_history", "_own")

    def __init__(self, token_ids: list[int], history: History | None) -> None:
        self._own, self._history = IndexedText(token_ids), history

    @property
    def num_missing(self) -> int:
        """Tokens of the sequence that are not indexed yet."""
        return self._own.indexes[0].num_missing

    def propose(self, limit: int) -> TokenDraft | None:
        """The winners of the votes, until a whole draft is unlikely to be right."""
        texts = [self._own, *(self._history.halves if self._history else ())]
        if not min(text.update() for text in texts):
            return None
        places, length = self._places(texts)
        token_ids: list[int] = []
        chances: list[float] = []
        reach = 1.0
        while places and len(token_ids) < limit:
            votes: dict[int, int] = {}
            follows = [self._token(text, position, token_ids) for text, position, _ in places]
            for (_, _, weight), token_id in zip(places, follows, strict=True):
                votes[token_id] = votes.get(token_id, 0) + weight
            total = sum(votes.values())
            votes.pop(SEPARATOR, None)
            if not votes:
                break
            winner = max(votes, key=votes.__getitem__)
            chance = votes[winner] / total * after_matches(length)
            reach *= chance
            if reach < LEAST_CHANCE:
                break
            token_ids.append(winner)
            chances.append(chance)
            length += 1
            places = [
                (text, position + 1, weight)
                for (text, position, weight), token_id in zip(places, follows, strict=True)
                if token_id == winner
            ]
        return TokenDraft(token_ids, chances) if token_ids else None

    def _token(self, text: Tokens, position: int, drafted: list[int]) -> int:
        """The token at a position of a text; behind the sequence itself what is drafted, behind others nothing."""
        if position < len(text):
            return text[position]
        return drafted[position - len(text)] if text is self._own.text else SEPARATOR

    def _places(self, texts: list[IndexedText]) -> tuple[list[tuple[Tokens, int, int]], int]:
        """(text, position, weight) of the places that vote, and the length of the longest match."""
        tokens = self._own.text
        assert isinstance(tokens, list), "the text of a sequence is its own list"
        places: list[tuple[Tokens, int, int]] = []
        longest = 0
        for number in range(len(WIDTHS)):
            for text in texts:
                index = text.indexes[number]
                left = MOST_PLACES - len(places)
                own = text is self._own
                for position in index.earlier(left) if own else index.places(tokens[-index.width :], left):
                    length = match_length(text.text, position, tokens, LONGEST)
                    longest = max(longest, length)
                    places.append((text.text, position, 1 << length))
            if places:
                break
        return places, longest


class SuffixDrafter:
    """Opens a `SuffixSource` for each sequence, and keeps what finished ones have generated.

    What is in the history can be noticed by how fast an output comes, so only sequences take part whose prefixes
    are shared as well.
    """

    def __init__(self, history: History | None = None) -> None:
        self.history = history or History()

    def open(self, token_ids: list[int], *, shared: bool) -> SuffixSource:
        """The source of a sequence."""
        return SuffixSource(token_ids, self.history if shared else None)

    def learn(self, token_ids: list[int]) -> None:
        """Keep an output."""
        self.history.add(token_ids)
