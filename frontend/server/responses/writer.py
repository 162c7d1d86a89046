"""From what an output says to the items of a response, and to the events that tell of them.

ReplyDelta --read--> events ... --end--> events
The response grows with it: at every event it holds all that was told until then. No IO.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pagewire.frontend.server.http import sse
from pagewire.frontend.server.openai.protocol import TokenLogprob, ToolCall, Usage
from pagewire.frontend.server.parsing.reply import ReplyDelta
from pagewire.frontend.server.responses.items import new_id
from pagewire.frontend.server.responses.protocol import (
    CallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    Response,
    ResponseEvent,
    ResponseFailure,
    ResponseUsage,
    Status,
)

Events = list[bytes]  # encoded, by sequence number


class ResponseWriter:
    """Writes one response. One item is open at a time: whatever is of another one completes it."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self._number = 0
        self._open: Item | None = None
        self._call = -1  # the index of the call that is open, if one is
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text has not been told

    def create(self) -> Events:
        """It is there, but nothing has come of it."""
        return [self._state("response.created")]

    def queue(self) -> Events:
        """It waits, and nobody waits for it."""
        return [self._state("response.queued")]

    def start(self) -> Events:
        """The engine is at it."""
        self.response.status = "in_progress"
        return [self._state("response.in_progress")]

    def read(self, reply: ReplyDelta, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        """More of the output."""
        self._logprobs += logprobs
        events = self._text(reply.content) if reply.content else []
        for call in reply.tool_calls:
            events += self._arguments(call)
        return events

    def end(self, status: Status, usage: Usage | None) -> Events:
        """The output has ended. An item that is open is only complete if the response is."""
        response = self.response
        events: Events = []
        if not response.output and status in ("completed", "incomplete"):
            events += self._message()
        events += self._close("completed" if status == "completed" else "incomplete")
        response.status = status
        if status == "completed":
            response.completed_at = int(time.time())
        response.usage = None if usage is None else usage_of(usage)
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        ends = {"completed": "response.completed", "failed": "response.failed"}
        return [*events, self._state(ends.get(status, "response.incomplete"))]

    def fail(self, code: str, message: str, usage: Usage | None) -> Events:
        """It has ended with an error."""
        self.response.error = ResponseFailure(code, message)
        return self.end("failed", usage)

    # -------------------------------------------------------------- items

    def _text(self, delta: str) -> Events:
        """More text."""
        events: Events = []
        if not isinstance(self._open, MessageItem):
            events = [*self._close(), *self._message()]
        assert isinstance(self._open, MessageItem)
        (part,) = self._open.content
        part.text += delta
        logprobs, self._logprobs = self._logprobs, []
        part.logprobs += logprobs
        told = {"item_id": self._open.id, "content_index": 0, "delta": delta, "logprobs": logprobs}
        return [*events, self._event("response.output_text.delta", **told)]

    def _arguments(self, call: ToolCall) -> Events:
        """A new call, or more of the arguments of the one that is open."""
        events: Events = []
        if not isinstance(self._open, CallItem) or call.index != self._call:
            assert isinstance(call.id, str) and isinstance(call.function.name, str)
            events = self._close()
            self._call = call.index if isinstance(call.index, int) else -1
            events += self._begin(CallItem(id=new_id("fc"), call_id=call.id, name=call.function.name))
        assert isinstance(self._open, CallItem)
        if not isinstance(call.function.arguments, str) or not call.function.arguments:
            return events
        self._open.arguments += call.function.arguments
        told = {"item_id": self._open.id, "delta": call.function.arguments}
        return [*events, self._event("response.function_call_arguments.delta", **told)]

    def _message(self) -> Events:
        """A message begins."""
        item = MessageItem(id=new_id("msg"), content=[])
        events = self._begin(item)
        part = OutputText()
        item.content.append(part)
        told = {"item_id": item.id, "content_index": 0, "part": part}
        return [*events, self._event("response.content_part.added", **told)]

    def _begin(self, item: Item) -> Events:
        self._open = item
        self.response.output.append(item)
        return [self._event("response.output_item.added", item=item)]

    def _close(self, status: ItemStatus = "completed") -> Events:
        """The open item, if there is one, has ended."""
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        told: dict[str, Any] = {"item_id": item.id}
        if isinstance(item, CallItem):
            told |= {"name": item.name, "arguments": item.arguments}
            return [
                self._event("response.function_call_arguments.done", **told),
                self._event("response.output_item.done", item=item),
            ]
        (part,) = item.content
        part.logprobs += self._logprobs
        self._logprobs = []
        told |= {"content_index": 0}
        return [
            self._event("response.output_text.done", **told, text=part.text, logprobs=part.logprobs),
            self._event("response.content_part.done", **told, part=part),
            self._event("response.output_item.done", item=item),
        ]

    # -------------------------------------------------------------- events

    def _event(self, kind: str, **fields: Any) -> bytes:
        """An event of the item that came last."""
        return self._encode(kind, output_index=len(self.response.output) - 1, **fields)

    def _state(self, kind: str) -> bytes:
        """An event of the response's state."""
        return self._encode(kind, response=self.response)

    def _encode(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.named_event(kind, ResponseEvent(type=kind, sequence_number=number, **fields))


def usage_of(usage: Usage) -> ResponseUsage:
    """Token counts as responses have them."""
    details = usage.prompt_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(0 if details is None else details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(),
        usage.total_tokens,
    )
