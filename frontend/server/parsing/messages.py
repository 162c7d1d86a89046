"""Replies that are messages, whose header says whether they are reasoning, calls, or the answer.

Inkling:
<|message_model|><|content_thinking|>The user wants ...<|end_message|>
<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {"a": 1}}<|end_message|>
<|message_model|><|content_text|>It rains.<|end_message|><|content_model_end_sampling|>

Muse Glimmer:
<|start|>assistant to=self<|message|>The user wants ...<|eom|>
<|start|>assistant to=f<|message|><atem:function_calls>...</atem:function_calls><|eom|>
<|start|>assistant to=user<|message|>It rains.<|eot|>

The calls themselves are those of a row with `CallMarks` or `ParameterMarks`, whose parser gets the text of their
messages. What looks like a call in the reasoning or in the answer is text.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable

from pagewire.frontend.server.parsing.call_formats import (
    Format,
    Functions,
    const,
    either,
    optional,
    sequence,
    tag,
    tags,
)
from pagewire.frontend.server.parsing.deltas import Reasoning, call_id
from pagewire.frontend.server.parsing.marked_calls import CallMarks
from pagewire.frontend.server.parsing.parameter_calls import ParameterMarks
from pagewire.frontend.server.parsing.parser import Parser, PlainText, Reading

ANY: Format = {"type": "any_text"}
THOUGHT, ANSWER, CALL = "thought", "answer", "call"


class MessageReply(Parser):
    """Base class of the parsers for such replies. Text without any message is the answer.

    answer: parser of the answer's text; None: it is content.

    Attributes:
        start: begins a message. ends: what ends its text; `start` does so, too, and is not a part of it.
    """

    start: str
    ends: tuple[str, ...]

    def __init__(
        self, new_id: Callable[[], str] = call_id, parallel: bool = True, answer: Parser | None = None
    ) -> None:
        self.answer = answer or PlainText()
        super().__init__(new_id, parallel)

    def body(self, take: Callable[[str], None]) -> Reading[None]:
        """Read a message's text through its end, and give it to `take` as it comes."""
        ends = [*self.ends, self.start]
        pattern = re.compile("|".join(map(re.escape, ends)))
        while (match := pattern.search(self._text, self._at)) is None:
            self._at = len(self._text) - self._held(ends)
            take(self.pending)
            self.drop()
            if not (yield from self.more()):
                self._at = len(self._text)
                take(self.pending)
                self.drop()
                return
        self._at = match.start()
        take(self.pending)
        self._at = match.start() if match[0] == self.start else match.end()
        self.drop()

    def _think(self, text: str) -> None:
        self._emit(Reasoning(text))

    def _answer(self, text: str) -> None:
        self._deltas += self.answer.feed(text)


class RoutedReply(MessageReply):
    """Base class of the parsers whose calls another parser reads, which gets the text of their messages alone.

    calls: that parser. call_begin, call_end: marks that it gets around a message.
    """

    call_begin = call_end = ""

    def __init__(self, calls: Parser | None = None, answer: Parser | None = None) -> None:
        self._calls = calls or PlainText()
        super().__init__(answer=answer)

    def read(self) -> Reading[None]:
        separators = {THOUGHT: "", ANSWER: ""}
        while not (yield from self.at_end()):
            kind = yield from self.header()
            if kind == CALL:
                self._call(self.call_begin)
                yield from self.body(self._call)
                self._call(self.call_end)
                continue
            if not kind:  # cut short
                break
            take = self._think if kind == THOUGHT else self._answer
            take(separators[kind])
            separators[kind] = "\n"
            yield from self.body(take)
        self._at = len(self._text)
        self.drop()
        self._deltas += [*self._calls.finish(), *self.answer.finish()]

    @abstractmethod
    def header(self) -> Reading[str]:
        """Read what stands before a message's text, and return its kind; "" if it is cut short."""

    def _call(self, text: str) -> None:
        self._deltas += self._calls.feed(text)


def answers_after(begin: str, end: str) -> list[Format]:
    """Return the formats of an answer: its end may be the token that ends the reply, which stands in no format."""
    return [tag(begin, ANY, end), sequence(const(begin), ANY)]


# ---------------------------------------------------------------- Inkling

MODEL, END_MESSAGE = "<|message_model|>", "<|end_message|>"
THINKING, TEXT, INVOKE = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
INKLING_CALLS = CallMarks(INVOKE, END_MESSAGE, arguments="args")


class InklingReply(RoutedReply):
    """Parser for messages of Inkling. The name before a call is not read: its object has it again."""

    start, ends = MODEL, (END_MESSAGE, "<|content_model_end_sampling|>")
    call_begin, call_end = INVOKE, END_MESSAGE

    def header(self) -> Reading[str]:
        yield from self.space()
        started = yield from self.accept(MODEL)
        self.drop()
        yield from self.name()
        for mark, kind in ((THINKING, THOUGHT), (TEXT, ANSWER), (INVOKE, CALL)):
            if (yield from self.accept(mark)):
                self.drop()
                return kind
        if started and self._ended:
            return ""
        self._at = self._from  # it is text
        return ANSWER


def inkling_before() -> Format:
    """Return the format of the messages that may come before a call or the answer, after the first mark."""
    parts = [tag(mark, ANY, END_MESSAGE + MODEL) for mark in (THINKING, TEXT)]
    return sequence(optional(const(MODEL)), {"type": "tags_with_separator", "tags": parts, "separator": ""})


def inkling_calls(functions: Functions, parallel: bool) -> Format:
    """Return the format of calls. The first one may stand after a prompt that has begun the message."""
    forms = INKLING_CALLS.tags(functions, parallel)
    named = [
        tag(f"{begin}{function['name']}{INVOKE}", form["content"], END_MESSAGE)
        for function, form in zip(functions, forms, strict=True)
        for begin in ("", MODEL)
    ]
    return tags(named, "", parallel)


def inkling_text(functions: Functions, parallel: bool) -> Format:
    """Return the format of calls or an answer."""
    answers = [answer for begin in ("", MODEL) for answer in answers_after(begin + TEXT, END_MESSAGE)]
    return either(inkling_calls(functions, parallel), *answers)


# ---------------------------------------------------------------- Muse Glimmer

START, ROLE, TO, MESSAGE = "<|start|>", "assistant", "to=", "<|message|>"
END_OF_MESSAGE, END_OF_TURN = "<|eom|>", "<|eot|>"
SELF, USER = "self", "user"
ATEM_CALLS = ParameterMarks(
    '<atem:invoke name="',
    '">\n',
    '<atem:parameter name="',
    '">',
    "</atem:parameter>\n",
    "</atem:invoke>\n",
    opening="<atem:function_calls>\n",
    closing="</atem:function_calls>",
    separator="",
)


class MuseReply(RoutedReply):
    """Parser for messages of Muse Glimmer, whose prompts end after `<|start|>assistant`."""

    start, ends = START, (END_OF_MESSAGE, END_OF_TURN)

    def header(self) -> Reading[str]:
        yield from self.space()
        started = yield from self.accept(START)
        if started:
            yield from self.accept(ROLE)
            self.drop()
        yield from self.space()
        addressed = yield from self.accept(TO)
        if addressed:
            recipient = yield from self.name()
            if recipient and (yield from self.accept(MESSAGE)):
                self.drop()
                return {SELF: THOUGHT, USER: ANSWER}.get(recipient, CALL)
        if started and (yield from self.accept(MESSAGE)):
            self.drop()
            return ANSWER
        if (started or addressed) and self._ended:
            return ""
        self._at = self._from  # it is text
        return ANSWER


def muse_before() -> Format:
    """Return the format of the messages that may come before a call or the answer, after `<|start|>assistant`."""
    parts = [tag(f" {TO}{name}{MESSAGE}", ANY, END_OF_MESSAGE + START + ROLE) for name in (SELF, USER)]
    return {"type": "tags_with_separator", "tags": parts, "separator": ""}


def muse_calls(functions: Functions, parallel: bool) -> Format:
    """Return the format of calls, each in a message to its function."""
    calls = [
        tag(f" {TO}{function['name']}{MESSAGE}", form, "")
        for function in functions
        for form in ATEM_CALLS.tags([function], parallel=False)
    ]
    return tags(calls, END_OF_MESSAGE + START + ROLE, parallel)


def muse_text(functions: Functions, parallel: bool) -> Format:
    """Return the format of calls or an answer."""
    return either(muse_calls(functions, parallel), *answers_after(f" {TO}{USER}{MESSAGE}", END_OF_TURN))
