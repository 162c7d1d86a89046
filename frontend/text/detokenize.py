"""Incremental detokenization: token ids to text, token by token.

Text that a `TextStream` returns is final: concatenated, it equals `tokenizer.decode` of all tokens, however they
were split into deltas. Text that later tokens may change (a part of a character, bytes that may turn out invalid, a
space that clean-up may remove) is held back; `tail` returns it as it would be if the tokens ended now.

For the decoders of `tokenizer.json` this is exact by construction: each step of the decoder is run as a
transducer, in constant time per token. Tokenizers that only have a `decode` method use `WindowStream`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence

from pagewire.frontend.text.steps import REPLACEMENT, DecoderStep, EachPiece, ReplaceText, compile_decoder
from pagewire.frontend.text.tokenizer import CLEAN_UP, Tokenizer


class TextStream(ABC):
    """The text of a growing sequence of tokens."""

    @abstractmethod
    def feed(self, token_id: int) -> str:
        """Add a token; return the text that has become certain."""

    @abstractmethod
    def tail(self) -> str:
        """Return the text that is held back, as it would be if the tokens ended now. Does not change the stream."""

    def end(self) -> str:
        """End the stream; return the rest of the text."""
        return self.tail()


class Pieces(dict[int, str | None]):
    """Names of a tokenizer's tokens after the first steps of its decoder, those that treat each name alone.

    It is filled as tokens are looked up; None: there is no such token.

    steps: the remaining steps of the decoder; each stream copies them.
    """

    def __init__(self, tokenizer: Tokenizer, steps: list[DecoderStep]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._first: list[EachPiece] = []
        while steps and isinstance(step := steps[0], EachPiece):
            self._first.append(step)
            steps = steps[1:]
        self.steps = [step for step in steps if type(step) is not DecoderStep]

    def __missing__(self, token_id: int) -> str | None:
        name: str | None
        (name,) = self._tokenizer.convert_ids_to_tokens([token_id])
        for step in self._first:
            name = None if name is None else step.function(name)
        self[token_id] = name
        return name


class StepStream(TextStream):
    """A stream that runs the steps of a decoder."""

    def __init__(self, pieces: Pieces, skipped: frozenset[int]) -> None:
        self._pieces, self._skipped = pieces, skipped
        self._steps = [copy.copy(step) for step in pieces.steps]

    def feed(self, token_id: int) -> str:
        piece = None if token_id in self._skipped else self._pieces[token_id]
        if piece is None:
            return ""
        pieces = [piece]
        for step in self._steps:
            pieces = step.feed(pieces)
        return "".join(pieces)

    def tail(self) -> str:
        if not any(step.holds for step in self._steps):
            return ""
        pieces: list[str] = []
        for step in map(copy.copy, self._steps):
            pieces = step.feed(pieces) + step.end()
        return "".join(pieces)


class WindowStream(TextStream):
    """A stream for tokenizers that only have a `decode` method: it decodes a window of the last tokens every time.

    Text counts as certain when the last `PATIENCE` tokens have not changed it. A window of `LONGEST` tokens or more
    is cut to its last `OVERLAP` tokens if their text alone is the end of the window's text.
    """

    PATIENCE = 4
    LONGEST = 64
    OVERLAP = 16

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._all: list[int] = []
        self._window: list[int] = []
        self._recent: deque[str] = deque([""], maxlen=self.PATIENCE + 1)
        self._given = 0  # number of characters of the window's text that have been returned
        self._total: list[str] = []

    def feed(self, token_id: int) -> str:
        self._all.append(token_id)
        self._window.append(token_id)
        self._recent.append(self._decode(self._window))
        certain = common_beginning(self._recent).rstrip(REPLACEMENT)
        text = certain[self._given :]
        self._given += len(text)
        if text:
            self._total.append(text)
        if len(self._window) >= self.LONGEST:
            self._move()
        return text

    def tail(self) -> str:
        return self._recent[-1][self._given :]

    def end(self) -> str:
        # Returned text cannot be changed; if it agrees with the text of all tokens, return the rest of that text.
        given, text = "".join(self._total), self._decode(self._all)
        return text[len(given) :] if text.startswith(given) else self.tail()

    def _move(self) -> None:
        last = self._window[-self.OVERLAP :]
        text, whole = self._decode(last), self._recent[-1]
        given = self._given - (len(whole) - len(text))
        if given < 0 or not whole.endswith(text):
            return
        dropped = len(whole) - len(text)
        if any(older[:dropped] != whole[:dropped] for older in self._recent):
            return
        self._window, self._given = last, given
        self._recent = deque([older[dropped:] for older in self._recent], maxlen=self._recent.maxlen)


def common_beginning(texts: Collection[str]) -> str:
    """Return the longest common prefix of some texts."""
    first, last = min(texts), max(texts)
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:size]


def text_stream(
    tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
) -> TextStream:
    """Return a stream whose text equals `tokenizer.decode` with these options."""
    pieces = pieces_of(tokenizer)
    if pieces is not None:
        return StepStream(pieces, tokenizer.special_ids if skip_special_tokens else frozenset())
    return WindowStream(lambda ids: tokenizer.decode(ids, skip_special_tokens, spaces_between_special_tokens))


def pieces_of(tokenizer: Tokenizer) -> Pieces | None:
    """Return the tokenizer's pieces, cached in the tokenizer; None if its decoder is not supported."""
    if tokenizer.pieces is None and tokenizer.decoder is not None:
        steps = compile_decoder(tokenizer.decoder)
        if steps is None:
            tokenizer.decoder = None
            return None
        if tokenizer.cleans_up:
            steps += [ReplaceText(ugly, clean) for ugly, clean in CLEAN_UP]
        tokenizer.pieces = Pieces(tokenizer, steps)
    pieces: Pieces | None = tokenizer.pieces
    return pieces
