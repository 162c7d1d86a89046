"""Token ids to text, token by token, and stop strings.

What a `TextStream` emits is final: all of it together is `tokenizer.decode` of all tokens, however they were
cut into deltas. What further tokens may still change (half a character, a byte run that may turn out invalid, a
space that clean-up may remove) is held back; `tail` tells what it would be if the tokens ended here.

For the decoders of `tokenizer.json` this is exact by construction: each step of the decoder is run as a
transducer, in constant time per token. Tokenizers that are only known by their `decode` go through
`WindowStream`.
"""

from __future__ import annotations

import codecs
import copy
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

from pagewire.frontend.text.tokenizer import CLEAN_UP, Tokenizer, byte_of_char
from pagewire.ipc.params import SamplingParams

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Step:
    """One step of a decoder: takes pieces of text, gives pieces. This one changes nothing.

    Its state is values that are never changed in place, so that `copy.copy` is a snapshot.
    """

    def feed(self, pieces: list[str]) -> list[str]:
        """The next pieces; gives those that are certain."""
        return pieces

    def end(self) -> list[str]:
        """No more pieces: what was held back."""
        return []

    @property
    def holds(self) -> bool:
        """True if something is held back."""
        return False


# ---------------------------------------------------------------- steps on the names of tokens


class EachPiece(Step):
    """A function of each piece alone."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self.function = function

    def feed(self, pieces: list[str]) -> list[str]:
        return [self.function(piece) for piece in pieces]


class FirstDiffers(Step):
    """A function of each piece, and another one of the very first."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self.first, self.rest = first, rest
        self.started = False

    def feed(self, pieces: list[str]) -> list[str]:
        if self.started or not pieces:
            return [self.rest(piece) for piece in pieces]
        self.started = True
        return [self.first(pieces[0]), *(self.rest(piece) for piece in pieces[1:])]


class LastDiffers(Step):
    """A function of each piece, and another one of the very last, which is therefore held back."""

    def __init__(self, rest: Callable[[str], str], last: Callable[[str], str]) -> None:
        self.rest, self.last = rest, last
        self.held: str | None = None

    def feed(self, pieces: list[str]) -> list[str]:
        if not pieces:
            return []
        certain = pieces[:-1] if self.held is None else [self.held, *pieces[:-1]]
        self.held = pieces[-1]
        return [self.rest(piece) for piece in certain]

    def end(self) -> list[str]:
        return [] if self.held is None else [self.last(self.held)]

    @property
    def holds(self) -> bool:
        return self.held is not None


class ByteRuns(Step):
    """Runs of byte tokens ("<0xE4>") become text if the whole run is UTF-8, else one U+FFFD per byte.

    So the last byte of a run decides over the first: a run is held back until it ends.
    """

    def __init__(self) -> None:
        self.run = b""

    def feed(self, pieces: list[str]) -> list[str]:
        certain = []
        for piece in pieces:
            byte = byte_token(piece)
            if byte is not None:
                self.run += byte
            else:
                certain += self.end()
                certain.append(piece)
                self.run = b""
        return certain

    def end(self) -> list[str]:
        if not self.run:
            return []
        try:
            return [self.run.decode()]
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(self.run)

    @property
    def holds(self) -> bool:
        return bool(self.run)


class ByteLevel(Step):
    """Names of byte-level tokens: their bytes, one after the other, are UTF-8. An unfinished character waits."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, pieces: list[str]) -> list[str]:
        data = self.rest + b"".join(byte_level_bytes(piece) for piece in pieces)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.rest = data[used:]
        return [text] if text else []

    def end(self) -> list[str]:
        return [self.rest.decode(errors="replace")] if self.rest else []

    @property
    def holds(self) -> bool:
        return bool(self.rest)


# ---------------------------------------------------------------- steps on text, where pieces mean nothing


class ReplaceText(Step):
    """`str.replace` over the whole text: an end that may begin the pattern waits."""

    def __init__(self, pattern: str, content: str) -> None:
        self.pattern, self.content = pattern, content
        self.held = ""

    def feed(self, pieces: list[str]) -> list[str]:
        *done, rest = (self.held + "".join(pieces)).split(self.pattern)
        kept = overlap(rest, self.pattern)
        self.held = rest[len(rest) - kept :]
        text = "".join(part + self.content for part in done) + rest[: len(rest) - kept]
        return [text] if text else []

    def end(self) -> list[str]:
        return [self.held] if self.held else []

    @property
    def holds(self) -> bool:
        return bool(self.held)


class StripText(Step):
    """Up to `left` leading and `right` trailing characters `content` of the whole text are taken away."""

    def __init__(self, content: str, left: int, right: int) -> None:
        self.content, self.left, self.right = content, left, right
        self.held = ""

    def feed(self, pieces: list[str]) -> list[str]:
        text = "".join(pieces)
        while self.left and text:
            if not text.startswith(self.content):
                self.left = 0
            else:
                text, self.left = text[1:], self.left - 1
        if not self.right:
            return [text] if text else []
        text = self.held + text
        kept = min(self.right, len(text) - len(text.rstrip(self.content)))
        self.held = text[len(text) - kept :]
        return [text[: len(text) - kept]]


# ---------------------------------------------------------------- decoders


def byte_token(name: str) -> bytes | None:
    """The byte of a token named "<0xE4>"."""
    found = BYTE_TOKEN.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


@lru_cache(maxsize=1 << 17)
def byte_level_bytes(name: str) -> bytes:
    """The bytes of a byte-level token; a name that is not made of byte characters stands for itself."""
    table = byte_of_char()
    try:
        return bytes([table[char] for char in name])
    except KeyError:
        return name.encode()


def overlap(text: str, pattern: str) -> int:
    """Length of the longest end of `text` that is a beginning of `pattern`, but not all of it."""
    for size in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:size]):
            return size
    return 0


def strip_piece(piece: str, content: str, left: int, right: int) -> str:
    """`piece` without up to `left` leading and `right` trailing characters `content`."""
    start = min(left, len(piece) - len(piece.lstrip(content)))
    end = len(piece) - min(right, len(piece) - len(piece.rstrip(content)))
    return piece[start:end]


def word_piece(prefix: str, cleanup: bool) -> FirstDiffers:
    """WordPiece: a word's later pieces begin with `prefix`, other pieces begin a word."""

    def tidy(piece: str) -> str:
        if cleanup:
            for ugly, clean in (*CLEAN_UP[:7], (" do not", " don't"), *CLEAN_UP[7:]):
                piece = piece.replace(ugly, clean)
        return piece

    def later(piece: str) -> str:
        return tidy(piece[len(prefix) :] if piece.startswith(prefix) else " " + piece)

    return FirstDiffers(tidy, later)


def compile_decoder(decoder: dict[str, Any]) -> list[Step] | None:
    """The steps of a decoder in the words of `tokenizer.json`; None if one of them is not known here."""
    described = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps: list[Step] = []
    fused = False  # from here on there is but one piece
    for one in described:
        step = text_step(one) if fused else piece_step(one)
        if step is None:
            return None
        steps.append(step)
        fused = fused or one["type"] in ("Fuse", "ByteLevel")
    return steps


def piece_step(one: dict[str, Any]) -> Step | None:
    """A step that sees token by token."""
    kind = one["type"]
    if kind == "ByteLevel":
        return ByteLevel()
    if kind == "ByteFallback":
        return ByteRuns()
    if kind == "Fuse":
        return Step()
    if kind == "Join":
        return FirstDiffers(str, lambda piece: " " + piece)
    if kind == "WordPiece":
        return word_piece(one["prefix"], one["cleanup"])
    if kind == "Replace" and (pattern := one["pattern"].get("String")):
        return EachPiece(lambda piece: piece.replace(pattern, one["content"]))
    if kind == "Strip":
        return EachPiece(lambda piece: strip_piece(piece, one["content"], one["start"], one["stop"]))
    if kind == "BPEDecoder":
        suffix = one["suffix"]
        return LastDiffers(lambda piece: piece.replace(suffix, " "), lambda piece: piece.replace(suffix, ""))
    if kind == "Metaspace":
        mark, first = one["replacement"], " " if one["prepend_scheme"] == "never" else ""
        return FirstDiffers(lambda piece: piece.replace(mark, first), lambda piece: piece.replace(mark, " "))
    return None


def text_step(one: dict[str, Any]) -> Step | None:
    """A step that sees one piece, the whole text."""
    kind = one["type"]
    if kind == "Fuse":
        return Step()
    if kind == "Replace" and (pattern := one["pattern"].get("String")):
        return ReplaceText(pattern, one["content"])
    if kind == "Strip":
        return StripText(one["content"], one["start"], one["stop"])
    return None


# ---------------------------------------------------------------- streams


class TextStream(ABC):
    """The text of a growing sequence of tokens."""

    @abstractmethod
    def feed(self, token_id: int) -> str:
        """One more token; the text that has become certain."""

    @abstractmethod
    def tail(self) -> str:
        """What would follow the text so far if no more tokens came."""

    def end(self) -> str:
        """What follows the text so far, as no more tokens come."""
        return self.tail()


class Pieces:
    """The names of a tokenizer's tokens after the first steps of its decoder, as far as those see one name alone.

    steps: the remaining steps, to be copied for each stream.
    """

    def __init__(self, tokenizer: Tokenizer, steps: list[Step]) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str | None] = {}
        self._first: list[EachPiece] = []
        while steps and isinstance(step := steps[0], EachPiece):
            self._first.append(step)
            steps = steps[1:]
        self.steps = [step for step in steps if type(step) is not Step]

    def __getitem__(self, token_id: int) -> str | None:
        if token_id not in self._names:
            (name,) = self._tokenizer.convert_ids_to_tokens([token_id])
            for step in self._first:
                name = None if name is None else step.function(name)
            self._names[token_id] = name
        return self._names[token_id]


class StepStream(TextStream):
    """Runs the steps of a decoder."""

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
    """For tokenizers that are only known by their `decode`: decodes the last tokens again and again.

    Text counts as certain when the last `PATIENCE` tokens have not changed it. The window moves on when the
    text of its last tokens alone is the end of the text of all of it.
    """

    PATIENCE = 4
    LONGEST = 64
    OVERLAP = 16

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._all: list[int] = []
        self._window: list[int] = []
        self._recent: deque[str] = deque([""], maxlen=self.PATIENCE + 1)
        self._given = 0  # characters of the window's text that were given out
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
        # What was given out cannot be taken back; where it agrees with the text of all tokens, so must the rest.
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
    """The longest text that all of them begin with."""
    first, last = min(texts), max(texts)
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:size]


def text_stream(
    tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
) -> TextStream:
    """A stream whose text is `tokenizer.decode` with these options."""
    pieces = pieces_of(tokenizer)
    if pieces is not None:
        return StepStream(pieces, tokenizer.special_ids if skip_special_tokens else frozenset())
    return WindowStream(lambda ids: tokenizer.decode(ids, skip_special_tokens, spaces_between_special_tokens))


def pieces_of(tokenizer: Tokenizer) -> Pieces | None:
    """The tokenizer's pieces, made once per tokenizer; None if its decoder is not known here."""
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


# ---------------------------------------------------------------- stop strings


class Detokenizer:
    """The text of one output, up to where a stop string ends it.

    Stop strings are looked for after every token past `min_tokens`, in the text as it would be if the tokens
    ended there; so the outcome does not depend on how tokens arrive. Of several, the one that ends first
    counts, and of those that end together the longest.

    stop: the stop string that was found.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop: str | None = None
        self._stream = text_stream(
            tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._longest = max(map(len, self._stops), default=0)
        self._recent = ""  # end of the certain text, in which a stop string may have begun
        self._length = 0  # of the certain text
        self._barrier = 0  # a stop string must end behind this
        self._unread: list[str] = []
        self._ended = False

    def feed(self, token_ids: Sequence[int]) -> int:
        """More tokens; how many of them belong to the output (less than all if a stop string was found)."""
        for count, token_id in enumerate(token_ids, 1):
            text = self._stream.feed(token_id)
            self._num_tokens += 1
            if text:
                self._unread.append(text)
            if self._stops and self._find_stop(text):
                return count
        return len(token_ids)

    def end(self) -> None:
        """No more tokens: nothing is held back any longer."""
        if not self._ended:
            self._unread.append(self._stream.end())
            self._ended = True

    def read(self) -> str:
        """The text that was not read yet, but for an end that may begin a stop string."""
        text, self._unread = "".join(self._unread), []
        if self._ended or not self._stops:
            return text
        if held := max(overlap(text, stop) for stop in self._stops):
            self._unread = [text[len(text) - held :]]
        return text[: len(text) - held]

    def _find_stop(self, text: str) -> bool:
        """Look for stop strings that end in the new text or behind it; end the output at the first."""
        tail = self._stream.tail()
        window = self._recent + text + tail
        start = self._length - len(self._recent)  # of the window, in the whole text
        if self._num_tokens <= self._min_tokens:
            self._barrier = self._length + len(text) + len(tail)
        found = first_end(window, self._stops, max(self._length, self._barrier) - start)
        self._length += len(text)
        self._recent = (self._recent + text)[-self._longest :]
        if found is None:
            return False
        at, self.stop = found
        unread = "".join(self._unread) + tail
        cut = start + at + (len(self.stop) if self._keep_stop else 0)
        excess = self._length + len(tail) - cut
        self._unread = [unread[: len(unread) - excess]]
        self._ended = True
        return True


def first_end(text: str, stops: Sequence[str], after: int) -> tuple[int, str] | None:
    """Where the stop string that ends first behind `after` begins, and which it is."""
    found = [
        (at + len(stop), at, stop)
        for stop in stops
        if (at := text.find(stop, max(0, after - len(stop) + 1))) >= 0
    ]
    if not found:
        return None
    _, at, stop = min(found)
    return at, stop
