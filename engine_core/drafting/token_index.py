"""Where the last tokens of a sequence stood before: an index of the n-grams of a text that grows.

It is built as deflate finds repetitions (RFC 1951, section 4): a table has the latest place of each n-gram, by its
hash, and every place knows the one before it with the same hash. So a token costs the same at any length, and takes
8 to 20 bytes. The table doubles when the text has outgrown it, and is filled anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TypeAlias

Tokens: TypeAlias = "list[int] | array[int]"

PORTION = 8192  # tokens that one call of `update` adds, in about 2 ms
SMALLEST_TABLE = 256  # entries


class TokenIndex:
    """The places of all n-grams of `width` tokens in a text.

    text: grows at its end only, by others.
    """

    __slots__ = ("_latest", "_previous", "text", "width")

    def __init__(self, text: Tokens, width: int) -> None:
        self.text, self.width = text, width
        self._make_table(SMALLEST_TABLE)

    def _make_table(self, least: int) -> None:
        size = SMALLEST_TABLE
        while size < least:
            size *= 2
        self._latest = array("i", [-1]) * size
        self._previous = array("i")

    @property
    def num_missing(self) -> int:
        """Number of tokens of the text that are not indexed yet; all of them if the table must grow."""
        fits = len(self.text) <= len(self._latest)
        return len(self.text) - (len(self._previous) if fits else 0)

    def update(self) -> bool:
        """Add tokens that the text has got; False if it has more than `PORTION`, so that some are still missing."""
        if len(self.text) > len(self._latest):
            self._make_table(len(self.text) * 2)
        latest, previous, text, width = self._latest, self._previous, self.text, self.width
        if len(text) == len(previous):
            return True
        mask = len(latest) - 1
        if len(text) == len(previous) + 1 >= width:  # as a rule, so it is worth a way of its own
            bucket = hash(tuple(text[-width:])) & mask
            previous.append(latest[bucket])
            latest[bucket] = len(text) - 1
            return True
        while len(previous) < min(width - 1, len(text)):
            previous.append(-1)  # no n-gram ends here
        first = len(previous)
        end = min(len(text), first + PORTION)
        if first < end:
            begin = first - width + 1
            grams = zip(*(text[begin + i : end - width + 1 + i] for i in range(width)), strict=True)
            for place, gram in enumerate(grams, first):
                bucket = hash(gram) & mask
                previous.append(latest[bucket])
                latest[bucket] = place
        return end >= len(text)

    def places(self, gram: list[int], limit: int) -> Iterator[int]:
        """Positions behind occurrences of an n-gram, latest first; those of the last `limit` with its hash."""
        return self._walk(self._latest[hash(tuple(gram)) & (len(self._latest) - 1)], gram, limit)

    def earlier(self, limit: int) -> Iterable[int]:
        """`places` of the n-gram at the end, but the end itself, once `update` has taken it in; cheaper."""
        place = self._previous[-1] if self._previous else -1
        return self._walk(place, self.text[-self.width :], limit) if place >= 0 else ()

    def _walk(self, place: int, gram: Tokens, limit: int) -> Iterator[int]:
        text, previous, width = self.text, self._previous, self.width
        wanted: Tokens = gram if isinstance(gram, type(text)) else array("i", gram)
        while place >= 0 and limit:
            if text[place - width + 1 : place + 1] == wanted:
                yield place + 1
            place = previous[place]
            limit -= 1


def match_length(text: Tokens, position: int, tokens: list[int], longest: int) -> int:
    """How many of the last tokens stand before `position` of the text as well, at most `longest`."""
    most, end = min(longest, position, len(tokens)), len(tokens)
    for length in range(most):
        if text[position - 1 - length] != tokens[end - 1 - length]:
            return length
    return most
