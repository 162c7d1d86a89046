"""Conversion of a request to /v1/messages to one for a chat completion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pagewire.frontend.client import MediaItem
from pagewire.frontend.server.anthropic.protocol import (
    ContentSource,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    InputBlock,
    MessagesRequest,
    MessageToolChoice,
    OutputConfig,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from pagewire.frontend.server.anthropic.tools import anthropic_tools
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.frontend.server.openai.protocol import ChatRequest, JsonSchema, ResponseFormat
from pagewire.frontend.server.openai.reminders import has_conversation_begun, reminder
from pagewire.frontend.server.openai.size import too_many_values
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.budget import MAX_PARTS

SAME_NAME = ("temperature", "top_p", "top_k", "stream", "seed", "priority", "cache_salt")
GIVEN: dict[str, type[InputBlock]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
KINDS: dict[str, dict[str, type[InputBlock]]] = {  # of blocks, by role
    "user": {**GIVEN, "tool_result": ToolResultBlock},
    "tool": {**GIVEN, "tool_reference": ToolReferenceBlock},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": {"text": TextBlock},
}
ROLES = ("user", "assistant", "system")
# What Anthropic's servers did. It is nothing that the model could read.
HOSTED_BLOCKS = re.compile(
    r"server_tool_use|mcp_tool_use|mcp_tool_result|container_upload|"
    r"(web_search|web_fetch|(bash_|text_editor_)?code_execution|tool_search|advisor)_tool_result|compaction"
)
NO_BUDGET = (
    "thinking.budget_tokens has no effect: this server knows no format of reasoning for the model, or the mark "
    "that ends it is several tokens"
)

JSON = dict[str, Any]


def chat_of_anthropic(
    request: CountTokensRequest, reasons: bool, limits: bool = False, strict_tools: bool = False
) -> ChatRequest:
    """Convert a request to one for a chat completion.

    reasons: the server tells reasoning from answers, so the model may be one that reasons. limits: and can end it.
    strict_tools: refuse tools that Anthropic's servers run.

    Raises:
        APIError: a message, block, tool or field is malformed or not supported.
    """
    messages = anthropic_messages(request)
    config = request.output_config or OutputConfig()
    choice = request.tool_choice or MessageToolChoice("auto")
    tools, chosen = anthropic_tools(request.tools or (), choice, strict_tools)
    fields: JSON = {}
    if isinstance(request, MessagesRequest):
        fields = {name: getattr(request, name) for name in SAME_NAME}
        fields["thinking_token_budget"] = budget_of(request, limits)
        fields |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools or None,
        tool_choice=chosen,
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
    """Return the most tokens of reasoning; None: no limit. limits: see `chat_of_anthropic`.

    Clients always send a budget, so one that has no effect is warned of.
    """
    thinking = request.thinking
    if thinking is None or thinking.budget_tokens is None or thinking.type == "disabled":
        return None
    if not limits:
        warn_client(NO_BUDGET)
        return None
    return thinking.budget_tokens


def thinking_variables(request: CountTokensRequest, reasons: bool) -> JSON:
    """Return the variables of the chat template that turn reasoning on or off. reasons: see `chat_of_anthropic`."""
    if (thinking := request.thinking) is None:
        return {"enable_thinking": False} if reasons else {}
    return {"enable_thinking": thinking.type != "disabled"}


# ---------------------------------------------------------------- messages


def anthropic_messages(request: CountTokensRequest) -> list[JSON]:
    """Return the messages of a chat: results of tools are messages, consecutive turns of one role are one.

    Raises:
        APIError: there are none, or one is malformed.
    """
    check_num_blocks(request.messages)
    messages: list[JSON] = []
    if request.system:
        blocks = read_blocks(request.system, "system", "system")
        append_turn(messages, {"role": "system", "content": content_parts(blocks, "system")})
    for index, turn in enumerate(request.messages):
        place, role = f"messages[{index}]", turn.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad_block(f"{place}.role must be one of {', '.join(ROLES)}, got {quoted(role)}")
        blocks = read_blocks(turn.get("content"), f"{place}.content", role)
        if role == "assistant":
            append_turn(messages, assistant_message(blocks))
            continue
        if role == "system" and has_conversation_begun(messages):
            append_turn(
                messages, {"role": "user", "content": reminder(content_parts(blocks, f"{place}.content"))}
            )
            continue
        for number, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                append_turn(messages, tool_result_message(block, f"{place}.content"))
            else:
                append_turn(
                    messages, {"role": role, "content": content_parts([block], f"{place}.content", number)}
                )
    if not request.messages:
        raise bad_block("messages is empty")
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise bad_block("messages: the last tool_use block needs a tool_result in a message of the user")
    for message in messages:
        message["content"] = simplest(message["content"], None if message.get("tool_calls") else "")
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def check_num_blocks(turns: Sequence[JSON]) -> None:
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
            raise too_many_values("blocks", number, MAX_PARTS)


def append_turn(messages: list[JSON], message: JSON) -> None:
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
    message: JSON = {"role": "assistant", "content": content_parts(blocks, "")}
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
    if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
        warn_client("blocks of type redacted_thinking have no effect: only Anthropic can read them")
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = thoughts
    return message


def tool_result_message(block: ToolResultBlock, place: str) -> JSON:
    """Return the message with the result of a call. Raises APIError."""
    place = f"{place}: tool_result.content"
    parts = content_parts(read_blocks(block.content or "", place, "tool"), place)
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
        raise bad_block(f"{place} must be text or a list of blocks")
    return [
        read_block(block, f"{place}[{index}]", role)
        for index, block in enumerate(content)
        if not is_block_left_out(block)
    ]


def is_block_left_out(block: Any) -> bool:
    """Return True, with a warning, for a block of a tool on Anthropic's servers."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or not HOSTED_BLOCKS.fullmatch(kind):
        return False
    warn_client(f"blocks of type {kind} are left out: no model that is served here can read them")
    return True


def read_block(block: Any, place: str, role: str) -> InputBlock:
    """Return one block; see `read_blocks`. Raises APIError."""
    kind = block.get("type") if isinstance(block, dict) else None
    kinds = KINDS[role]
    if isinstance(kind, str) and kind in kinds:
        try:
            return msgspec.convert(block, kinds[kind])
        except msgspec.ValidationError as error:
            raise bad_block(f"{place}: {error}") from None
    raise bad_block(f"{place}.type must be one of {', '.join(kinds)} here, got {quoted(kind)}")


def content_parts(blocks: Iterable[InputBlock], place: str, first: int = 0) -> list[JSON]:
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
        elif isinstance(block, DocumentBlock):
            parts += document_parts(block, f"{place}[{number}]")
        elif isinstance(block, SearchResultBlock):
            text = "\n".join(part.text for part in block.content)
            parts.append({"type": "text", "text": f"{block.title}\n{block.source}\n\n{text}"})
        elif isinstance(block, ToolReferenceBlock):
            parts.append({"type": "text", "text": f"The tool {block.tool_name} can be called."})
    return parts


def document_parts(block: DocumentBlock, place: str) -> list[JSON]:
    """Return a document as parts: its title and its context come before its text.

    Raises:
        APIError: it is no text.
    """
    head = "\n".join(filter(None, (block.title, block.context)))
    parts = [{"type": "text", "text": head}] if head else []
    source = block.source
    if isinstance(source, TextSource):
        return [*parts, {"type": "text", "text": source.data}]
    if isinstance(source, ContentSource):
        return parts + content_parts(read_blocks(source.content, f"{place}.source.content", "tool"), place)
    raise bad_block(f"{place}: a document must be text: give the text of a PDF, or its pages as pictures")


def simplest(parts: list[JSON], empty: str | None) -> str | list[JSON] | None:
    """Return content as a string if it has one part. empty: what it is without any."""
    if len(parts) > 1 or (parts and "text" not in parts[0]):
        return parts
    return str(parts[0]["text"]) if parts else empty


def bad_block(message: str, param: str = "messages") -> APIError:
    """Return the error for a malformed or unsupported part of a request."""
    return APIError(400, message, param=param)
