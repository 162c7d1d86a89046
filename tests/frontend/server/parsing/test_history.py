"""Tool calls and their results in conversations."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.frontend.server.parsing.history import read_history

USER = {"role": "user", "content": "?"}


def called(**changes: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def answer(**changes: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": "4", **changes}


def test_a_result_has_the_name_of_its_function() -> None:
    again = called(id="2", function={"name": "g", "arguments": {}})
    messages = [USER, called(), answer(), again, answer(tool_call_id="2", name="mine"), answer(name=None)]
    read = read_history(messages)
    assert [message.get("name") for message in read] == [None, None, "f", None, "mine", "f"]
    assert [{**message, "name": 0} for message in read] == [{**message, "name": 0} for message in messages]
    assert read_history([USER, "not a message", None]) == [USER, "not a message", None]
    assert read_history([{"role": "assistant", "content": "x", "tool_calls": None}])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([answer()], r"messages\[0\].tool_call_id must be the id of an earlier tool call, got '1'"),
        ([called(), answer(tool_call_id="2")], r"messages\[1\].tool_call_id"),
        ([answer(), called()], r"messages\[0\].tool_call_id"),
        ([called(), answer(tool_call_id=None)], "got None"),
        ([called(), answer(tool_call_id=["1"])], r"got \['1'\]"),
        ([{**called(), "role": "user"}], r"messages\[0\]: only messages of the assistant"),
        ([{**called(), "tool_calls": 3}], r"messages\[0\].tool_calls must be a list"),
        ([{**called(), "tool_calls": [3]}], r"messages\[0\].tool_calls\[0\] must be \{"),
        ([called(type="custom")], r"tool_calls\[0\] must be"),
        ([called(function=None)], r"tool_calls\[0\] must be"),
        ([called(id=1)], r"tool_calls\[0\].id must be a string, got 1"),
        ([called(function={"name": 1, "arguments": ""})], r"function.name must be a string"),
        ([called(function={"name": "f"})], r"function.arguments must be JSON text, got None"),
    ],
)
def test_refused_messages(messages: list[Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read_history(messages)
