"""Conversion of a parsed output to the items of a response and to the events of its stream.

ReplyDelta --read--> events ... --end--> events
The response grows with the events: after each it holds everything sent so far. No IO.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pagewire.frontend.server.http import sse
from pagewire.frontend.server.openai.protocol import TokenLogprob, ToolCall
from pagewire.frontend.server.openai.reply import ReplyDelta
from pagewire.frontend.server.responses.calls import CallWriter
from pagewire.frontend.server.responses.items import ENCRYPTED, encode_reasoning, new_id
from pagewire.frontend.server.responses.protocol import (
    IncompleteDetails,
    InputTokensDetails,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
    ResponseFailure,
    ResponseUsage,
    Status,
)
from pagewire.frontend.server.responses.tools import ResponseTools
from pagewire.frontend.server.serving.usage import Usage

Events = list[bytes]  # encoded, by sequence number


class ResponseWriter:
    """Builds one response and its events. One item is open at a time; data for another item completes it.

    tools: that the model may call. include: what the request includes. generates: else there is no output.
    """

    def __init__(
        self,
        response: Response,
        tools: ResponseTools | None = None,
        include: Sequence[str] = (),
        *,
        generates: bool = True,
    ) -> None:
        self.response = response
        self._tools = tools or ResponseTools(None)
        self._encrypts = ENCRYPTED in include
        self._generates = generates
        self._number = 0
        self._open: Item | None = None
        self._call: CallWriter | None = None
        self._index = -1  # of the open call

    def create(self) -> Events:
        """Return the event that the response exists."""
        return [self._state("response.created")]

    def queue(self) -> Events:
        """Return the event that the response waits to be generated in the background."""
        return [self._state("response.queued")]

    def start(self) -> Events:
        """Mark the response as in progress, and return the event."""
        self.response.status = "in_progress"
        return [self._state("response.in_progress")]

    def read(self, reply: ReplyDelta, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        """Add an increment of the output, and return its events. logprobs: of the tokens of its content."""
        if not self._generates:
            return []
        events = self._reasoning(reply.reasoning) if reply.reasoning else []
        if reply.content:
            events += self._text(reply.content, logprobs)
        for call in reply.tool_calls:
            events += self._arguments(call)
        return events

    def end(self, status: Status, usage: Usage | None, reasoning_tokens: int = 0) -> Events:
        """End the response. An open item becomes "completed" if the response does, else "incomplete".

        reasoning_tokens: tokens of the output that are reasoning.
        """
        response = self.response
        events: Events = []
        if not self._generates and status == "incomplete":  # after its one token
            status = "completed"
        if self._generates and not response.output and status in ("completed", "incomplete"):
            events += self._message()
        events += self._close("completed" if status == "completed" else "incomplete")
        response.status = status
        if status == "completed":
            response.completed_at = int(time.time())
        response.usage = None if usage is None else usage_of(usage, reasoning_tokens)
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        ends = {"completed": "response.completed", "failed": "response.failed"}
        return [*events, self._state(ends.get(status, "response.incomplete"))]

    def fail(self, code: str, message: str, usage: Usage | None, reasoning_tokens: int = 0) -> Events:
        """End the response with an error."""
        self.response.error = ResponseFailure(code, message)
        return self.end("failed", usage, reasoning_tokens)

    # -------------------------------------------------------------- items

    def _reasoning(self, delta: str) -> Events:
        """Add text to the open reasoning; begin an item if needed."""
        events: Events = []
        if not isinstance(self._open, ReasoningItem):
            events = [*self._close(), *self._begin_text(ReasoningItem(id=new_id("rs"), content=[]))]
        assert isinstance(self._open, ReasoningItem)
        (part,) = self._open.content
        part.text += delta
        fields = {"item_id": self._open.id, "content_index": 0, "delta": delta}
        return [*events, self._event("response.reasoning_text.delta", **fields)]

    def _text(self, delta: str, logprobs: Sequence[TokenLogprob]) -> Events:
        """Add text to the open message; begin one if needed."""
        events: Events = []
        if not isinstance(self._open, MessageItem):
            events = [*self._close(), *self._message()]
        assert isinstance(self._open, MessageItem)
        (part,) = self._open.content
        part.text += delta
        part.logprobs += logprobs
        fields = {"item_id": self._open.id, "content_index": 0, "delta": delta, "logprobs": logprobs}
        return [*events, self._event("response.output_text.delta", **fields)]

    def _arguments(self, call: ToolCall) -> Events:
        """Begin a new call, or add arguments to the open one."""
        events: Events = []
        if self._call is None or call.index != self._index:
            assert isinstance(call.id, str) and isinstance(call.function.name, str)
            events = self._close()
            self._index = call.index if isinstance(call.index, int) else -1
            self._call = CallWriter(self._tools.called(call.function.name), call.id)
            events += self._begin(self._call.item)
        if not isinstance(call.function.arguments, str) or not call.function.arguments:
            return events
        return events + self._grown(self._call.item, self._call.add(call.function.arguments))

    def _grown(self, item: Item, grown: tuple[str, str] | None) -> Events:
        """Return the event that a call has grown, if there is one."""
        return [] if grown is None else [self._event(grown[0], item_id=item.id, delta=grown[1])]

    def _message(self) -> Events:
        """Begin a message."""
        return self._begin_text(MessageItem(id=new_id("msg"), content=[]))

    def _begin_text(self, item: ReasoningItem | MessageItem) -> Events:
        """Begin an item with one part, which has no text yet."""
        events = self._begin(item)
        part: ReasoningText | OutputText
        if isinstance(item, ReasoningItem):
            part = ReasoningText()
            item.content.append(part)
        else:
            part = OutputText(logprobs=[])
            item.content.append(part)
        fields = {"item_id": item.id, "content_index": 0, "part": part}
        return [*events, self._event("response.content_part.added", **fields)]

    def _begin(self, item: Item) -> Events:
        self._open = item
        self.response.output.append(item)
        return [self._event("response.output_item.added", item=item)]

    def _close(self, status: ItemStatus = "completed") -> Events:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        call, self._call = self._call, None
        if call is not None:
            events = self._grown(item, call.last())
            if (end := call.end(status)) is not None:
                events.append(self._event(end[0], item_id=item.id, **end[1]))
            return [*events, self._event("response.output_item.done", item=item)]
        assert isinstance(item, (ReasoningItem, MessageItem))
        item.status = status
        fields: dict[str, Any] = {"item_id": item.id}
        (part,) = item.content
        if self._encrypts and isinstance(item, ReasoningItem):
            item.encrypted_content = encode_reasoning(item.content[0].text)
        fields |= {"content_index": 0}
        done = (
            self._event("response.reasoning_text.done", **fields, text=part.text)
            if isinstance(part, ReasoningText)
            else self._event("response.output_text.done", **fields, text=part.text, logprobs=part.logprobs)
        )
        return [
            done,
            self._event("response.content_part.done", **fields, part=part),
            self._event("response.output_item.done", item=item),
        ]

    # -------------------------------------------------------------- events

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the last item."""
        return self._encode(kind, output_index=len(self.response.output) - 1, **fields)

    def _state(self, kind: str) -> bytes:
        """Return an event of the response's state."""
        return self._encode(kind, response=self.response)

    def _encode(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.named_event(kind, ResponseEvent(type=kind, sequence_number=number, **fields))


def usage_of(usage: Usage, reasoning_tokens: int) -> ResponseUsage:
    """Convert token counts to the format of /v1/responses. reasoning_tokens: tokens of the output's reasoning."""
    details = usage.prompt_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(0)
        if details is None
        else InputTokensDetails(details.cached_tokens, details.retained_tokens),
        usage.completion_tokens,
        OutputTokensDetails(reasoning_tokens),
        usage.total_tokens,
    )
