"""Conversion of generated text to the parts of an answer, with one parser per output, streamed or not.

text of the engine --feed--> ReplyDelta ... --finish--> ReplyDelta
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.frontend.server.openai.protocol import FunctionCall, ToolCall
from pagewire.frontend.server.parsing.deltas import CallStart, ContentDelta, Delta, Reasoning
from pagewire.frontend.server.parsing.parser import Parser


class ReplyDelta(msgspec.Struct, omit_defaults=True):
    """An increment of an answer.

    content: text for the user. reasoning: text of the model's reasoning. tool_calls: new calls and increments.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []

    @property
    def empty(self) -> bool:
        """True if no part has grown."""
        return not (self.content or self.reasoning or self.tool_calls)


class ReplyParser(Protocol):
    """A parser of one output, whose result does not depend on how the text is split."""

    def feed(self, text: str) -> ReplyDelta:
        """Add text; return what is certain now."""

    def finish(self) -> ReplyDelta:
        """End the output; return what was held back."""


class TextReply:
    """A parser that returns the text unchanged."""

    def feed(self, text: str) -> ReplyDelta:
        """Return the text."""
        return ReplyDelta(text)

    def finish(self) -> ReplyDelta:
        """Return nothing: no text is held back."""
        return ReplyDelta()


class ReplyWithCalls:
    """A parser for answers with tool calls or reasoning."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> ReplyDelta:
        """Add text; return what is certain now."""
        return reply_delta(self._parser.feed(text))

    def finish(self) -> ReplyDelta:
        """End the output; return what was held back."""
        return reply_delta(self._parser.finish())


def feed_parser(parser: ReplyParser, text: str, ended: bool) -> ReplyDelta:
    """Feed a parser the next text of an output. ended: it is the last text."""
    delta = parser.feed(text)
    if ended:
        last = parser.finish()
        delta.content += last.content
        delta.reasoning += last.reasoning
        delta.tool_calls = join_calls(delta.tool_calls + last.tool_calls)
    return delta


def reply_delta(deltas: list[Delta]) -> ReplyDelta:
    """Combine a parser's deltas into one increment of the answer."""
    reply = ReplyDelta()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            reply.content += delta.text
        elif isinstance(delta, Reasoning):
            reply.reasoning += delta.text
        elif isinstance(delta, CallStart):
            head = FunctionCall(delta.name, "")
            reply.tool_calls.append(ToolCall(head, delta.index, delta.id, "function"))
        else:
            reply.tool_calls.append(ToolCall(FunctionCall(arguments=delta.text), delta.index))
    reply.tool_calls = join_calls(reply.tool_calls)
    return reply


def join_calls(deltas: list[ToolCall]) -> list[ToolCall]:
    """Combine deltas of tool calls: return one for each call, in order of their indexes."""
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


def call_arguments(text: str | UnsetType) -> dict[str, Any]:
    """Return the arguments of a call as an object; {"INVALID_JSON": text} if the model wrote none, or was cut."""
    if text is UNSET or not text.strip():
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"INVALID_JSON": text}
