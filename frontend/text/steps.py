"""The decoders of `tokenizer.json`, step by step: each step is run as a transducer, in constant time per token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pagewire.frontend.text.tokenizer import CLEAN_UP, byte_of_char

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
