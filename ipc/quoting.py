"""Input as error messages and log lines may repeat it: of bounded length, on one line, without control characters.

A client chooses what it sends, so a message that repeats all of it would let a client choose how much is sent back,
what the log holds, and how many lines of it there are.
"""

from __future__ import annotations

import reprlib
from functools import cache
from itertools import islice
from typing import Any

MAX_QUOTED = 100  # characters of one value that a message repeats
MAX_MESSAGE = 2000  # characters of an error message in an answer, and of each line in a log
_QUOTED_ITEMS = 8  # items of a list or a dict that a message repeats

# Characters that terminals obey rather than show, or that make two lines of one: C0 and C1 controls and DEL;
# marks, embeddings, overrides and isolates of text direction; separators of lines; lone surrogates, which cannot
# be written.
_CONTROLS = (
    *range(0x20),
    *range(0x7F, 0xA0),
    0x061C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)


def quoted(value: Any) -> str:
    """Return the `repr` of a value for a message, cut to `MAX_QUOTED` characters.

    Long strings and lists are cut before they are formatted, so the cost does not grow with the value.
    """
    return shortened(_REPR.repr(value), MAX_QUOTED)


def shortened(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return a text of at most `limit` characters, and how many characters were left out, if any were."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}... ({len(text) - limit} more characters)"


@cache
def escapes() -> dict[int, str]:
    """Return the spelling of each control character, for `str.translate`. Made when the first text has one."""
    return {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}


@cache
def _escapes_in_json() -> dict[int, str]:
    """As `escapes`, of those that `json.dumps` leaves; within JSON only this spelling stands for them."""
    return {code: f"\\u{code:04x}" for code in _CONTROLS if code >= 0x7F}


def on_one_line(text: str) -> str:
    r"""Return a text with control characters and line ends escaped, such as `\x0a` for a newline."""
    return text if text.isprintable() else text.translate(escapes())


def escaped_json(text: str) -> str:
    r"""Return JSON with the control characters that JSON allows escaped: it means the same, and is safe to show."""
    return text if text.isprintable() else text.translate(_escapes_in_json())


class _BoundedRepr(reprlib.Repr):
    """`reprlib.Repr` with this module's bounds, for integers of any number of digits, too."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = MAX_QUOTED
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _QUOTED_ITEMS

    def repr_str(self, x: str, level: int) -> str:
        """Return the beginning of a string; reprlib would leave out its middle."""
        return repr(x) if len(x) <= self.maxstring else f"{x[: self.maxstring]!r}..."

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return the first entries of a dict, as they come; reprlib would sort all of its keys first."""
        if level <= 0 and x:
            return "{...}"
        first = (
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in islice(x.items(), self.maxdict)
        )
        return "{" + ", ".join([*first, *["..."] * (len(x) > self.maxdict)]) + "}"

    def repr_int(self, x: int, level: int) -> str:
        """Return an integer; Python refuses to spell those of more than 4,300 digits in decimal."""
        return repr(x) if x.bit_length() <= 512 else f"an integer of {x.bit_length()} bits"


_REPR = _BoundedRepr()
