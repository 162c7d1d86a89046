"""The parts of a model's reply (reasoning, content, tool calls), as increments and as a whole."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Reasoning:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More text for the user."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Start of a tool call. index: its position among the calls of the reply, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta: TypeAlias = Reasoning | ContentDelta | CallStart | Arguments


@dataclass
class ParsedCall:
    """A whole tool call. arguments: JSON text as the model wrote it, so not necessarily valid."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedReply:
    """A whole reply. None: the reply has no such part."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)


def fold(deltas: Iterable[Delta]) -> ParsedReply:
    """Combine the deltas of a stream into a whole reply."""
    reply = ParsedReply()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            reply.content = (reply.content or "") + delta.text
        elif isinstance(delta, Reasoning):
            reply.reasoning = (reply.reasoning or "") + delta.text
        elif isinstance(delta, CallStart):
            reply.tool_calls.append(ParsedCall(delta.id, delta.name))
        else:
            reply.tool_calls[delta.index].arguments += delta.text
    return reply


def merge_deltas(last: Delta, delta: Delta) -> Delta | None:
    """Combine two consecutive deltas; None if they are of different kinds or calls."""
    if isinstance(last, ContentDelta) and isinstance(delta, ContentDelta):
        return ContentDelta(last.text + delta.text)
    if isinstance(last, Reasoning) and isinstance(delta, Reasoning):
        return Reasoning(last.text + delta.text)
    if isinstance(last, Arguments) and isinstance(delta, Arguments) and last.index == delta.index:
        return Arguments(last.index, last.text + delta.text)
    return None


def call_id() -> str:
    """Return a random call id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return a random call id of nine letters and digits, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
