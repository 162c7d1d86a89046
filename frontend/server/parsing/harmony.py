"""Replies of gpt-oss: messages on channels, where a call is a message to a function.

<|channel|>analysis<|message|>The user wants ...<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pagewire.frontend.server.parsing.call_formats import (
    Format,
    Functions,
    const,
    either,
    json_schema,
    sequence,
    tag,
)
from pagewire.frontend.server.parsing.constrained import arguments_schema
from pagewire.frontend.server.parsing.deltas import Reasoning, call_id
from pagewire.frontend.server.parsing.parser import Parser, PlainText, Reading

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ENDS = (END, "<|call|>", "<|return|>", START)
FINAL = f"{CHANNEL}final{MESSAGE}"
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]{1,256})")


class Harmony(Parser):
    """Parser for messages: reasoning on the channel `analysis`, calls, and others, whose text is the answer.

    answer: parser of the answer's text; None: it is content. Text without any message is the answer, too.
    """

    def __init__(
        self, new_id: Callable[[], str] = call_id, parallel: bool = True, answer: Parser | None = None
    ) -> None:
        self.answer = answer or PlainText()
        super().__init__(new_id, parallel)

    def read(self) -> Reading[None]:
        separators = {Reasoning: "", PlainText: ""}
        while not (yield from self.at_end()):
            header = yield from self.header()
            if header is None:  # cut short
                break
            recipient, is_thought = RECIPIENT.search(header), f"{CHANNEL}analysis" in header
            if recipient:
                self.start_call(recipient[1])
                yield from self.body(self.emit_arguments)
                continue
            kind, take = (Reasoning, self._think) if is_thought else (PlainText, self._answer)
            take(separators[kind])
            separators[kind] = "\n"
            yield from self.body(take)
        self._at = len(self._text)
        self.drop()
        self._deltas += self.answer.finish()

    def header(self) -> Reading[str | None]:
        """Read and return what stands before a message's text: "" if there is nothing, None if it is cut short."""
        yield from self.space()
        for mark in (START, CHANNEL, "to="):
            if (yield from self.comes(mark)):
                break
        else:
            return ""
        if not (yield from self.hold_until(MESSAGE)):
            return None
        yield from self.accept(MESSAGE)
        header = self.pending
        self.drop()
        return header

    def body(self, take: Callable[[str], None]) -> Reading[None]:
        """Read a message's text through its end, and give it to `take` as it comes."""
        pattern = re.compile("|".join(map(re.escape, ENDS)))
        while (match := pattern.search(self._text, self._at)) is None:
            self._at = len(self._text) - self._held(list(ENDS))
            take(self.pending)
            self.drop()
            if not (yield from self.more()):
                self._at = len(self._text)
                take(self.pending)
                self.drop()
                return
        self._at = match.start()
        take(self.pending)
        self._at = match.start() if match[0] == START else match.end()
        self.drop()

    def _think(self, text: str) -> None:
        self._emit(Reasoning(text))

    def _answer(self, text: str) -> None:
        self._deltas += self.answer.feed(text)


def before_answer() -> Format:
    """Return the format of the messages that may come before a call or the answer."""
    channels = [
        tag(f"{CHANNEL}{name}{MESSAGE}", {"type": "any_text"}, f"{END}{START}assistant")
        for name in ("analysis", "commentary")
    ]
    return {"type": "tags_with_separator", "tags": channels, "separator": ""}


def whole_calls(functions: Functions, parallel: bool) -> Format:
    """Return the format of a call, in any order of its header; a second one cannot follow."""
    del parallel
    forms = []
    for function in functions:
        to = f"to=functions.{function['name']}"
        headers = [f"{CHANNEL}commentary {to} ", f" {to}{CHANNEL}commentary "]
        arguments = json_schema(arguments_schema(function))
        forms += [
            tag(f"{header}{kind}{MESSAGE}", arguments, "")
            for header in headers
            for kind in ("<|constrain|>json", "json")
        ]
    return either(*forms)


def text_with_calls(functions: Functions, parallel: bool) -> Format:
    """Return the format of a call or an answer."""
    answer = sequence(const(FINAL), {"type": "any_text"})
    return either(whole_calls(functions, parallel), answer)
