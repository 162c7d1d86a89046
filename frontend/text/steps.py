"""The steps of the decoders in `tokenizer.json`, as transducers that take constant time per token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pagewire.frontend.text.tokenizer import CLEAN_UP, byte_of_char

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class DecoderStep:
    """A step of a decoder, which converts pieces of text. The base class returns them unchanged.

    The values of its state are never changed in place, so `copy.copy` takes a snapshot.
    """

    def feed(self, pieces: list[str]) -> list[str]:
        """Add pieces; return those that are certain."""
        return pieces

    def end(self) -> list[str]:
        """Return the pieces held back, as if there were no more. Does not change the step."""
        return []

    @property
    def holds(self) -> bool:
        """True if pieces are held back."""
        return False


# ---------------------------------------------------------------- steps on the names of tokens
class EachPiece(DecoderStep):
    """Applies a function to each piece."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self.function = function

    def feed(self, pieces: list[str]) -> list[str]:
        return [self.function(piece) for piece in pieces]


class FirstDiffers(DecoderStep):
    """Applies a function to each piece, and another one to the first."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self.first, self.rest = first, rest
        self.started = False

    def feed(self, pieces: list[str]) -> list[str]:
        if self.started or not pieces:
            return [self.rest(piece) for piece in pieces]
        self.started = True
        return [self.first(pieces[0]), *(self.rest(piece) for piece in pieces[1:])]


class LastDiffers(DecoderStep):
    """Applies a function to each piece, and another one to the last, which is therefore held back."""

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


class ByteRuns(DecoderStep):
    """Converts runs of byte tokens ("<0xE4>") to text if the whole run is UTF-8, else to one U+FFFD per byte.

    A run is held back until it ends, since its last byte may make it invalid.
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


class ByteLevel(DecoderStep):
    """Converts names of byte-level tokens, whose bytes are UTF-8, to text. Holds back partial characters."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, pieces: list[str]) -> list[str]:
        data = self.rest + b"".join([byte_level_bytes(piece) for piece in pieces])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.rest = data[used:]
        return [text] if text else []

    def end(self) -> list[str]:
        return [self.rest.decode(errors="replace")] if self.rest else []

    @property
    def holds(self) -> bool:
        return bool(self.rest)


# ---------------------------------------------------------------- steps on text, independent of its pieces
class ReplaceText(DecoderStep):
    """Applies `str.replace` to the whole text. Holds back an end that may be the start of the pattern."""

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


class StripText(DecoderStep):
    """Removes up to `left` leading and `right` trailing characters `content` of the whole text."""

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
    """Return the byte of a token named "<0xE4>"; None for other names."""
    match = BYTE_TOKEN.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


@lru_cache(maxsize=1 << 17)
def byte_level_bytes(name: str) -> bytes:
    """Return the bytes of a byte-level token; of other names, their UTF-8."""
    table = byte_of_char()
    try:
        return bytes([table[char] for char in name])
    except KeyError:
        return name.encode()


def overlap(text: str, pattern: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `pattern`."""
    for size in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:size]):
            return size
    return 0


def strip_piece(piece: str, content: str, left: int, right: int) -> str:
    """Return `piece` without up to `left` leading and `right` trailing characters `content`."""
    start = min(left, len(piece) - len(piece.lstrip(content)))
    end = len(piece) - min(right, len(piece) - len(piece.rstrip(content)))
    return piece[start:end]


def word_piece(prefix: str, cleanup: bool) -> FirstDiffers:
    """Return the WordPiece step: pieces that begin with `prefix` continue a word, others begin one."""

    def tidy(piece: str) -> str:
        if cleanup:
            for ugly, clean in (*CLEAN_UP[:7], (" do not", " don't"), *CLEAN_UP[7:]):
                piece = piece.replace(ugly, clean)
        return piece

    def later(piece: str) -> str:
        return tidy(piece[len(prefix) :] if piece.startswith(prefix) else " " + piece)

    return FirstDiffers(tidy, later)


def compile_decoder(decoder: dict[str, Any]) -> list[DecoderStep] | None:
    """Return the steps of a decoder of `tokenizer.json`; None if one of them is not supported."""
    described = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps: list[DecoderStep] = []
    fused = False  # an earlier step has joined all pieces
    for description in described:
        step = text_step(description) if fused else piece_step(description)
        if step is None:
            return None
        steps.append(step)
        fused = fused or description["type"] in ("Fuse", "ByteLevel")
    return steps


def piece_step(decoder: dict[str, Any]) -> DecoderStep | None:
    """Return the step for a decoder that works on single tokens; None if it is not supported."""
    kind = decoder["type"]
    if kind == "ByteLevel":
        return ByteLevel()
    if kind == "ByteFallback":
        return ByteRuns()
    if kind == "Fuse":
        return DecoderStep()
    if kind == "Join":
        return FirstDiffers(str, lambda piece: " " + piece)
    if kind == "WordPiece":
        return word_piece(decoder["prefix"], decoder["cleanup"])
    if kind == "Replace" and (pattern := decoder["pattern"].get("String")):
        return EachPiece(lambda piece: piece.replace(pattern, decoder["content"]))
    if kind == "Strip":
        return EachPiece(
            lambda piece: strip_piece(piece, decoder["content"], decoder["start"], decoder["stop"])
        )
    if kind == "BPEDecoder":
        suffix = decoder["suffix"]
        return LastDiffers(lambda piece: piece.replace(suffix, " "), lambda piece: piece.replace(suffix, ""))
    if kind == "Metaspace":
        mark, first = decoder["replacement"], " " if decoder["prepend_scheme"] == "never" else ""
        return FirstDiffers(lambda piece: piece.replace(mark, first), lambda piece: piece.replace(mark, " "))
    return None


def text_step(decoder: dict[str, Any]) -> DecoderStep | None:
    """Return the step for a decoder that works on the joined text; None if it is not supported."""
    kind = decoder["type"]
    if kind == "Fuse":
        return DecoderStep()
    if kind == "Replace" and (pattern := decoder["pattern"].get("String")):
        return ReplaceText(pattern, decoder["content"])
    if kind == "Strip":
        return StripText(decoder["content"], decoder["start"], decoder["stop"])
    return None
