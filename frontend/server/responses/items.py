"""Conversion of a request to /v1/responses, with its items, to a request for a chat completion."""

from __future__ import annotations

import base64
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.frontend.server.openai.protocol import ChatRequest, JsonSchema, ResponseFormat
from pagewire.frontend.server.openai.reminders import has_conversation_begun, reminder
from pagewire.frontend.server.responses.protocol import ResponsesRequest, TextFormat
from pagewire.frontend.server.responses.tools import WITH_TOOLS, ResponseTools
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
    "prompt_cache_key",
    "prompt_cache_retention",
    "session_id",
    "chat_template_kwargs",
    "parallel_tool_calls",
)
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
REFERENCE = "item_reference"  # an item that stands for a stored one with its id
PREFIXES = {  # of the ids of items, by type
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
}
NEEDED = {  # fields that are strings
    REFERENCE: ("id",),
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
# What tools on OpenAI's servers did. It is nothing that the model could read.
HOSTED_ITEMS = frozenset(
    {
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    }
)
ONLY_OPENAI = {
    "compaction": "only the server that wrote it can read it: send the items, or a summary as a message",
    "compaction_trigger": "the server summarises no conversations: ask the model for a summary in a message",
}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
OWN_FORM = "pagewire."  # begins encrypted_content of this server, which is base64
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        ENCRYPTED,
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
UNSUPPORTED = ("prompt", "context_management", "moderation")
MAX_PAIRS, MAX_KEY, MAX_VALUE = (
    16,
    64,
    512,
)  # limits of `metadata` in OpenAI's API: pairs, and characters of each

JSON = dict[str, Any]


def new_id(prefix: str) -> str:
    """Return a random id, which cannot be guessed."""
    return f"{prefix}_{uuid.uuid4().hex}"


def check_responses_request(request: ResponsesRequest) -> None:
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
    if request.conversation is not None and request.previous_response_id is not None:
        raise APIError(400, "give conversation or previous_response_id, not both", param="conversation")
    check_metadata(request.metadata)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Check the limits of what a client notes with a response or a conversation.

    Raises:
        APIError: there is too much.
    """
    given = metadata or {}
    if len(given) > MAX_PAIRS or any(
        len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in given.items()
    ):
        message = f"metadata: at most {MAX_PAIRS} pairs of {MAX_KEY} and {MAX_VALUE} characters"
        raise APIError(400, message, param="metadata")


def chat_of_responses(request: ResponsesRequest, items: Sequence[JSON], tools: ResponseTools) -> ChatRequest:
    """Convert a request to one for a chat completion.

    items: all items from the conversation's beginning. tools: of the request and of these.

    Raises:
        APIError: an item, tool or field that is not supported.
    """
    wants_logprobs = LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    text, reasoning = request.text, request.reasoning
    return ChatRequest(
        messages=item_messages(request.instructions, items),
        stream=request.stream or request.background,  # a background response can be read while it grows
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=request.top_logprobs,
        tools=tools.functions or None,
        tool_choice=tools.choice(request.tool_choice),
        reasoning_effort=None if reasoning is None else reasoning.effort,
        verbosity=None if text is None else text.verbosity,
        response_format=None if text is None or text.format is None else text_format(text.format),
        **{name: getattr(request, name) for name in SAME_NAME},
    )


# ---------------------------------------------------------------- items


def read_input(
    given: str | Sequence[JSON] | None,
    stored_item: Callable[[str], JSON | None] = lambda name: None,
    *,
    may_be_empty: bool = False,
) -> list[JSON]:
    """Return the items of a request's input, each with a type and an id.

    stored_item: returns the stored item with an id, for references to it.
    may_be_empty: a list without items is read.

    Raises:
        APIError: the input is missing or empty, or an item is malformed, not supported, not stored, or referred to
            twice.
    """
    if given is None:
        raise APIError(400, "input is missing", param="input")
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not given and not may_be_empty:
        raise APIError(400, "input is empty", param="input")
    items = [
        read_item(item, f"input[{index}]")
        for index, item in enumerate(given)
        if not is_left_out(item.get("type"))
    ]
    if given and not items:
        raise APIError(400, "input has no items that the model could read", param="input")
    references = Counter(item["id"] for item in items if item["type"] == REFERENCE)
    if references and (most := references.most_common(1)[0])[1] > 1:
        raise APIError(400, f"input: the item {quoted(most[0])} is referred to twice", param="input")
    return [find_referenced(item, stored_item) if item["type"] == REFERENCE else item for item in items]


def find_referenced(reference: JSON, stored_item: Callable[[str], JSON | None]) -> JSON:
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
    if kind == "message":
        if given.get("role") not in ROLES:
            raise APIError(400, f"{place}.role must be one of {', '.join(ROLES)}", param="input")
        if not isinstance(given.get("content"), (str, list)):
            raise APIError(400, f"{place}.content must be a string or a list of parts", param="input")
    elif kind == "reasoning":
        if not isinstance(given.get("content"), (list, type(None))):
            raise APIError(400, f"{place}.content must be a list of parts", param="input")
    elif kind in ONLY_OPENAI:
        raise APIError(400, f"{place}: {kind} is not supported: {ONLY_OPENAI[kind]}", param="input")
    elif kind not in PREFIXES and kind != REFERENCE:
        known = ", ".join((*PREFIXES, REFERENCE))
        raise APIError(400, f"{place}.type must be one of {known}, got {quoted(kind)}", param="input")
    elif kind != REFERENCE:
        check_call_item(given, kind, place)
    for name in NEEDED.get(kind, ()):
        if not isinstance(given.get(name), str):
            raise APIError(400, f"{place}.{name} must be a string", param="input")
    own = given.get("id")
    own = own if isinstance(own, str) and own else new_id(PREFIXES.get(kind, "item"))
    return {**given, "type": kind, "id": own}


def check_call_item(item: JSON, kind: str, place: str) -> None:
    """Check the fields of a call, an output, or an item with tools.

    Raises:
        APIError: one is malformed.
    """
    fields: list[tuple[str, type | tuple[type, ...], str]] = []
    if kind in OUTPUTS:
        fields.append(("output", (str, list), "a string or a list of parts"))
    elif kind in WITH_TOOLS:
        fields.append(("tools", list, "a list of tools"))
    elif kind in ("local_shell_call", "shell_call"):
        fields.append(("action", dict, "an object"))
    elif kind == "local_shell_call_output":
        fields.append(("output", str, "a string"))
    elif kind == "shell_call_output":
        fields.append(("output", list, "a list of outputs"))
    if kind not in ("additional_tools", *NEEDED):
        fields.append(("call_id", str, "a string"))
    for name, types, what in fields:
        value = item.get(name)
        if name == "call_id" and kind == "local_shell_call_output":
            value = call_of(item)
        if not isinstance(value, types):
            raise APIError(400, f"{place}.{name} must be {what}", param="input")


def call_of(item: JSON) -> Any:
    """Return the id of the call that an output is of, which one of a local shell may have as its own."""
    return item.get("call_id") or item.get("id")


def is_left_out(kind: Any) -> bool:
    """Return True, with a warning, for an item of a tool on OpenAI's servers."""
    if not isinstance(kind, str) or kind not in HOSTED_ITEMS:
        return False
    warn_client(f"items of type {kind} are left out: no model that is served here can read them")
    return True


def item_messages(instructions: str | None, items: Iterable[JSON]) -> list[JSON]:
    """Convert items to the messages of a chat.

    Calls are added to the assistant message before them; reasoning becomes `reasoning_content` of the one after.
    Messages of the user, or the system, that follow each other are one: many templates want turns to alternate.
    Those of the system are the user's after others; see `openai.reminders`.

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
        if item["type"] == "additional_tools":
            continue
        if item["type"] == "message":
            role, content = ROLES[item["role"]], content_of(item["content"])
            if role == "system" and has_conversation_begun(messages):
                role, content = "user", reminder(content_as_parts(content))
            add_message(messages, role, content)
        elif item["type"] in ARGUMENTS:
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            name = item_name(item)
            function = {"name": name, "arguments": ARGUMENTS[item["type"]](item)}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            called[item["call_id"]] = name
        else:
            messages.append(result_message(item, called))
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def add_message(messages: list[JSON], role: str, content: str | list[Any]) -> None:
    """Add a message, or its content to the last one."""
    last = messages[-1] if messages else None
    if last is None or role == "assistant" or last["role"] != role:
        messages.append({"role": role, "content": content})
    else:
        if isinstance(last["content"], str):
            last["content"] = content_as_parts(last["content"])
        last["content"].extend(content_as_parts(content))


def content_as_parts(content: str | list[Any]) -> list[Any]:
    """Return content as parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def item_name(call: JSON) -> str:
    """Return the name of the function that an item calls."""
    if call["type"] not in NEEDED:
        return str(call["type"]).removesuffix("_call")
    namespace = call.get("namespace")
    return f"{namespace}.{call['name']}" if isinstance(namespace, str) and namespace else str(call["name"])


# The arguments of the function that an item calls, by the item's type.
ARGUMENTS: dict[str, Callable[[JSON], str]] = {
    "function_call": lambda item: str(item["arguments"]),
    "custom_tool_call": lambda item: write_json({"input": item["input"]}),
    "local_shell_call": lambda item: write_json(given_fields(item["action"])),
    "shell_call": lambda item: write_json(given_fields(item["action"])),
    "tool_search_call": lambda item: (
        arguments if isinstance(arguments := item.get("arguments"), str) else write_json(arguments or {})
    ),
}


def write_json(data: Any) -> str:
    """Return data as JSON text."""
    return msgspec.json.encode(data).decode()


def given_fields(action: JSON) -> JSON:
    """Return the fields of an action that say something."""
    return {name: value for name, value in action.items() if name != "type" and value not in (None, {})}


def result_message(item: JSON, called: dict[str, str]) -> JSON:
    """Return the message with a call's output. called: names of the functions called before, by call id.

    Raises:
        APIError: there was no such call.
    """
    call_id = call_of(item)
    name = called.get(call_id)
    if name is None:
        message = f"there is no function_call with the call_id {quoted(call_id)}"
        raise APIError(400, message, param="input")
    if item["type"] == "tool_search_output":
        content: str | list[Any] = write_json({"found": item["tools"]})
    elif item["type"] == "shell_call_output":
        content = write_json(item["output"])
    else:
        content = content_of(item["output"])
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def reasoning_of(item: JSON) -> str:
    """Return the text of a reasoning item; "" if it has none, such as one that another server has encrypted."""
    parts = [part for part in item.get("content") or () if isinstance(part, dict)]
    text = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    hidden = item.get("encrypted_content")
    if text or not isinstance(hidden, str) or not hidden:
        return text
    try:
        if hidden.startswith(OWN_FORM):
            return base64.b64decode(hidden.removeprefix(OWN_FORM), validate=True).decode()
    except ValueError:
        pass
    warn_client("encrypted_content of reasoning is left out: only the server that wrote it can read it")
    return ""


def encode_reasoning(reasoning: str) -> str:
    """Return reasoning as clients keep it that send back no text of it; `reasoning_of` reads it."""
    return OWN_FORM + base64.b64encode(reasoning.encode()).decode()


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


def text_format(text_format: TextFormat) -> ResponseFormat:
    """Return the format of the text as a `response_format`.

    Raises:
        APIError: the schema is missing.
    """
    if text_format.type != "json_schema":
        return ResponseFormat(text_format.type)
    if text_format.schema is None:
        raise APIError(400, "text.format needs a schema", param="text")
    return ResponseFormat("json_schema", JsonSchema(text_format.name, text_format.schema))
