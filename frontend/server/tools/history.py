"""Calls in the messages of a request: each answer of a tool belongs to a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_history(messages: Sequence[Any]) -> None:
    """Refuse tool calls that are not complete, and answers to calls that were not made.

    Raises:
        ValueError: what is wrong, and where.
    """
    called: set[str] = set()
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue  # refused where messages are read
        place = f"messages[{index}]"
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise ValueError(f"{place}.tool_calls must be a list")
        if calls and message.get("role") != "assistant":
            raise ValueError(f"{place}: only an assistant makes tool calls")
        called.update(call_of(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls or ()))
        given = message.get("tool_call_id")
        if message.get("role") == "tool" and not (isinstance(given, str) and given in called):
            raise ValueError(
                f"{place}.tool_call_id must be the id of a tool call before it, got {given!r:.100}"
            )


def call_of(call: Any, place: str) -> str:
    """The id of a call.

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
    return str(call["id"])
