"""From generated text to what an answer says: one parser per output, the same for streams and whole answers.

text of the engine --feed--> ReplyDelta ... --finish--> ReplyDelta
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import UNSET

from pagewire.frontend.server.openai.protocol import FunctionCall, ToolCall
from pagewire.frontend.server.parsing.deltas import CallStart, Content, Delta, Reasoning
from pagewire.frontend.server.parsing.parser import Parser


class ReplyDelta(msgspec.Struct, omit_defaults=True):
    """What is new of an answer.

    content: text for the reader. reasoning: text of the model's thinking. tool_calls: each new or longer call.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []

    @property
    def empty(self) -> bool:
        """True if it says nothing."""
        return not (self.content or self.reasoning or self.tool_calls)


class ReplyParser(Protocol):
    """Reads one output as it comes, under any chunking."""

    def feed(self, text: str) -> ReplyDelta:
        """More text. What cannot be told yet is held back."""

    def finish(self) -> ReplyDelta:
        """The output has ended: what was held back."""


class TextReply:
    """An answer that is what was generated."""

    def feed(self, text: str) -> ReplyDelta:
        """The text."""
        return ReplyDelta(text)

    def finish(self) -> ReplyDelta:
        """Nothing was held back."""
        return ReplyDelta()


class ReplyWithCalls:
    """An answer with calls in it."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> ReplyDelta:
        """What the text says for certain."""
        return told(self._parser.feed(text))

    def finish(self) -> ReplyDelta:
        """What is left."""
        return told(self._parser.finish())


def read(parser: ReplyParser, text: str, ended: bool) -> ReplyDelta:
    """What the next text of an output says. ended: it is the last."""
    delta = parser.feed(text)
    if ended:
        last = parser.finish()
        delta.content += last.content
        delta.reasoning += last.reasoning
        delta.tool_calls = joined(delta.tool_calls + last.tool_calls)
    return delta


def told(deltas: list[Delta]) -> ReplyDelta:
    """A parser's deltas as answers tell them."""
    reply = ReplyDelta()
    for delta in deltas:
        if isinstance(delta, Content):
            reply.content += delta.text
        elif isinstance(delta, Reasoning):
            reply.reasoning += delta.text
        elif isinstance(delta, CallStart):
            head = FunctionCall(delta.name, "")
            reply.tool_calls.append(ToolCall(head, delta.index, delta.id, "function"))
        else:
            reply.tool_calls.append(ToolCall(FunctionCall(arguments=delta.text), delta.index))
    reply.tool_calls = joined(reply.tool_calls)
    return reply


def joined(deltas: list[ToolCall]) -> list[ToolCall]:
    """Deltas of tool calls, put together: one for each call, in order of their indexes."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        index = 0 if delta.index is UNSET else delta.index
        if index not in calls:
            calls[index] = msgspec.structs.replace(delta, function=msgspec.structs.replace(delta.function))
            continue
        call, new = calls[index].function, delta.function
        if new.name is not UNSET:
            call.name = new.name if call.name is UNSET else call.name + new.name
        if new.arguments is not UNSET:
            call.arguments = new.arguments if call.arguments is UNSET else call.arguments + new.arguments
    return [calls[index] for index in sorted(calls)]
