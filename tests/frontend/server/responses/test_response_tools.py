"""Tools of /v1/responses of every type: the functions that the model gets, and the items that its calls become."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import begin_warnings
from pagewire.frontend.server.openai.custom_input import CustomInput
from pagewire.frontend.server.openai.protocol import FunctionCall, ToolCall
from pagewire.frontend.server.openai.reply import ReplyDelta
from pagewire.frontend.server.responses.items import item_messages, read_input
from pagewire.frontend.server.responses.tools import HOSTED, ResponseTools, ServedTool
from pagewire.frontend.server.responses.writer import ResponseWriter
from pagewire.frontend.server.serving.usage import Usage
from tests.frontend.server.parsing.test_tools_over_http import Replay, client_of, replay
from tests.frontend.server.responses.test_responses import new_response

__all__ = ["replay"]  # a fixture

LARK = 'start: "+" /[^\\n]+/ LF\n%import common.LF\n'
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
SPAWN = {
    "type": "function",
    "name": "spawn",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [SPAWN, {**PATCH, "name": "note"}],
}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [SPAWN, AGENTS, PATCH, {"type": "local_shell"}, {"type": "shell"}, SEARCH]


def writes(name: str, arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>\n"


CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    ("spawn", {"n": 1}, {"type": "function_call", "name": "spawn", "arguments": '{"n": 1}'}),
    (
        "agents.spawn",
        {"n": 2},
        {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": '{"n": 2}'},
    ),
    (
        "agents.note",
        {"input": "+b\n"},
        {"type": "custom_tool_call", "name": "note", "namespace": "agents", "input": "+b\n"},
    ),
    (
        "apply_patch",
        {"input": '+"é🦊\\\n'},
        {"type": "custom_tool_call", "name": "apply_patch", "input": '+"é🦊\\\n'},
    ),
    (
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls", "-l"], "timeout_ms": 5}},
    ),
    (
        "shell",
        {"commands": ["ls"]},
        {"type": "shell_call", "action": {"commands": ["ls"]}, "environment": {"type": "local"}},
    ),
    (
        "tool_search",
        {"query": "x"},
        {"type": "tool_search_call", "arguments": {"query": "x"}, "execution": "client"},
    ),
]


def has(item: Any, fields: Any) -> bool:
    """Whether an item has these fields, and those within them."""
    if not isinstance(fields, dict):
        return bool(item == fields)
    return all(name in item and has(item[name], value) for name, value in fields.items())


def test_calls_come_back_as_items_of_their_tools_and_go_in_again(replay: Replay) -> None:
    replay.text = "".join(writes(name, arguments) for name, arguments, _ in CALLS)
    with replay.serve(tool_call_parser="hermes") as url, client_of(url) as client:
        first = client.responses.create(model="fake", input="Work.", tools=TOOLS)
        items: list[Any] = first.model_dump()["output"]
        assert len(items) == len(CALLS)
        for item, (_, _, fields) in zip(items, CALLS, strict=True):
            assert has(item, fields), (item, fields)
            assert item["status"] == "completed" and item["call_id"].startswith("call_")
        with client.responses.stream(model="fake", input="Work.", tools=TOOLS) as stream:
            streamed: list[Any] = stream.get_final_response().model_dump()["output"]
        for item, (_, _, fields) in zip(streamed, CALLS, strict=True):
            assert has(item, fields)
        results: list[Any] = [
            {"type": "function_call_output", "call_id": items[0]["call_id"], "output": "0"},
            {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "1"},
            {"type": "custom_tool_call_output", "call_id": items[2]["call_id"], "output": "2"},
            {"type": "custom_tool_call_output", "call_id": items[3]["call_id"], "output": "3"},
            {"type": "local_shell_call_output", "id": items[4]["call_id"], "output": "4"},
            {
                "type": "shell_call_output",
                "call_id": items[5]["call_id"],
                "output": [{"stdout": "5", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
            },
            {
                "type": "tool_search_output",
                "call_id": items[6]["call_id"],
                "tools": [{**SPAWN, "name": "late"}],
            },
        ]
        replay.text = writes("late", {"n": 3})
        question = {"role": "user", "content": "Work."}
        without_ids = [{name: value for name, value in item.items() if name != "id"} for item in items]
        ways: list[Any] = [
            {"input": [question, *without_ids, *results]},
            {"input": results, "previous_response_id": first.id},
        ]
        prompts = set()
        for way in ways:
            last = client.responses.create(model="fake", tools=TOOLS, **way)
            assert last.output[0].type == "function_call" and last.output[0].name == "late"
            prompts.add(replay.prompt)
        (prompt,) = prompts
        history = json.loads(prompt[prompt.rindex('[{"role"') :].replace("<|im_end|>", ""))
        called = [
            (call["function"]["name"], call["function"]["arguments"]) for call in history[1]["tool_calls"]
        ]
        for (name, arguments), (expected, given, _) in zip(called, CALLS, strict=True):
            assert name == expected
            assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == given
        assert [message["name"] for message in history[2:]] == [name for name, _, _ in CALLS]
        assert '"late"' in prompt[: prompt.rindex('[{"role"')], "a tool that was found is there"


def test_the_grammar_of_a_custom_tool_is_a_part_of_the_constraint(replay: Replay) -> None:
    replay.text = writes("apply_patch", {"input": "+a\n"})
    with replay.serve(tool_call_parser="hermes") as url, client_of(url) as client:
        client.responses.create(model="fake", input="a", tools=[PATCH, SPAWN])  # type: ignore[list-item]
        structure = json.loads(str(replay.last.params.structured_outputs.structural_tag))
        assert json.dumps({"type": "grammar", "grammar": LARK, "json_string": True}) in json.dumps(structure)
        replay.text = '{"input": "+a\\n"}'
        chosen = client.responses.create(
            model="fake",
            input="a",
            tools=[PATCH],  # type: ignore[list-item]
            tool_choice={"type": "custom", "name": "apply_patch"},
        )
        assert chosen.output[0].type == "custom_tool_call" and chosen.output[0].input == "+a\n"
        structure = json.loads(str(replay.last.params.structured_outputs.structural_tag))
        assert LARK in json.dumps(structure).encode().decode("unicode_escape")
        assert not replay.last.params.structured_outputs.optional


def test_the_events_of_a_custom_tool(replay: Replay) -> None:
    replay.text = writes("apply_patch", {"input": '+say "é🦊"\n'})
    with replay.serve(tool_call_parser="hermes") as url, client_of(url) as client:
        stream: Any = client.responses.create(model="fake", input="a", tools=[PATCH], stream=True)  # type: ignore[call-overload]
        events = [event.model_dump() for event in stream]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == [
        "created",
        "in_progress",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    added = next(event for event in events if event["type"].endswith("output_item.added"))
    assert added["item"]["input"] == "" and added["item"]["name"] == "apply_patch"
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    (done,) = (event for event in events if event["type"].endswith("input.done"))
    assert "".join(deltas) == done["input"] == '+say "é🦊"\n'
    assert done["item_id"] == added["item"]["id"] and events[-2]["item"]["input"] == done["input"]


@given(st.text(), st.booleans(), st.data())
def test_the_text_of_a_call_in_any_cut(text: str, plain: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=not plain)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=8)))
    reader, pieces = CustomInput(), []
    for begin, end in zip([0, *cuts], [*cuts, len(arguments)], strict=True):
        pieces.append(reader.add(arguments[begin:end]))
    assert "".join(pieces) == text and reader.end() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a', "a"),
        ('{"input": "a\\', "a"),
        ('{"input": "\\ud83d"}', "\\ud83d"),
        ('{"input": "\\u12zz\\q"}', "\\u12zz\\q"),
        ("*** Begin", "*** Begin"),
        ('{"inp', '{"inp'),
        ('{"other": "a"}', '{"other": "a"}'),
        (' { "input" : "a" } ', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
        (" " * 300, " " * 300),
    ],
)
def test_what_is_no_object_with_the_text_is_the_text(arguments: str, text: str) -> None:
    for size in (1, 3, 100):
        reader = CustomInput()
        pieces = [reader.add(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join(pieces) + reader.end() == text


def test_models_may_leave_out_the_namespace() -> None:
    tools = ResponseTools([{**AGENTS, "tools": [{**SPAWN, "name": "stop"}]}, SPAWN, AGENTS])
    assert tools.called("stop").namespace == "agents"
    assert tools.called("spawn").namespace is None, "it is a function, too"
    assert tools.called("unknown").function == "unknown"
    both = ResponseTools([AGENTS, {**AGENTS, "name": "others"}])
    assert both.called("note") == ServedTool("function", "note"), "it may be either"
    assert both.called("others.note") == ServedTool("custom", "note", "others")


def test_a_call_that_is_cut_is_incomplete() -> None:
    writer = ResponseWriter(new_response(), ResponseTools(TOOLS))
    writer.read(
        ReplyDelta(tool_calls=[ToolCall(FunctionCall("local_shell", '{"comm'), 0, "call_1", "function")])
    )
    writer.end("incomplete", Usage(1, 2, 3))
    (item,) = writer.response.output
    assert item.status == "incomplete" and item.action.command == []  # type: ignore[union-attr]


# ---------------------------------------------------------------- hosted tools


def test_hosted_tools_are_left_out_with_a_warning(replay: Replay) -> None:
    replay.text = "Hello."
    hosted = [{"type": kind} for kind in sorted(HOSTED)] + [
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "tool_search"},
    ]
    with replay.serve(tool_call_parser="hermes") as url, client_of(url) as client:
        raw = client.responses.with_raw_response.create(model="fake", input="a", tools=[*hosted, SPAWN])  # type: ignore[list-item]
        assert raw.headers["warning"].startswith('299 pagewire "tools of type code_interpreter, computer')
        assert "tool_search are left out: the server has no" in raw.headers["warning"]
        assert "web_search" not in replay.prompt and '"spawn"' in replay.prompt
        raw = client.responses.with_raw_response.create(model="fake", input="a", tools=hosted)  # type: ignore[arg-type]
        assert raw.parse().output_text == "Hello."
        choices: list[Any] = [
            {"type": "web_search"},
            {"type": "image_generation"},
            {"type": "mcp", "server_label": "x"},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
        ]
        for choice in choices:
            with pytest.raises(openai.BadRequestError, match="tool_choice: the server has no"):
                client.responses.create(model="fake", input="a", tools=[*hosted, SPAWN], tool_choice=choice)  # type: ignore[list-item]
        with pytest.raises(openai.BadRequestError, match="tool_choice: the server has no"):
            client.responses.create(model="fake", input="a", tools=hosted, tool_choice="required")  # type: ignore[arg-type]
    with (
        replay.serve(tool_call_parser="hermes", strict_tools=True) as url,
        client_of(url) as client,
        pytest.raises(openai.BadRequestError, match=r"no web_search: give a function .* \(--strict-tools\)"),
    ):
        client.responses.create(model="fake", input="a", tools=[{"type": "web_search"}])


def test_allowed_tools_of_every_kind(replay: Replay) -> None:
    replay.text = '[{"name": "agents.note", "parameters": {"input": "+n\\n"}}]'
    allowed: list[Any] = [
        {"type": "custom", "name": "note", "namespace": "agents"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "shell"},
        {"type": "web_search"},
    ]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    with replay.serve(tool_call_parser="hermes") as url, client_of(url) as client:
        response = client.responses.create(
            model="fake", input="a", tools=[*TOOLS, {"type": "web_search"}], tool_choice=choice
        )
        assert response.output[0].type == "custom_tool_call" and response.output[0].namespace == "agents"
        shown = replay.prompt[: replay.prompt.rindex('[{"role"')]
        assert all(name in shown for name in ('"agents.note"', '"apply_patch"', '"shell"'))
        assert '"spawn"' not in shown and '"local_shell"' not in shown


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({**AGENTS, "tools": [SPAWN, SPAWN]}, "there are two functions named 'agents.spawn'"),
        ({"type": "apply_patch"}, r"tools\[0\].type must be one of function, custom, namespace, local_shell"),
        ({"type": "function"}, r"tools\[0\].name must be a string"),
        ({"type": "namespace", "name": "n"}, r"tools\[0\] must have a name and a list of tools"),
        ({**AGENTS, "tools": [{"type": "shell"}]}, r"tools\[0\].tools\[0\].type must be function or custom"),
        ({**PATCH, "format": {"type": "x"}}, r"tools\[0\].format.type must be text or grammar, got 'x'"),
        ({**PATCH, "format": {"type": "grammar", "syntax": "gbnf"}}, "must have the syntax lark or regex"),
    ],
)
def test_tools_that_are_malformed(tool: Any, message: str) -> None:
    with pytest.raises(APIError, match=message):
        ResponseTools([tool])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "custom_tool_call", "call_id": "1", "name": "f"}, r"input\[0\].input must be a string"),
        ({"type": "custom_tool_call_output", "call_id": "1"}, "output must be a string or a list"),
        ({"type": "local_shell_call", "call_id": "1"}, "action must be an object"),
        ({"type": "local_shell_call_output", "output": "a"}, "call_id must be a string"),
        ({"type": "shell_call_output", "call_id": "1", "output": "a"}, "output must be a list of outputs"),
        ({"type": "tool_search_output", "call_id": "1"}, "tools must be a list of tools"),
        ({"type": "additional_tools"}, "tools must be a list of tools"),
        ({"type": "compaction", "encrypted_content": "x"}, "compaction is not supported: only the server"),
        ({"type": "compaction_trigger"}, "compaction_trigger is not supported"),
        ({"type": "program"}, "type must be one of message, reasoning"),
    ],
)
def test_items_that_are_malformed(item: Any, message: str) -> None:
    with pytest.raises(APIError, match=message):
        read_input([item])


def test_items_of_hosted_tools_are_left_out_with_a_warning() -> None:
    warnings = begin_warnings("id")
    items = read_input([{"type": "web_search_call", "id": "ws_1"}, {"role": "user", "content": "a"}])
    assert item_messages(None, items) == [{"role": "user", "content": "a"}]
    assert warnings.texts == [
        "items of type web_search_call are left out: no model that is served here can read them"
    ]
    with pytest.raises(APIError, match="no items that the model could read"):
        read_input([{"type": "web_search_call", "id": "ws_1"}])


def test_tools_may_come_with_the_conversation() -> None:
    begin_warnings("id")
    items = read_input(
        [{"type": "additional_tools", "role": "developer", "tools": [AGENTS, {"type": "web_search"}]}]
        + [{"role": "user", "content": "a"}]
    )
    names = [tool["function"]["name"] for tool in ResponseTools([SPAWN], items).functions]
    assert names == ["spawn", "agents.spawn", "agents.note"]
    assert item_messages(None, items) == [{"role": "user", "content": "a"}]
