"""What the engine is asked to constrain outputs to: tools, schemas and reasoning together, as agents send them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.frontend.server.parsing.test_tools_over_http import (
    ASK,
    CLOCK,
    HERMES,
    WEATHER,
    Replay,
    calls_of,
    client_of,
    replay,
)

__all__ = ["replay"]  # a fixture

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
REQUEST: Any = {"model": "fake", "messages": ASK}
TOOLS: Any = {"tools": [WEATHER, CLOCK]}
AUTO: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


def constraint(replay: Replay) -> Any:
    """The constraint of the last request: the format of a structural tag, else the schema."""
    structure = replay.last.params.structured_outputs
    if structure.structural_tag is not None:
        return json.loads(structure.structural_tag)["format"]
    return json.loads(structure.json)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_tool_goes_before_the_response_format(replay: Replay, choice: Any) -> None:
    """Agents send both in every turn; the format is that of an answer without calls."""
    with replay.serve() as url, client_of(url) as client:
        replay.text = '{"city": "Köln"}'
        if choice == "required":
            replay.text = f'[{{"name": "get_weather", "parameters": {replay.text}}}]'
        alone = client.chat.completions.create(**REQUEST, **TOOLS, tool_choice=choice)
        expected = constraint(replay)
        both = client.chat.completions.create(**REQUEST, **TOOLS, tool_choice=choice, response_format=FORMAT)
        assert constraint(replay) == expected
        assert calls_of(both.choices[0].message) == calls_of(alone.choices[0].message)
        assert both.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json", "pythonic"])
def test_the_model_chooses_between_calls_and_the_schema(replay: Replay, parser: str) -> None:
    flags: Any = AUTO | {"tool_call_parser": parser}
    with replay.serve(**flags) as url, client_of(url) as client:
        replay.text = '{"answer": 42}'
        (choice,) = client.chat.completions.create(**REQUEST, **TOOLS, response_format=FORMAT).choices
        assert (choice.message.content, choice.message.tool_calls) == (replay.text, None)
        form = constraint(replay)
        calls, answer = form["elements"]
        assert form["type"] == "or" and answer == {"type": "json_schema", "json_schema": SCHEMA}
        assert "get_weather" in json.dumps(calls) and "clock" in json.dumps(calls)
        client.chat.completions.create(**REQUEST, response_format=FORMAT)
        assert constraint(replay) == SCHEMA
        client.chat.completions.create(**REQUEST, **TOOLS)
        assert (
            constraint(replay)["type"] == "triggered_tags" and replay.last.params.structured_outputs.optional
        )
        none = client.chat.completions.create(**REQUEST, **TOOLS, tool_choice="none", response_format=FORMAT)
        assert constraint(replay) == SCHEMA and none.choices[0].message.content == replay.text


def test_calls_instead_of_the_schema_are_calls(replay: Replay) -> None:
    with replay.serve(**AUTO) as url, client_of(url) as client:
        replay.text = HERMES[HERMES.index("<tool_call>") :]
        (choice,) = client.chat.completions.create(**REQUEST, **TOOLS, response_format=FORMAT).choices
        assert [name for name, _ in calls_of(choice.message)] == ["get_weather", "clock"]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        extra = {"guided_choice": ["yes", "no"]}
        client.chat.completions.create(**REQUEST, **TOOLS, extra_body=extra)
        words = [{"type": "const_string", "value": word} for word in ("yes", "no")]
        assert constraint(replay)["elements"][1] == {"type": "or", "elements": words}


@pytest.mark.parametrize(
    ("fields", "inner"),
    [
        ({"response_format": FORMAT}, {"type": "json_schema", "json_schema": SCHEMA}),
        (
            {"response_format": {"type": "json_object"}},
            {"type": "json_schema", "json_schema": {"type": "object"}},
        ),
        ({"extra_body": {"guided_regex": "a+"}}, {"type": "regex", "pattern": "a+"}),
        ({"extra_body": {"guided_grammar": 'start: "a"'}}, {"type": "grammar", "grammar": 'start: "a"'}),
        (
            {
                "extra_body": {
                    "structured_outputs": {
                        "structural_tag": {
                            "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
                            "triggers": ["<a"],
                        }
                    }
                }
            },
            {
                "type": "triggered_tags",
                "triggers": ["<a"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<a>",
                        "content": {"type": "json_schema", "json_schema": SCHEMA},
                        "end": "</a>",
                    }
                ],
            },
        ),
    ],
)
def test_the_constraint_begins_after_the_reasoning(replay: Replay, fields: Any, inner: Any) -> None:
    with replay.serve(reasoning_parser="deepseek_r1") as url, client_of(url) as client:
        replay.text = 'Hm.</think>\n\n{"answer": 42}'
        message: Any = client.chat.completions.create(**REQUEST, **fields).choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm.", '{"answer": 42}')
        thought, body = constraint(replay)["elements"]
        assert body == inner and thought["elements"][0] == {
            "type": "tag",
            "begin": "",
            "content": {"type": "any_text"},
            "end": "</think>",
        }


def test_reasoning_that_the_model_may_begin(replay: Replay) -> None:
    with replay.serve(reasoning_parser="qwen3") as url, client_of(url) as client:
        replay.text = '{"answer": 42}'
        message: Any = client.chat.completions.create(**REQUEST, response_format=FORMAT).choices[0].message
        assert message.content == replay.text
        thought, _ = constraint(replay)["elements"]
        assert thought["type"] == "or" and thought["elements"][1] == {"type": "const_string", "value": ""}
        assert thought["elements"][0]["elements"][0]["begin"] == "<think>"


@pytest.mark.parametrize(
    ("end", "constrained_at_once"), [("<think>\n", False), ("<think>\n\n</think>\n\n", True)]
)
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_the_prompt_may_open_or_close_the_reasoning(
    replay: Replay, parser: str, end: str, constrained_at_once: bool
) -> None:
    flags: Any = {"reasoning_parser": parser, "trust_request_chat_template": True}
    template = {"chat_template": "{{ messages | tojson }}" + end}
    with replay.serve(**flags) as url, client_of(url) as client:
        replay.text = '{"answer": 42}' if constrained_at_once else 'Hm.</think>{"answer": 42}'
        request = REQUEST | {"response_format": FORMAT, "extra_body": template}
        message: Any = client.chat.completions.create(**request).choices[0].message
        assert message.content == '{"answer": 42}'
        if constrained_at_once:
            assert constraint(replay) == SCHEMA
        else:
            assert constraint(replay)["elements"][0]["elements"][0]["begin"] == ""
            assert message.reasoning_content == "Hm."


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_calls_after_the_reasoning(replay: Replay, choice: Any) -> None:
    with replay.serve(reasoning_parser="deepseek_r1") as url, client_of(url) as client:
        arguments = '{"city": "Köln"}'
        replay.text = "Hm.</think>\n\n" + arguments
        if choice == "required":
            replay.text = f'Hm.</think>\n\n[{{"name": "get_weather", "parameters": {arguments}}}]'
        for stream in (False, True):
            request = REQUEST | TOOLS | {"tool_choice": choice, "stream": stream}
            answer: Any = client.chat.completions.create(**request)
            if stream:
                deltas = [chunk.choices[0].delta for chunk in answer]
                assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "Hm."
                calls = [call for delta in deltas for call in delta.tool_calls or ()]
                assert "".join(call.function.arguments or "" for call in calls) == arguments
            else:
                assert answer.choices[0].message.reasoning_content == "Hm."
                assert calls_of(answer.choices[0].message) == [("get_weather", arguments)]
        assert constraint(replay)["type"] == "sequence"


def test_the_constraint_may_cover_the_reasoning(replay: Replay) -> None:
    flags: Any = {"reasoning_parser": "deepseek_r1", "enable_in_reasoning": True}
    with replay.serve(**flags) as url, client_of(url) as client:
        replay.text = '{"answer": 42}'
        message: Any = client.chat.completions.create(**REQUEST, response_format=FORMAT).choices[0].message
        assert message.content == replay.text and constraint(replay) == SCHEMA
        replay.text = '{"city": "Köln"}'
        called = client.chat.completions.create(**REQUEST, **TOOLS, tool_choice=NAMED)
        assert calls_of(called.choices[0].message) == [("get_weather", replay.text)]
        replay.text = "Hm.</think>Well."
        free: Any = client.chat.completions.create(**REQUEST).choices[0].message
        assert (free.reasoning_content, free.content) == ("Hm.", "Well.")


def test_options_of_the_constraint_are_kept(replay: Replay) -> None:
    with replay.serve(reasoning_parser="qwen3") as url, client_of(url) as client:
        replay.text = "{}"
        body = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
        client.chat.completions.create(**REQUEST, extra_body=body)
        assert replay.last.params.structured_outputs.disable_any_whitespace
        body = {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}
        client.chat.completions.create(**REQUEST, extra_body=body)
        assert replay.last.params.structured_outputs.whitespace_pattern == " ?"


def test_equal_demands_are_one(replay: Replay) -> None:
    """Guidance gives its grammar under an old and a new name."""
    replay.text = "a"
    with replay.serve() as url, client_of(url) as client:
        for body in (
            {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}},
            {"guided_json": json.dumps(SCHEMA), "response_format": FORMAT},
        ):
            client.chat.completions.create(**REQUEST, extra_body=body)
            assert replay.last.params.structured_outputs.kind in ("grammar", "json")
        body = {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "b"'}}
        with pytest.raises(openai.BadRequestError, match="structured_outputs and guided_grammar contradict"):
            client.chat.completions.create(**REQUEST, extra_body=body)
