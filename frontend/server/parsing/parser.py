"""Reading the text of a reply while it is generated.

A parser is written as if all the text were there: `read` is a generator that reads from the front and passes
deltas on, and yields where it needs more text. So one reading serves streamed and whole replies, and how the
text was cut cannot matter.

        passed on | read, not passed on | not read yet
                  ^ self._from          ^ self._at

What is read is either passed on as content or arguments, or dropped, because it is a mark of the format. White
space in content waits for the text after it, and is dropped at the end of a reply with calls: it only set them
apart. Besides that, all that is not a call is content, unchanged.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import ClassVar, TypeAlias, TypeVar

from pagewire.frontend.server.parsing.deltas import (
    Arguments,
    CallStart,
    Content,
    Delta,
    ParsedReply,
    Reasoning,
    call_id,
    fold,
    merged,
)

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]

NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
SPACE = re.compile(r"\s*")


class Parser(ABC):
    """Reads one reply. `read` says how.

    new_id: makes the ids of calls. parallel: whether there may be several calls; else only the first is told of.
    Attributes:
        marks_are_special: the marks of the format are special tokens, which must not be left out of the text.
    """

    marks_are_special: ClassVar[bool] = False

    def __init__(self, new_id: Callable[[], str] = call_id, parallel: bool = True) -> None:
        self._new_id, self._parallel = new_id, parallel
        self._text, self._from, self._at = "", 0, 0
        self._ended = False
        self._in_arguments = False  # pass them on as they come
        self._prose: type[Content] | type[Reasoning] = Content  # what text is that is no call
        self._blank: list[str] = []  # white space that waits for text
        self._line_is_blank = True  # but for calls
        self._num_calls = 0
        self._deltas: list[Delta] = []
        self._reading = self.read()
        next(self._reading, None)

    def feed(self, text: str) -> list[Delta]:
        """What is certain after some more text."""
        if text:
            self._text = self._text[self._from :] + text
            self._at -= self._from
            self._from = 0
            next(self._reading, None)
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest, after the last text."""
        if not self._ended:
            self._ended = True
            next(self._reading, None)
            self._at = len(self._text)
            self.pass_content()
            if not self._num_calls:
                self._emit(self._prose("".join(self._blank)))
        return self._take()

    def parse(self, text: str) -> ParsedReply:
        """A reply in whole."""
        return fold([*self.feed(text), *self.finish()])

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the reply to its end."""

    # -------------------------------------------------------------- reading

    def more(self) -> Reading[bool]:
        """Wait for more text; False at the end."""
        if not self._ended:
            if self._in_arguments:
                self.pass_arguments()
            yield
        return not self._ended

    def at_end(self) -> Reading[bool]:
        """Whether there is no more text."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return True
        return False

    def text_until(self, *marks: str, line_start: str = "") -> Reading[str]:
        """Pass content on up to the first of `marks`, or to `line_start` if that begins a line.

        Returns the mark, which is not read yet; "" at the end.
        """
        literals = [mark for mark in (*marks, line_start) if mark]
        pattern = re.compile("|".join(map(re.escape, literals)))
        while True:
            while found := pattern.search(self._text, self._at):
                self._at = found.start()
                self.pass_content()
                if found[0] != line_start or self._line_is_blank:
                    return found[0]
                self._at = found.end()
            self._at = len(self._text) - self._held(literals)
            self.pass_content()
            if not (yield from self.more()):
                return ""

    def _held(self, literals: list[str]) -> int:
        """How many characters at the end may begin one of these."""
        longest = max(map(len, literals)) - 1
        rest = self._text[max(self._at, len(self._text) - longest) :]
        for begin in range(len(rest)):
            if any(literal.startswith(rest[begin:]) for literal in literals):
                return len(rest) - begin
        return 0

    def rest(self) -> Reading[None]:
        """Pass all that follows on as content."""
        while True:
            self._at = len(self._text)
            self.pass_content()
            if not (yield from self.more()):
                return

    def accept(self, literal: str) -> Reading[bool]:
        """Read this if it comes next."""
        while not self._text.startswith(literal, self._at):
            rest = self._text[self._at : self._at + len(literal)]
            if not literal.startswith(rest) or not (yield from self.more()):
                return False
        self._at += len(literal)
        return True

    def comes(self, literal: str) -> Reading[bool]:
        """Whether this comes next."""
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
        """Read up to the next of these signs, and that. Returns it; "" at the end."""
        while (found := sign.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not (yield from self.more()):
                return ""
        self._at = found.end()
        return found[0]

    def string_end(self, end: re.Pattern[str]) -> Reading[None]:
        """Read through the quote that ends a string; a backslash takes what follows it with it."""
        while (yield from self.through(end)) == "\\":
            if not (yield from self.at_end()):
                self._at += 1

    def name(self) -> Reading[str]:
        """Read the name of a function; "" if none comes next."""
        while True:
            match = NAME.match(self._text, self._at)
            end = match.end() if match else self._at
            if end < len(self._text) or not (yield from self.more()):
                break
        name, self._at = self._text[self._at : end], end
        return name

    # -------------------------------------------------------------- passing on

    @property
    def pending(self) -> str:
        """What is read and not passed on."""
        return self._text[self._from : self._at]

    def drop(self) -> None:
        """What is read is a mark, or said otherwise."""
        self._from = self._at

    def pass_content(self) -> None:
        """What is read is content."""
        if text := self.pending:
            line = text[text.rfind("\n") + 1 :]
            self._line_is_blank = not line.strip() and ("\n" in text or self._line_is_blank)
            solid = text.rstrip()
            if solid:
                self._emit(self._prose("".join(self._blank) + solid))
                self._blank = []
            self._blank.append(text[len(solid) :])
        self.drop()

    def start_call(self, name: str) -> None:
        """A call begins; what is read is the head of it."""
        self._emit(CallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1
        self.drop()

    def pass_arguments(self) -> None:
        """What is read is arguments of the call."""
        self.say_arguments(self.pending)
        self.drop()

    def say_arguments(self, text: str) -> None:
        """Arguments of the call that are not the text read."""
        self._emit(Arguments(self._num_calls - 1, text))

    def _emit(self, delta: Delta) -> None:
        if isinstance(delta, (CallStart, Arguments)) and delta.index > 0 and not self._parallel:
            return
        if not isinstance(delta, CallStart) and not delta.text:
            return
        both = merged(self._deltas[-1], delta) if self._deltas else None
        if both is not None:
            self._deltas[-1] = both
        else:
            self._deltas.append(delta)

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas
