"""Conversion of a request to /v1/messages to one for a chat completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pagewire.frontend.media.items import MediaItem
from pagewire.frontend.server.anthropic.protocol import (
    CountTokensRequest,
    ImageBlock,
    InputBlock,
    MessagesRequest,
    MessageToolChoice,
    OutputConfig,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn
from pagewire.frontend.server.openai.protocol import ChatRequest, JsonSchema, ResponseFormat
from pagewire.frontend.server.openai.size import too_many
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.budget import MAX_PARTS

SAME_NAME = ("temperature", "top_p", "top_k", "stream", "seed", "priority", "cache_salt")
KINDS: dict[str, dict[str, type[InputBlock]]] = {  # of blocks, by role
    "user": {"text": TextBlock, "image": ImageBlock, "tool_result": ToolResultBlock},
    "tool": {"text": TextBlock, "image": ImageBlock},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": {"text": TextBlock},
}
ROLES = ("user", "assistant", "system")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TOOL_FIELDS = ("name", "description", "strict")  # as they are in chat completions
SILENT_TOOL_FIELDS = {"type", "input_schema", "cache_control", *TOOL_FIELDS}
NO_BUDGET = (
    "thinking.budget_tokens has no effect: this server knows no format of reasoning for the model, or the mark "
    "that ends it is several tokens"
)

JSON = dict[str, Any]


def chat_request(request: CountTokensRequest, reasons: bool, limits: bool = False) -> ChatRequest:
    """Convert a request to one for a chat completion.

    reasons: the server tells reasoning from answers, so the model may be one that reasons. limits: and can end it.

    Raises:
        APIError: a message, block, tool or field is malformed or not supported.
    """
    messages = messages_of(request)
    config = request.output_config or OutputConfig()
    tools = [tool_of(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
    choice = request.tool_choice or MessageToolChoice("auto")
    fields: JSON = {}
    if isinstance(request, MessagesRequest):
        fields = {name: getattr(request, name) for name in SAME_NAME}
        fields["thinking_token_budget"] = budget_of(request, limits)
        fields |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools or None,
        tool_choice=choice_of(choice) if tools or choice.type in ("any", "tool") else None,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        continue_final_message=messages[-1]["role"] == "assistant",
        reasoning_effort=config.effort,
        response_format=None
        if config.format is None
        else ResponseFormat("json_schema", JsonSchema(schema=config.format.schema)),
        chat_template_kwargs=thinking_variables(request, reasons) | (request.chat_template_kwargs or {}),
        **fields,
    )


def budget_of(request: MessagesRequest, limits: bool) -> int | None:
    """Return the most tokens of reasoning; None: no limit. limits: see `chat_request`.

    Clients always send a budget, so one that has no effect is warned of.
    """
    thinking = request.thinking
    if thinking is None or thinking.budget_tokens is None or thinking.type == "disabled":
        return None
    if not limits:
        warn(NO_BUDGET)
        return None
    return thinking.budget_tokens


def thinking_variables(request: CountTokensRequest, reasons: bool) -> JSON:
    """Return the variables of the chat template that turn reasoning on or off. reasons: see `chat_request`."""
    if (thinking := request.thinking) is None:
        return {"enable_thinking": False} if reasons else {}
    return {"enable_thinking": thinking.type != "disabled"}


# ---------------------------------------------------------------- messages


def messages_of(request: CountTokensRequest) -> list[JSON]:
    """Return the messages of a chat: results of tools are messages, consecutive turns of one role are one.

    Raises:
        APIError: there are none, or one is malformed.
    """
    check_number(request.messages)
    messages: list[JSON] = []
    if request.system:
        blocks = read_blocks(request.system, "system", "system")
        add(messages, {"role": "system", "content": parts_of(blocks, "system")})
    for index, turn in enumerate(request.messages):
        place, role = f"messages[{index}]", turn.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad(f"{place}.role must be one of {', '.join(ROLES)}, got {quoted(role)}")
        blocks = read_blocks(turn.get("content"), f"{place}.content", role)
        if role == "assistant":
            add(messages, assistant_message(blocks))
            continue
        for number, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                add(messages, result_message(block, f"{place}.content"))
            else:
                add(messages, {"role": role, "content": parts_of([block], f"{place}.content", number)})
    if not request.messages:
        raise bad("messages is empty")
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise bad("messages: the last tool_use block needs a tool_result in a message of the user")
    for message in messages:
        message["content"] = simplest(message["content"], None if message.get("tool_calls") else "")
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def check_number(turns: Sequence[JSON]) -> None:
    """Refuse more blocks than a chat may have parts, before any is looked at; raises APIError."""
    number = 0
    for turn in turns:
        if not isinstance(blocks := turn.get("content"), list):
            continue
        number += len(blocks)
        if number <= MAX_PARTS:
            results = (block.get("content") for block in blocks if isinstance(block, dict))
            number += sum(len(content) for content in results if isinstance(content, list))
        if number > MAX_PARTS:
            raise too_many("blocks", number, MAX_PARTS)


def add(messages: list[JSON], message: JSON) -> None:
    """Append a message, or extend the last one if it has the same role: templates expect turns that alternate.

    Its fields but for the role are lists yet, so that many turns take no more time than their length.
    """
    if message["role"] == "tool" or not messages or messages[-1]["role"] != message["role"]:
        messages.append(message)
        return
    for name in message.keys() - {"role"}:
        messages[-1].setdefault(name, []).extend(message[name])


def assistant_message(blocks: Sequence[InputBlock]) -> JSON:
    """Return a turn of the assistant as a message with its content, its reasoning and its calls."""
    message: JSON = {"role": "assistant", "content": parts_of(blocks, "")}
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
    if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
        warn("blocks of type redacted_thinking have no effect: only Anthropic can read them")
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = thoughts
    return message


def result_message(block: ToolResultBlock, place: str) -> JSON:
    """Return the message with the result of a call. Raises APIError."""
    place = f"{place}: tool_result.content"
    parts = parts_of(read_blocks(block.content or "", place, "tool"), place)
    message: JSON = {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts}
    return message | {"is_error": True} if block.is_error else message


def read_blocks(content: Any, place: str, role: str) -> list[InputBlock]:
    """Return the blocks of a content, which is text or a list. place: its path in the request, for errors.

    Raises:
        APIError: it is neither, or a block is malformed or not of this role.
    """
    if isinstance(content, str):
        return [TextBlock(content)]
    if not isinstance(content, list):
        raise bad(f"{place} must be text or a list of blocks")
    return [read_block(block, f"{place}[{index}]", role) for index, block in enumerate(content)]


def read_block(block: Any, place: str, role: str) -> InputBlock:
    """Return one block; see `read_blocks`. Raises APIError."""
    kind = block.get("type") if isinstance(block, dict) else None
    kinds = KINDS[role]
    if isinstance(kind, str) and kind in kinds:
        try:
            return msgspec.convert(block, kinds[kind])
        except msgspec.ValidationError as error:
            raise bad(f"{place}: {error}") from None
    if kind == "document":
        raise bad(f"{place}: models get no documents: give the text in a block of type text")
    raise bad(f"{place}.type must be one of {', '.join(kinds)} here, got {quoted(kind)}")


def parts_of(blocks: Iterable[InputBlock], place: str, first: int = 0) -> list[JSON]:
    """Return the blocks of text and the pictures as parts of a chat message.

    place: of the blocks, the first of which is number `first` there, for errors.
    """
    parts: list[JSON] = []
    for number, block in enumerate(blocks, first):
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            source = block.source
            url = source.url if isinstance(source, UrlSource) else f"data:;base64,{source.data}"
            parts.append({"type": "image", "image": MediaItem("image", url, place=f"{place}[{number}]")})
    return parts


def simplest(parts: list[JSON], empty: str | None) -> str | list[JSON] | None:
    """Return content as a string if it has one part. empty: what it is without any."""
    if len(parts) > 1 or (parts and "text" not in parts[0]):
        return parts
    return str(parts[0]["text"]) if parts else empty


# ---------------------------------------------------------------- tools


def tool_of(tool: JSON, place: str) -> JSON:
    """Return a tool in the format of chat completions.

    Raises:
        APIError: it is one of Anthropic's own, or has no schema.
    """
    if tool.get("type") not in (None, "custom"):
        message = (
            f"{place}: the server has no tool of type {quoted(tool['type'])}: give a tool with input_schema"
        )
        raise bad(message, "tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise bad(f"{place}.input_schema must be the JSON schema of an object", "tools")
    if without_effect := sorted(tool.keys() - SILENT_TOOL_FIELDS):
        warn(f"tools have fields without effect: {quoted(without_effect)[1:-1]}")
    function = {name: tool[name] for name in TOOL_FIELDS if tool.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def choice_of(choice: MessageToolChoice) -> Any:
    """Return a choice of tools in the format of chat completions."""
    return CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}})


def bad(message: str, param: str = "messages") -> APIError:
    """Return the error for a malformed or unsupported part of a request."""
    return APIError(400, message, param=param)
