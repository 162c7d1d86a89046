"""Conversion of a reply to a message of Anthropic's API, and to the events of its stream. No IO."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from pagewire.frontend.client import CompletionOutput
from pagewire.frontend.server.anthropic.protocol import (
    AppliedEdits,
    CacheCreation,
    EventDelta,
    GeneratedMessage,
    MessageEvent,
    MessageUsage,
    OutputBlock,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.openai.protocol import ToolCall
from pagewire.frontend.server.openai.reply import ReplyDelta, call_arguments
from pagewire.frontend.server.serving.usage import Usage

HOUR = 3600.0
Kind = Literal["text", "thinking", "tool_use"]


def blocks_of(reply: ReplyDelta, omits_thoughts: bool) -> list[OutputBlock]:
    """Return a whole reply as blocks. omits_thoughts: without the text of the reasoning."""
    blocks: list[OutputBlock] = []
    if reply.reasoning:
        signature = hashlib.sha256(reply.reasoning.encode()).hexdigest()
        blocks.append(ThinkingBlock("" if omits_thoughts else reply.reasoning, signature))
    if reply.content:
        blocks.append(TextBlock(reply.content))
    for call in reply.tool_calls:
        function = call.function
        blocks.append(ToolUseBlock(str(call.id), str(function.name), call_arguments(function.arguments)))
    return blocks


def end_of(part: CompletionOutput, called: bool, full: bool) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a message.

    called: it has calls. full: it has as many tokens as the request allows.
    """
    if part.finish_reason == "length":
        return "max_tokens" if full else "model_context_window_exceeded", None
    if isinstance(part.stop_reason, str):
        return "stop_sequence", part.stop_reason
    return "tool_use" if called else "end_turn", None


def message_usage(usage: Usage, kept: Sequence[tuple[float, int]] = ()) -> MessageUsage:
    """Convert token counts to those of Anthropic's API, where a token of the prompt is read, created or input.

    kept: the seconds for which each beginning of the prompt is kept, and its number of tokens; shorter ones first.
    """
    details = usage.prompt_tokens_details
    cached = counted = 0 if details is None else details.cached_tokens
    created = {True: 0, False: 0}  # for an hour, or for less
    for seconds, num_tokens in kept:
        created[seconds >= HOUR] += max(0, num_tokens - counted)
        counted = max(counted, num_tokens)
    number = counted - cached
    answer = MessageUsage(usage.prompt_tokens - counted, usage.completion_tokens, cached, number)
    if kept:
        answer.cache_creation = CacheCreation(created[False], created[True])
    return answer


class EventWriter:
    """Writes the events of one message. One block is open at a time; data for another one closes it.

    omits_thoughts: leave out the text of the reasoning.

    Attributes:
        called: a call has begun.
    """

    def __init__(self, omits_thoughts: bool) -> None:
        self.called = False
        self._omits_thoughts = omits_thoughts
        self._open: Kind | None = None
        self._index = -1
        self._thought = hashlib.sha256()

    def start(self, message: GeneratedMessage) -> bytes:
        """Return the events that come first. message: without content."""
        return encode_event(MessageEvent("message_start", message=message)) + encode_event(
            MessageEvent("ping")
        )

    def read(self, reply: ReplyDelta) -> bytes:
        """Return the events of an increment of the reply."""
        events = b""
        if reply.reasoning:
            events += self._thinking(reply.reasoning)
        if reply.content:
            if self._open != "text":
                events += self._begin("text", TextBlock(""))
            events += self._delta(EventDelta("text_delta", text=reply.content))
        for call in reply.tool_calls:
            events += self._call(call)
        return events

    def end(
        self,
        stop_reason: str,
        stop_sequence: str | None,
        usage: MessageUsage,
        edits: AppliedEdits | UnsetType = UNSET,
    ) -> bytes:
        """Return the events that come last. edits: of the conversation, if the request asks for any."""
        end = EventDelta(stop_reason=stop_reason, stop_sequence=stop_sequence)
        delta = MessageEvent("message_delta", delta=end, usage=usage, context_management=edits)
        return self._close() + encode_event(delta) + encode_event(MessageEvent("message_stop"))

    def _thinking(self, text: str) -> bytes:
        events = b""
        if self._open != "thinking":
            self._thought = hashlib.sha256()
            events = self._begin("thinking", ThinkingBlock(""))
        self._thought.update(text.encode())
        if self._omits_thoughts:
            return events
        return events + self._delta(EventDelta("thinking_delta", thinking=text))

    def _call(self, call: ToolCall) -> bytes:
        """Begin a call, which has an id then, or add arguments to the open one."""
        events, arguments = b"", call.function.arguments
        if isinstance(call.id, str):
            self.called = True
            events = self._begin("tool_use", ToolUseBlock(call.id, str(call.function.name), {}))
        if isinstance(arguments, str) and arguments:
            events += self._delta(EventDelta("input_json_delta", partial_json=arguments))
        return events

    def _begin(self, kind: Kind, block: OutputBlock) -> bytes:
        events = self._close()
        self._open, self._index = kind, self._index + 1
        return events + encode_event(
            MessageEvent("content_block_start", index=self._index, content_block=block)
        )

    def _delta(self, delta: EventDelta) -> bytes:
        return encode_event(MessageEvent("content_block_delta", index=self._index, delta=delta))

    def _close(self) -> bytes:
        """End the open block, if there is one; one of reasoning has a signature."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind == "thinking":
            signed = self._delta(EventDelta("signature_delta", signature=self._thought.hexdigest()))
        return signed + encode_event(MessageEvent("content_block_stop", index=self._index))


def encode_event(event: MessageEvent) -> bytes:
    """Return an event with its type as its name."""
    return sse.named_event(event.type, event)
