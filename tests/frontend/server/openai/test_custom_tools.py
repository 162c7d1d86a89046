"""Custom tools of chat completions, with OpenAI's client: functions for the model, texts for the client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.frontend.server.parsing.test_tools_over_http import Replay, client_of, replay
from tests.frontend.server.responses.test_response_tools import LARK, writes

__all__ = ["replay"]  # a fixture

PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}},
    },
}
NOTE: dict[str, Any] = {"type": "custom", "custom": {"name": "note"}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TEXT = '+say "é🦊"\n'
ASK: list[Any] = [{"role": "user", "content": "Work."}]


def test_calls_come_back_as_they_were_asked_for(replay: Replay) -> None:
    replay.text = (
        writes("apply_patch", {"input": TEXT}) + writes("clock", {}) + writes("note", {"input": "x"})
    )
    tools: Any = [PATCH, NOTE, CLOCK]
    with replay.serve(tool_call_parser="hermes") as url, client_of(url) as client:
        whole = client.chat.completions.create(model="fake", messages=ASK, tools=tools)
        message: Any = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        patch, clock, note = (call.model_dump(exclude_none=True) for call in message.tool_calls)
        assert patch["type"] == "custom" and patch["custom"] == {"name": "apply_patch", "input": TEXT}
        assert clock["type"] == "function" and clock["function"] == {"name": "clock", "arguments": "{}"}
        assert note["custom"] == {"name": "note", "input": "x"}
        assert "function" not in patch and "index" not in patch
        structure = json.loads(str(replay.last.params.structured_outputs.structural_tag))
        assert json.dumps({"type": "grammar", "grammar": LARK, "json_string": True}) in json.dumps(structure)
        history: list[Any] = [
            *ASK,
            {"role": "assistant", "tool_calls": [patch, clock]},
            {"role": "tool", "tool_call_id": patch["id"], "content": "done"},
            {"role": "tool", "tool_call_id": clock["id"], "content": "12"},
        ]
        client.chat.completions.create(model="fake", messages=history, tools=tools)
        read = json.loads(replay.prompt[replay.prompt.rindex('[{"role"') :])
    called = [call["function"] for call in read[1]["tool_calls"]]
    assert [each["name"] for each in called] == ["apply_patch", "clock"]
    given = called[0]["arguments"]
    assert (json.loads(given) if isinstance(given, str) else given) == {"input": TEXT}
    assert [message["name"] for message in read[2:]] == ["apply_patch", "clock"]


def test_a_stream_has_the_text_in_pieces(replay: Replay) -> None:
    replay.text = "Well. " + writes("apply_patch", {"input": TEXT}) + writes("clock", {})
    with replay.serve(tool_call_parser="hermes") as url, client_of(url) as client:
        stream: Any = client.chat.completions.create(
            model="fake", messages=ASK, tools=[PATCH, CLOCK], stream=True
        )
        deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in stream]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    patches = [call for call in calls if call["index"] == 0]
    assert patches[0]["type"] == "custom" and patches[0]["custom"]["name"] == "apply_patch"
    assert "".join(call["custom"]["input"] for call in patches) == TEXT
    assert all("function" not in call for call in patches)
    assert all(call["custom"]["input"] for call in patches[1:])
    (clock,) = {call["id"] for call in calls if call["index"] == 1 and "id" in call}
    assert clock.startswith("call_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_without_json_is_the_input(replay: Replay, stream: bool) -> None:
    """What a model writes in place of an object with the text."""
    replay.text = '<tool_call>\n{"name": "note", "arguments": {"text": "x"}}\n</tool_call>'
    with replay.serve(tool_call_parser="hermes", constrain_auto_tools=False) as url, client_of(url) as client:
        answer: Any = client.chat.completions.create(model="fake", messages=ASK, tools=[NOTE], stream=stream)  # type: ignore[call-overload]
        if stream:
            parts = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
            text = "".join(call.custom["input"] for call in parts)
        else:
            text = answer.choices[0].message.tool_calls[0].custom.input
    assert json.loads(text) == {"text": "x"}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "note"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOTE]}},
        "required",
    ],
)
def test_choices(replay: Replay, choice: Any) -> None:
    named = isinstance(choice, dict) and choice["type"] == "custom"
    call = {"input": "x"} if named else [{"name": "note", "parameters": {"input": "x"}}]
    replay.text = json.dumps(call)
    with replay.serve() as url, client_of(url) as client:
        answer: Any = client.chat.completions.create(
            model="fake", messages=ASK, tools=[NOTE], tool_choice=choice
        )
    assert answer.choices[0].message.tool_calls[0].custom.input == "x"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "n", "format": {"type": "x"}}}]},
            "text or grammar",
        ),
        ({"tools": [NOTE], "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice"),
        (
            {
                "messages": [
                    *ASK,
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "n"}}],
                    },
                ]
            },
            "input must be a string",
        ),
    ],
)
def test_malformed_ones_are_refused(replay: Replay, fields: dict[str, Any], message: str) -> None:
    with (
        replay.serve() as url,
        client_of(url) as client,
        pytest.raises(openai.BadRequestError, match=message),
    ):
        client.chat.completions.create(**({"model": "fake", "messages": ASK} | fields))
