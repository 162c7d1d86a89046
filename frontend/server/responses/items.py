"""Conversion of a request to /v1/responses, with its items, to a request for a chat completion."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.protocol import ChatRequest, JsonSchema, ResponseFormat
from pagewire.frontend.server.responses.protocol import ResponsesRequest, TextFormat
from pagewire.ipc.quoting import quoted

SAME_NAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "parallel_tool_calls",
)
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
REFERENCE = "item_reference"  # an item that stands for a stored one with its id
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
UNSUPPORTED = ("prompt", "conversation", "context_management", "moderation")
MAX_PAIRS, MAX_KEY, MAX_VALUE = (
    16,
    64,
    512,
)  # limits of `metadata` in OpenAI's API: pairs, and characters of each

JSON = dict[str, Any]


def new_id(prefix: str) -> str:
    """Return a random id, which cannot be guessed."""
    return f"{prefix}_{uuid.uuid4().hex}"


def check_request(request: ResponsesRequest) -> None:
    """Check fields that are not supported, contradictions, and limits.

    Raises:
        APIError: a field is not supported, contradicts another, or is too large.
    """
    for name in UNSUPPORTED:
        if getattr(request, name):
            raise APIError(400, f"{name} is not supported", param=name)
    if unknown := set(request.include or ()) - INCLUDABLE:
        raise APIError(400, f"include: unknown value {quoted(min(unknown))}", param="include")
    if request.background and request.store is False:
        raise APIError(
            400, "background needs store=true: the response is retrieved later", param="background"
        )
    metadata = request.metadata or {}
    if len(metadata) > MAX_PAIRS or any(
        len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in metadata.items()
    ):
        message = f"metadata: at most {MAX_PAIRS} pairs of {MAX_KEY} and {MAX_VALUE} characters"
        raise APIError(400, message, param="metadata")


def chat_request(request: ResponsesRequest, items: Sequence[JSON]) -> ChatRequest:
    """Convert a request to one for a chat completion. items: all items from the conversation's beginning.

    Raises:
        APIError: an item, tool or field that is not supported.
    """
    wants_logprobs = LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    text, reasoning = request.text, request.reasoning
    tools, choice = tools_of(request)
    return ChatRequest(
        messages=messages_of(request.instructions, items),
        stream=request.stream or request.background,  # a background response can be read while it grows
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=request.top_logprobs,
        tools=tools,
        tool_choice=choice,
        reasoning_effort=None if reasoning is None else reasoning.effort,
        verbosity=None if text is None else text.verbosity,
        response_format=None if text is None or text.format is None else format_of(text.format),
        **{name: getattr(request, name) for name in SAME_NAME},
    )


# ---------------------------------------------------------------- items


def read_input(
    given: str | Sequence[JSON] | None, stored_item: Callable[[str], JSON | None] = lambda name: None
) -> list[JSON]:
    """Return the items of a request's input, each with a type and an id.

    stored_item: returns the stored item with an id, for references to it.

    Raises:
        APIError: the input is missing or empty, or an item is malformed, not supported, not stored, or referred to
            twice.
    """
    if given is None:
        raise APIError(400, "input is missing", param="input")
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not given:
        raise APIError(400, "input is empty", param="input")
    items = [read_item(item, f"input[{index}]") for index, item in enumerate(given)]
    references = Counter(item["id"] for item in items if item["type"] == REFERENCE)
    if references and (most := references.most_common(1)[0])[1] > 1:
        raise APIError(400, f"input: the item {quoted(most[0])} is referred to twice", param="input")
    return [referenced(item, stored_item) if item["type"] == REFERENCE else item for item in items]


def referenced(reference: JSON, stored_item: Callable[[str], JSON | None]) -> JSON:
    """Return the stored item that a reference stands for.

    Raises:
        APIError: there is none.
    """
    item = stored_item(reference["id"])
    if item is None:
        message = f"input: the item {quoted(reference['id'])} is not stored (any more): send the item itself"
        raise APIError(404, message, param="input", code="not_found")
    return item


def read_item(given: JSON, place: str) -> JSON:
    """Check an item and return it with a type and an id. place: its path in the request, for error messages.

    Raises:
        APIError: the item is malformed or not supported.
    """
    kind = given.get("type", "message" if "role" in given else None)
    needed: tuple[str, ...] = ()
    if kind == "message":
        if given.get("role") not in ROLES:
            raise APIError(400, f"{place}.role must be one of {', '.join(ROLES)}", param="input")
        if not isinstance(given.get("content"), (str, list)):
            raise APIError(400, f"{place}.content must be a string or a list of parts", param="input")
    elif kind == "reasoning":
        if not isinstance(given.get("content"), (list, type(None))):
            raise APIError(400, f"{place}.content must be a list of parts", param="input")
    elif kind == REFERENCE:
        needed = ("id",)
    elif kind == "function_call":
        needed = ("call_id", "name", "arguments")
    elif kind == "function_call_output":
        needed = ("call_id",)
        if not isinstance(given.get("output"), (str, list)):
            raise APIError(400, f"{place}.output must be a string or a list of parts", param="input")
    else:
        known = ", ".join((*PREFIXES, REFERENCE))
        raise APIError(400, f"{place}.type must be one of {known}, got {quoted(kind)}", param="input")
    for name in needed:
        if not isinstance(given.get(name), str):
            raise APIError(400, f"{place}.{name} must be a string", param="input")
    own = given.get("id")
    own = own if isinstance(own, str) and own else new_id(PREFIXES.get(kind, "item"))
    return {**given, "type": kind, "id": own}


def messages_of(instructions: str | None, items: Iterable[JSON]) -> list[JSON]:
    """Convert items to the messages of a chat.

    Calls are added to the assistant message before them; reasoning becomes `reasoning_content` of the one after.

    Raises:
        APIError: a call's output has no call before it.
    """
    messages: list[JSON] = [] if instructions is None else [{"role": "system", "content": instructions}]
    called: dict[str, str] = {}
    reasoning = ""
    for item in items:
        if item["type"] == "reasoning":
            reasoning += reasoning_of(item)
            continue
        if item["type"] == "message":
            messages.append({"role": ROLES[item["role"]], "content": content_of(item["content"])})
        elif item["type"] == "function_call":
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            called[item["call_id"]] = item["name"]
        else:
            messages.append(result_message(item, called))
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def result_message(item: JSON, called: dict[str, str]) -> JSON:
    """Return the message with a call's output. called: names of the functions called before, by call id.

    Raises:
        APIError: there was no such call.
    """
    name = called.get(item["call_id"])
    if name is None:
        message = f"there is no function_call with the call_id {quoted(item['call_id'])}"
        raise APIError(400, message, param="input")
    content = content_of(item["output"])
    return {"role": "tool", "tool_call_id": item["call_id"], "name": name, "content": content}


def reasoning_of(item: JSON) -> str:
    """Return the text of a reasoning item; "" if it has none, such as one whose text is encrypted."""
    parts = [part for part in item.get("content") or () if isinstance(part, dict)]
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def content_of(content: str | list[Any]) -> str | list[Any]:
    """Convert content to that of a chat message: refusals become text, and a single text part becomes a string."""
    if isinstance(content, str):
        return content
    parts = [
        {"type": "text", "text": part.get("refusal")}
        if isinstance(part, dict) and part.get("type") == "refusal"
        else part
        for part in content
    ]
    if len(parts) == 1 and isinstance(parts[0], dict) and isinstance(parts[0].get("text"), str):
        return str(parts[0]["text"])
    return parts


# ---------------------------------------------------------------- other fields


def tools_of(request: ResponsesRequest) -> tuple[list[JSON] | None, Any]:
    """Return `tools` and `tool_choice` in the format of chat completions.

    Raises:
        APIError: a tool is not a function.
    """
    tools: list[JSON] = []
    for index, tool in enumerate(request.tools or ()):
        if tool.get("type") != "function":
            message = f"tools[{index}]: only functions are supported, got {quoted(tool.get('type'))}"
            raise APIError(400, message, param="tools")
        fields = {name: value for name, value in tool.items() if name != "type" and value is not None}
        tools.append({"type": "function", "function": fields})
    choice: Any = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        allowed = [
            {"type": tool.get("type"), "function": {"name": tool.get("name")}}
            if isinstance(tool, dict)
            else tool
            for tool in (listed if isinstance(listed, list) else ())
        ]
        mode = choice.get("mode", "auto")
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    if choice == "auto" and not tools:
        choice = None
    return tools or None, choice


def format_of(text_format: TextFormat) -> ResponseFormat:
    """Return the format of the text as a `response_format`.

    Raises:
        APIError: the schema is missing.
    """
    if text_format.type != "json_schema":
        return ResponseFormat(text_format.type)
    if text_format.schema is None:
        raise APIError(400, "text.format needs a schema", param="text")
    return ResponseFormat("json_schema", JsonSchema(text_format.name, text_format.schema))
