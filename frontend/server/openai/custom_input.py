"""The text of a call of a custom tool, which the model writes as the argument `input` of a function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

# What stands before the text of `input` in the arguments of a custom tool's function.
INPUT_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_BEGIN = 256  # characters before the text: white space of a model, which is read again with each more
BEGUN = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"(?:\s*:)?\s*)?)?)?)?)?)?)?)?')
PIECE = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]|\\u(?![0-9a-fA-F]{0,3}\Z)'
)
CUT = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?")


class CustomInput:
    """Reads the text of `input` while the JSON of the arguments is written.

    Other arguments than an object with this text alone are themselves the text: a model wrote it without JSON.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._read: Callable[[], str] = self._begin

    def add(self, arguments: str) -> str:
        """Add to the arguments; return how the text grows."""
        self._rest += arguments
        return self._read()

    def end(self) -> str:
        """End the arguments; return the end of the text."""
        rest, self._rest = self._rest, ""
        return "" if self._read in (self._string, self._drop) else rest

    def _begin(self) -> str:
        if (match := INPUT_BEGIN.match(self._rest)) is not None:
            self._rest, self._read = self._rest[match.end() :], self._string
        elif len(self._rest) > MAX_BEGIN or BEGUN.fullmatch(self._rest) is None:
            self._read = self._all
        else:
            return ""
        return self._read()

    def _string(self) -> str:
        text, place = "", 0
        while (match := PIECE.match(self._rest, place)) is not None:
            if is_high(match[0]) and CUT.fullmatch(self._rest, place):
                break  # its other half may follow
            text += decode_piece(match[0])
            place = match.end()
        self._rest = self._rest[place:]
        if self._rest.startswith('"'):
            self._read = self._drop
            self._drop()
        return text

    def _all(self) -> str:
        text, self._rest = self._rest, ""
        return text

    def _drop(self) -> str:
        self._rest = ""
        return ""


def is_high(piece: str) -> bool:
    """Return True for the escape of the first half of a character, without the other half."""
    return len(piece) == 6 and piece[2:4].lower() in ("d8", "d9", "da", "db")


def decode_piece(piece: str) -> str:
    """Return the text of a piece of a JSON string; half a character, or an escape that JSON has not, as it is."""
    try:
        text: str = json.loads(f'"{piece}"', strict=False)
        text.encode()
    except ValueError:
        return piece
    return text
