"""Calls in the messages of a request, and the answers of tools, each of which belongs to a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def read_history(messages: Sequence[Any]) -> list[Any]:
    """The messages, with the answers of tools named as the functions that were called: some templates want it, and
    OpenAI's API does not give it.

    Raises:
        ValueError: calls that are not complete, or answers to calls that were not made.
    """
    names: dict[str, str] = {}
    return [read_message(message, f"messages[{index}]", names) for index, message in enumerate(messages)]


def read_message(message: Any, place: str, names: dict[str, str]) -> Any:
    """A message; the ids of its calls are added to `names`. `place`: what errors call it.

    Raises:
        ValueError: what is wrong with its calls, or that it answers none.
    """
    if not isinstance(message, dict):
        return message  # refused where messages are read
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"{place}.tool_calls must be a list")
    if calls and message.get("role") != "assistant":
        raise ValueError(f"{place}: only an assistant makes tool calls")
    names.update(read_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls))
    if message.get("role") != "tool":
        return message
    given = message.get("tool_call_id")
    if not isinstance(given, str) or given not in names:
        raise ValueError(f"{place}.tool_call_id must be the id of a tool call before it, got {given!r:.100}")
    return message if message.get("name") else {**message, "name": names[given]}


def read_call(call: Any, place: str) -> tuple[str, str]:
    """The id of a call, and its function.

    Raises:
        ValueError: what is wrong with it.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ValueError(f"{place} must be {{'id': ..., 'type': 'function', 'function': {{...}}}}")
    if not isinstance(call.get("id"), str):
        raise ValueError(f"{place}.id must be a string, got {call.get('id')!r:.100}")
    if not isinstance(function.get("name"), str):
        raise ValueError(f"{place}.function.name must be a string, got {function.get('name')!r:.100}")
    if not isinstance(function.get("arguments"), (str, dict)):
        raise ValueError(
            f"{place}.function.arguments must be JSON text, got {function.get('arguments')!r:.100}"
        )
    return call["id"], function["name"]
