"""Base class of the parsers that read the text of a reply while it is generated.

A parser is written as if the whole text were available: `read` is a generator that reads from the front, emits
deltas, and yields where it needs more text. The same code therefore reads streamed and whole replies, and the
result does not depend on how the text was split.

           emitted | read, not emitted | not read yet
                   ^ self._from        ^ self._at

Text that has been read is either emitted as content or arguments, or dropped as a mark of the format. White space
in content is held until other text follows, and dropped at the end of a reply with calls, where it is only a
separator. All other text that is not a call is content, unchanged.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from pagewire.frontend.server.parsing.deltas import (
    Arguments,
    CallStart,
    ContentDelta,
    Delta,
    ParsedReply,
    Reasoning,
    call_id,
    fold,
    merge_deltas,
)

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]

NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
SPACE = re.compile(r"\s*")


class Parser(ABC):
    """Parser of one reply; subclasses implement `read`.

    Args:
        new_id: returns an id for a new call. parallel: emit all calls; False: only the first.

    Attributes:
        call_marks: marks that come before calls and nowhere else.
    """

    call_marks: tuple[str, ...] = ()

    def __init__(self, new_id: Callable[[], str] = call_id, parallel: bool = True) -> None:
        self._new_id, self._parallel = new_id, parallel
        self._text, self._from, self._at = "", 0, 0
        self._ended = False
        self._in_arguments = False  # emit arguments as soon as they are read
        self._prose: type[ContentDelta] | type[Reasoning] = (
            ContentDelta  # kind of delta for text outside of calls
        )
        self._blank: list[str] = []  # white space that is emitted once other text follows
        self._line_is_blank = True  # the current line has no content yet
        self._num_calls = 0
        self._deltas: list[Delta] = []
        self._reading = self.read()
        next(self._reading, None)

    def feed(self, text: str) -> list[Delta]:
        """Add text, and return the deltas that are certain now."""
        if text:
            self._text = self._text[self._from :] + text
            self._at -= self._from
            self._from = 0
            next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """End the reply, and return the remaining deltas."""
        if not self._ended:
            self._ended = True
            next(self._reading, None)
            self._at = len(self._text)
            self.emit_content()
            if not self._num_calls:
                self._emit(self._prose("".join(self._blank)))
        return self.feed("")

    def parse(self, text: str) -> ParsedReply:
        """Parse a whole reply."""
        return fold([*self.feed(text), *self.finish()])

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the reply to its end: yield for more text, and emit deltas with the methods below."""

    # -------------------------------------------------------------- reading

    def more(self) -> Reading[bool]:
        """Wait for more text; return False at the end of the reply."""
        if not self._ended:
            if self._in_arguments:
                self.emit_pending_arguments()
            yield
        return not self._ended

    def at_end(self) -> Reading[bool]:
        """Return True if all text has been read and no more will follow."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return True
        return False

    def text_until(self, *marks: str, line_start: str = "") -> Reading[str]:
        """Emit content up to the first of `marks`, or up to `line_start` at the start of a line.

        Returns the mark, which has not been read yet; "" at the end.
        """
        literals = [mark for mark in (*marks, line_start) if mark]
        pattern = re.compile("|".join(map(re.escape, literals)))
        while True:
            while match := pattern.search(self._text, self._at):
                self._at = match.start()
                self.emit_content()
                if match[0] != line_start or self._line_is_blank:
                    return match[0]
                self._at = match.end()
            self._at = len(self._text) - self._held(literals)
            self.emit_content()
            if not (yield from self.more()):
                return ""

    def _held(self, literals: list[str]) -> int:
        """Return the number of characters at the end of the text that may be the start of one of `literals`."""
        longest = max(map(len, literals)) - 1
        rest = self._text[max(self._at, len(self._text) - longest) :]
        for begin in range(len(rest)):
            if any(literal.startswith(rest[begin:]) for literal in literals):
                return len(rest) - begin
        return 0

    def hold_until(self, mark: str) -> Reading[bool]:
        """Read up to `mark` without emitting anything. Returns False at the end of the reply."""
        while (place := self._text.find(mark, self._at)) < 0:
            self._at = max(self._at, len(self._text) - len(mark) + 1)
            if not (yield from self.more()):
                self._at = len(self._text)
                return False
        self._at = place
        return True

    def rest(self) -> Reading[None]:
        """Emit the rest of the reply as content."""
        while True:
            self._at = len(self._text)
            self.emit_content()
            if not (yield from self.more()):
                return

    def accept(self, literal: str) -> Reading[bool]:
        """Read `literal` if it comes next; return whether it did."""
        while not self._text.startswith(literal, self._at):
            rest = self._text[self._at : self._at + len(literal)]
            if not literal.startswith(rest) or not (yield from self.more()):
                return False
        self._at += len(literal)
        return True

    def comes(self, literal: str) -> Reading[bool]:
        """Return whether `literal` comes next, without reading it."""
        read = yield from self.accept(literal)
        if read:
            self._at -= len(literal)
        return read

    def space(self) -> Reading[None]:
        """Read white space."""
        while True:
            self._at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def through(self, sign: re.Pattern[str]) -> Reading[str]:
        """Read up to and including the next match of `sign`. Returns the match; "" at the end."""
        while (match := sign.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not (yield from self.more()):
                return ""
        self._at = match.end()
        return match[0]

    def string_end(self, end: re.Pattern[str]) -> Reading[None]:
        """Read through the quote that ends a string, skipping characters escaped by a backslash."""
        while (yield from self.through(end)) == "\\":
            if not (yield from self.at_end()):
                self._at += 1

    def string_until(self, *marks: str) -> Reading[bool]:
        """Read up to and including the first of `marks`, and emit it as a JSON string; return whether a mark came.

        The string's first quote has been emitted. The marks are not a part of it.
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        while (match := pattern.search(self._text, self._at)) is None:
            self._at = len(self._text) - self._held(list(marks))
            self.emit_arguments(in_string(self.pending))
            self.drop()
            if not (yield from self.more()):
                self._at = len(self._text)
                self.emit_arguments(in_string(self.pending))
                self.drop()
                return False
        self._at = match.start()
        self.emit_arguments(in_string(self.pending) + '"')
        self._at = match.end()
        self.drop()
        return True

    def name(self) -> Reading[str]:
        """Read the name of a function; return "" if the next text is not a name."""
        while True:
            match = NAME.match(self._text, self._at)
            end = match.end() if match else self._at
            if end < len(self._text) or not (yield from self.more()):
                break
        name, self._at = self._text[self._at : end], end
        return name

    # -------------------------------------------------------------- emitting

    @property
    def pending(self) -> str:
        """Text that has been read and not emitted."""
        return self._text[self._from : self._at]

    def drop(self) -> None:
        """Discard the pending text: it is a mark, or has been emitted in another form."""
        self._from = self._at

    def emit_content(self) -> None:
        """Emit the pending text as content."""
        if text := self.pending:
            line = text[text.rfind("\n") + 1 :]
            self._line_is_blank = not line.strip() and ("\n" in text or self._line_is_blank)
            solid = text.rstrip()
            if solid:
                self._emit(self._prose("".join(self._blank) + solid))
                self._blank = []
            self._blank.append(text[len(solid) :])
        self.drop()

    def start_call(self, name: str, given_id: str | None = None) -> None:
        """Emit the start of a call, and discard the pending text, which is its head.

        given_id: id that the model gave to the call; None: it gave none.
        """
        self._emit(CallStart(self._num_calls, given_id or self._new_id(), name))
        self._num_calls += 1
        self.drop()

    def emit_pending_arguments(self) -> None:
        """Emit the pending text as arguments of the call."""
        self.emit_arguments(self.pending)
        self.drop()

    def emit_arguments(self, text: str) -> None:
        """Emit arguments of the call that differ from the pending text."""
        self._emit(Arguments(self._num_calls - 1, text))

    def _emit(self, delta: Delta) -> None:
        if isinstance(delta, (CallStart, Arguments)) and delta.index > 0 and not self._parallel:
            return
        if not isinstance(delta, CallStart) and not delta.text:
            return
        both = merge_deltas(self._deltas[-1], delta) if self._deltas else None
        if both is not None:
            self._deltas[-1] = both
        else:
            self._deltas.append(delta)


class PlainText(Parser):
    """Parser for an answer without calls: all text is content."""

    def read(self) -> Reading[None]:
        yield from self.rest()


def read_marks(parser: Parser, marks: str) -> Reading[bool]:
    """Read the words of `marks` with any white space before each; return whether all came."""
    for word in marks.split():
        yield from parser.space()
        if not (yield from parser.accept(word)):
            return False
    return True


def in_string(text: str) -> str:
    """Return a text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
