"""Replies of gpt-oss: messages on channels, where a call is a message to a function.

<|channel|>analysis<|message|>The user wants ...<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re

from pagewire.frontend.server.parsing.call_formats import (
    Format,
    Functions,
    arguments_format,
    const,
    either,
    sequence,
    tag,
)
from pagewire.frontend.server.parsing.deltas import Reasoning
from pagewire.frontend.server.parsing.messages import MessageReply
from pagewire.frontend.server.parsing.parser import PlainText, Reading

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]{1,256})")


class Harmony(MessageReply):
    """Parser for messages: reasoning on the channel `analysis`, calls, and others, whose text is the answer.

    answer: parser of the answer's text; None: it is content. Text without any message is the answer, too.
    """

    start, ends = START, (END, "<|call|>", "<|return|>")

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


def before_answer() -> Format:
    """Return the format of the messages that may come before a call or the answer."""
    channels = [
        tag(f"{CHANNEL}{name}{MESSAGE}", {"type": "any_text"}, f"{END}{START}assistant")
        for name in ("analysis", "commentary")
    ]
    return {"type": "tags_with_separator", "tags": channels, "separator": ""}


def harmony_calls(functions: Functions, parallel: bool) -> Format:
    """Return the format of a call, in any order of its header; a second one cannot follow."""
    del parallel
    forms = []
    for function in functions:
        to = f"to=functions.{function['name']}"
        headers = [f"{CHANNEL}commentary {to} ", f" {to}{CHANNEL}commentary "]
        arguments = arguments_format(function)
        forms += [
            tag(f"{header}{kind}{MESSAGE}", arguments, "")
            for header in headers
            for kind in ("<|constrain|>json", "json")
        ]
    return either(*forms)


def harmony_text(functions: Functions, parallel: bool) -> Format:
    """Return the format of a call or an answer."""
    answer = sequence(const(FINAL), {"type": "any_text"})
    return either(harmony_calls(functions, parallel), answer)
