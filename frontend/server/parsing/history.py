"""Tool calls and tool results in the messages of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted


def read_history(messages: Sequence[Any]) -> list[Any]:
    """Check tool calls and results, and return the messages with the function's name added to every result.

    Some templates need that name, and OpenAI's API does not send it.

    Raises:
        ValueError: a call is malformed, or a result belongs to no earlier call.
    """
    names: dict[str, str] = {}
    return [
        check_history_message(message, f"messages[{index}]", names) for index, message in enumerate(messages)
    ]


def check_history_message(message: Any, place: str, names: dict[str, str]) -> Any:
    """Check a message and return it, with the function's name if it is a tool result.

    place: path of the message in the request, for error messages. names: function names by call id; the message's
    calls are added.

    Raises:
        ValueError: a call is malformed, or the result belongs to no earlier call.
    """
    if not isinstance(message, dict):
        return message  # `chat_prompt` raises an error
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise FieldValueError(f"{place}.tool_calls", "must be a list")
    if calls and message.get("role") != "assistant":
        raise FieldValueError(place, ": only messages of the assistant may have tool_calls")
    names.update(read_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls))
    if message.get("role") != "tool":
        return message
    given = message.get("tool_call_id")
    if not isinstance(given, str) or given not in names:
        raise FieldValueError(
            f"{place}.tool_call_id", f"must be the id of an earlier tool call, got {quoted(given)}"
        )
    return message if message.get("name") else {**message, "name": names[given]}


def read_call(call: Any, place: str) -> tuple[str, str]:
    """Check a call, and return its id and the name of its function.

    Raises:
        ValueError: the call is malformed.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise FieldValueError(place, "must be {'id': ..., 'type': 'function', 'function': {...}}")
    if not isinstance(call.get("id"), str):
        raise FieldValueError(f"{place}.id", f"must be a string, got {quoted(call.get('id'))}")
    if not isinstance(function.get("name"), str):
        raise FieldValueError(
            f"{place}.function.name", f"must be a string, got {quoted(function.get('name'))}"
        )
    if not isinstance(function.get("arguments"), (str, dict)):
        raise FieldValueError(
            f"{place}.function.arguments", f"must be JSON text, got {quoted(function.get('arguments'))}"
        )
    return call["id"], function["name"]
