"""Edits of a conversation by `context_management` of its request: of old results of tools, and old reasoning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from pagewire.frontend.client import TokensPrompt
from pagewire.frontend.server.anthropic.protocol import AppliedEdit
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.prepared_chat import place_media, prompt_of
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.serving.service import Service

CLEARED = "[This result was cleared to save room. Call the tool again if it is needed.]"
JSON = dict[str, Any]


class Amount(msgspec.Struct):
    """A number of tokens, of uses of tools, or of turns."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: int = 0


class ClearToolUses(msgspec.Struct, tag_field="type", tag="clear_tool_uses_20250919"):
    """Clears old results of tools when the prompt is long.

    trigger: when. keep: uses of tools that stay, the last ones. clear_at_least: else nothing is cleared.
    exclude_tools: names of tools whose uses stay. clear_tool_inputs: clear the arguments of the calls, too.
    """

    trigger: Amount = msgspec.field(default_factory=lambda: Amount("input_tokens", 100_000))
    keep: Amount = msgspec.field(default_factory=lambda: Amount("tool_uses", 3))
    clear_at_least: Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ClearThinking(msgspec.Struct, tag_field="type", tag="clear_thinking_20251015"):
    """Leaves out the reasoning of old turns. keep: turns whose reasoning stays, the last ones."""

    keep: Literal["all"] | Amount = msgspec.field(default_factory=lambda: Amount("thinking_turns", 1))


Edit: TypeAlias = ClearToolUses | ClearThinking


class ContextManagement(msgspec.Struct):
    """The field `context_management`."""

    edits: list[Edit] | None = None


@dataclass
class EditedPrompt:
    """Renders the conversation of one request, edited.

    Attributes:
        applied: the edits that have changed something. original: tokens of the prompt without edits of results.
    """

    edits: list[Edit]
    applied: list[AppliedEdit] = field(default_factory=list)
    original: int | None = None

    async def render(
        self, service: Service, chat: ChatRequest, tools: ToolUse, counts: bool = False
    ) -> TokensPrompt:
        """Return the prompt; see `prompt_of`."""
        for edit in self.edits:
            if isinstance(edit, ClearThinking):
                chat = self._without_thinking(chat, edit)
        for edit in self.edits:
            if isinstance(edit, ClearToolUses):
                chat = await self._without_results(service, chat, tools, edit)
        return await prompt_of(service, chat, tools, counts)

    def _without_thinking(self, chat: ChatRequest, edit: ClearThinking) -> ChatRequest:
        if edit.keep == "all" or edit.keep.type == "all":
            return chat
        thoughts = [place for place, each in enumerate(chat.messages) if "reasoning_content" in each]
        old = set(thoughts[: max(0, len(thoughts) - edit.keep.value)])
        if not old:
            return chat
        messages = [
            {
                name: value
                for name, value in message.items()
                if name != "reasoning_content" or place not in old
            }
            for place, message in enumerate(chat.messages)
        ]
        self.applied.append(AppliedEdit("clear_thinking_20251015", cleared_thinking_turns=len(old)))
        return msgspec.structs.replace(chat, messages=messages)

    async def _without_results(
        self, service: Service, chat: ChatRequest, tools: ToolUse, edit: ClearToolUses
    ) -> ChatRequest:
        number = await num_message_tokens(service, chat, tools)
        self.original = number if self.original is None else self.original
        uses = sum(message["role"] == "tool" for message in chat.messages)
        if (uses if edit.trigger.type == "tool_uses" else number) <= edit.trigger.value:
            return chat
        messages, num_cleared = clear_results(chat.messages, edit)
        if not num_cleared:
            return chat
        shorter = msgspec.structs.replace(chat, messages=messages)
        saved = number - await num_message_tokens(service, shorter, tools)
        if edit.clear_at_least is not None and saved < edit.clear_at_least.value:
            return chat
        self.applied.append(
            AppliedEdit(
                "clear_tool_uses_20250919", cleared_tool_uses=num_cleared, cleared_input_tokens=max(0, saved)
            )
        )
        return shorter


async def num_message_tokens(service: Service, chat: ChatRequest, tools: ToolUse) -> int:
    """Return the number of tokens of a prompt, which may be longer than the model takes."""
    return len(await place_media(service, await prompt_of(service, chat, tools, counts=True)))


def clear_results(messages: list[JSON], edit: ClearToolUses) -> tuple[list[JSON], int]:
    """Return messages without the results of old calls, and how many these are."""
    names = {
        call["id"]: call["function"]["name"] for each in messages for call in each.get("tool_calls") or ()
    }
    stays = set(edit.exclude_tools or ())
    uses = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "tool" and names.get(message["tool_call_id"]) not in stays
    ]
    old = set(uses[: max(0, len(uses) - edit.keep.value)])
    old = {place for place in old if messages[place]["content"] != CLEARED}
    ids = {messages[place]["tool_call_id"] for place in old}
    result = []
    for place, message in enumerate(messages):
        if place in old:
            message = message | {"content": CLEARED}
        elif edit.clear_tool_inputs and message.get("tool_calls"):
            calls = [without_input(call, ids, edit.clear_tool_inputs) for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        result.append(message)
    return result, len(old)


def without_input(call: JSON, ids: set[str], clears: bool | list[str]) -> JSON:
    """Return a call without its arguments, if its result is cleared. clears: all, or those of some tools."""
    name = call["function"]["name"]
    if call["id"] not in ids or (isinstance(clears, list) and name not in clears):
        return call
    return call | {"function": {"name": name, "arguments": {}}}


def read_edits(given: JSON | None) -> list[Edit] | None:
    """Return the edits that a request asks for; None: it does not ask for any.

    Raises:
        APIError: one is malformed, or not known.
    """
    if given is None:
        return None
    try:
        return msgspec.convert(given, ContextManagement).edits or []
    except msgspec.ValidationError as error:
        known = "clear_tool_uses_20250919, clear_thinking_20251015"
        message = (
            f"context_management: {error}; edits are {known}: leave out what else the model is not to see"
        )
        raise APIError(400, message, param="context_management") from None
