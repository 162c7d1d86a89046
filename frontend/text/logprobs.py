"""The public types of log probabilities, and their construction from the rows of token deltas."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias, overload

import msgspec

from pagewire.frontend.text.steps import REPLACEMENT, byte_level_bytes, byte_token
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.wire.items import LogprobRows


class Logprob(msgspec.Struct, gc=False):
    """A candidate token at a position. rank: 1 = most likely. decoded_token: its text; None without a tokenizer.

    An answer may have hundreds of thousands: they are made in C, and garbage collections pass them by.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition: TypeAlias = dict[int, Logprob]


@dataclass
class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """Log probabilities of many positions in flat lists, without an object per entry; reads like a list of dicts.

    Position i has the entries from start_indices[i] to end_indices[i]; no entries mean None (the first position of
    a prompt). A slice is a FlatLogprobs, too.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Append a position. value: entries by token id, or None."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (value or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: list[int],
        decoded_tokens: list[str | None],
    ) -> None:
        """Append a position, given by the columns of its entries."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += decoded_tokens
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, position: int) -> LogprobsOnePosition | None: ...

    @overload
    def __getitem__(self, position: slice) -> FlatLogprobs: ...

    def __getitem__(self, position: int | slice) -> LogprobsOnePosition | FlatLogprobs | None:
        if isinstance(position, slice):
            return self._slice(position)
        entries = range(self.start_indices[position], self.end_indices[position])
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in entries
        } or None

    def _slice(self, positions: slice) -> FlatLogprobs:
        part = FlatLogprobs()
        for start, end in zip(self.start_indices[positions], self.end_indices[positions], strict=True):
            part.append_fast(
                self.token_ids[start:end],
                self.logprobs[start:end],
                self.ranks[start:end],  # type: ignore[arg-type]
                self.decoded_tokens[start:end],
            )
        return part

    def __iter__(self) -> Iterator[LogprobsOnePosition | None]:
        return (self[i] for i in range(len(self)))

    def insert(self, index: int, value: Any) -> None:
        """Always raises TypeError: positions can only be appended."""
        raise TypeError("FlatLogprobs can only be appended to")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs can only be appended to")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs can only be appended to")


SampleLogprobs: TypeAlias = list[LogprobsOnePosition] | FlatLogprobs
PromptLogprobs: TypeAlias = list[LogprobsOnePosition | None] | FlatLogprobs


class TokenTexts:
    """A cache of the text of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, token_ids: list[int]) -> list[str | None]:
        """Return the text of each token; None without a tokenizer."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        for token_id in token_ids:
            if token_id not in self._texts:
                self._texts[token_id] = token_text(self._tokenizer, token_id)
        return [self._texts[token_id] for token_id in token_ids]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text that a token adds; a part of a character is written as bytes: "<0xE4><0xBD>"."""
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in data)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the UTF-8 bytes that a token adds to a text, which may be a part of a character."""
    text = text_within(tokenizer, token_id)
    if REPLACEMENT not in text:
        return text.encode()
    (name,) = tokenizer.convert_ids_to_tokens([token_id])
    if name is None or REPLACEMENT in name:
        return text.encode()
    return byte_token(name) or byte_level_bytes(name)


def text_within(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text that a token adds between two others.

    There it has the space that decoders drop at the start or the end of a text.
    """
    near, before, after = neighbour(tokenizer)
    whole = decode_tokens(tokenizer, [*near, token_id, *near])
    if whole.startswith(before) and whole.endswith(after) and len(whole) >= len(before) + len(after):
        return whole[len(before) : len(whole) - len(after)]
    return decode_tokens(tokenizer, [token_id])


@lru_cache(maxsize=16)
def neighbour(tokenizer: Tokenizer) -> tuple[list[int], str, str]:
    """Return an ordinary token, the text that it adds at the start of a text, and the text that it adds at its end.

    The token is one that has no space beside it, if there is such a token.
    """
    token_ids = tokenizer.encode("xx", add_special_tokens=False) + tokenizer.encode("x", False)
    for near in ([token_id] for token_id in token_ids):
        first, both = decode_tokens(tokenizer, near), decode_tokens(tokenizer, near * 2)
        if both == first * 2:
            break
    else:
        near = token_ids[-1:]
        first, both = decode_tokens(tokenizer, near), decode_tokens(tokenizer, near * 2)
    return near, first, both.removeprefix(first)


def decode_tokens(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return the text of tokens, special ones included."""
    return tokenizer.decode(token_ids, skip_special_tokens=False, spaces_between_special_tokens=False)


def add_rows(
    into: SampleLogprobs | PromptLogprobs, rows: LogprobRows, texts: TokenTexts, count: int | None = None
) -> float:
    """Append the first `count` rows (None: all) as positions; return the sum of their tokens' log probabilities.

    Each position has its own token first, then the most likely tokens by rank.
    """
    n, width = rows.token_ids.shape
    token_ids, logprobs, ranks = rows.token_ids.tolist(), rows.logprobs.tolist(), rows.ranks.tolist()
    total = 0.0
    for row in range(n if count is None else count):
        start, end = row * width, (row + 1) * width
        position = token_ids[start:end], logprobs[start:end], [ranks[row], *range(1, width)]
        add_position(into, *position, texts)
        total += logprobs[start]
    return total


def add_position(
    into: SampleLogprobs | PromptLogprobs,
    token_ids: list[int],
    logprobs: list[float],
    ranks: list[int],
    texts: TokenTexts,
) -> None:
    """Append a position: its own token first, then the most likely tokens, which may include its own again."""
    if token_ids[0] in token_ids[1:]:
        twin = token_ids.index(token_ids[0], 1)
        for column in (token_ids, logprobs, ranks):
            del column[twin]
    decoded = texts.of(token_ids)
    if isinstance(into, FlatLogprobs):
        into.append_fast(token_ids, logprobs, ranks, decoded)
    else:
        into.append(dict(zip(token_ids, map(Logprob, logprobs, ranks, decoded), strict=True)))
