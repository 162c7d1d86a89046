"""What a reply is made of, piece by piece: reasoning, content, and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins. `index`: its place among the calls of the reply, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta: TypeAlias = Reasoning | Content | CallStart | Arguments


@dataclass
class ToolCall:
    """A call in whole. `arguments` is JSON text, valid only as far as the model wrote valid JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedReply:
    """A reply in whole; None: there is no such part."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def fold(deltas: Iterable[Delta]) -> ParsedReply:
    """The deltas of a stream, put together."""
    reply = ParsedReply()
    for delta in deltas:
        if isinstance(delta, Content):
            reply.content = (reply.content or "") + delta.text
        elif isinstance(delta, Reasoning):
            reply.reasoning = (reply.reasoning or "") + delta.text
        elif isinstance(delta, CallStart):
            reply.tool_calls.append(ToolCall(delta.id, delta.name))
        else:
            reply.tool_calls[delta.index].arguments += delta.text
    return reply


def merged(last: Delta, delta: Delta) -> Delta | None:
    """Two deltas in a row as one; None if they are not of one kind."""
    if isinstance(last, Content) and isinstance(delta, Content):
        return Content(last.text + delta.text)
    if isinstance(last, Reasoning) and isinstance(delta, Reasoning):
        return Reasoning(last.text + delta.text)
    if isinstance(last, Arguments) and isinstance(delta, Arguments) and last.index == delta.index:
        return Arguments(last.index, last.text + delta.text)
    return None


def call_id() -> str:
    """The id of a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: the only ids that Mistral's chat templates take."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
