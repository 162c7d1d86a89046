"""/v1/messages as agents send it: documents, tools that Anthropic's servers run, and edits of the conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.anthropic.conversation import anthropic_messages
from pagewire.frontend.server.anthropic.protocol import MessagesRequest
from pagewire.frontend.server.http.warnings import begin_warnings
from tests.frontend.server.client import Client
from tests.frontend.server.parsing.test_tools_over_http import TEMPLATE, Replay, replay

__all__ = ["replay"]  # a fixture

PATH = "/v1/messages"
CLOCK = {"name": "clock", "description": "The time.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture
def served(replay: Replay) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.attach(replay.core.address)
    yield engine
    engine.shutdown()


def client_of(engine: AsyncLLM, **options: Any) -> Client:
    return Client(engine, chat_template=TEMPLATE, tool_call_parser="hermes", **options)


def history(replay: Replay) -> Any:
    """The messages in the last prompt."""
    return json.loads(replay.prompt[replay.prompt.rindex('[{"role"') :].replace("<|im_end|>", ""))


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_documents_of_text_are_text() -> None:
    begin_warnings("id")
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D1"}},
        {"type": "document", "source": {"type": "content", "content": "D2"}, "title": "T", "context": "C"},
        {"type": "document", "source": {"type": "content", "content": [text("D3")]}, "citations": {}},
        {"type": "search_result", "source": "s", "title": "t", "content": [text("a"), text("b")]},
    ]
    (message,) = anthropic_messages(
        MessagesRequest(max_tokens=1, messages=[{"role": "user", "content": blocks}])
    )
    assert [part["text"] for part in message["content"]] == ["D1", "T\nC", "D2", "D3", "t\ns\n\na\nb"]


def test_messages_of_the_system_come_late_as_reminders_of_the_user() -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": [text("late")]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    messages = anthropic_messages(MessagesRequest(max_tokens=1, system="first", messages=turns))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[1]["content"][1]["text"] == "<system-reminder>\nlate\n</system-reminder>"


def test_tools_that_anthropic_s_servers_run(replay: Replay, served: AsyncLLM) -> None:
    replay.text = CALL
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        CLOCK | {"defer_loading": True},
    ]
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "Hello."}], "tools": tools}
    client = client_of(served)
    answer = client.post(PATH, body)
    assert answer.status == 200, answer.body
    warning = answer.headers["warning"]
    assert "web_search_20250305, tool_search_tool_regex_20251119, mcp_toolset are left out" in warning
    assert "defer_loading" not in warning
    (call,) = answer.json["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "bash", {"command": "ls"})
    shown = replay.prompt[: replay.prompt.rindex('[{"role"')]
    assert all(name in shown for name in ('"bash"', '"str_replace_based_edit_tool"', '"clock"'))
    assert "web_search" not in shown
    for choice, of in (({"type": "tool", "name": "web_search"}, tools), ({"type": "any"}, tools[:3])):
        refused = client.post(PATH, body | {"tools": of, "tool_choice": choice})
        assert refused.status == 400
        assert refused.json["error"]["message"].startswith(
            "tool_choice: the server has no web_search_20250305"
        )
    strict = client_of(served, strict_tools=True).post(PATH, body)
    assert strict.status == 400 and "(--strict-tools)" in strict.json["error"]["message"]


def test_blocks_of_these_tools_are_left_out() -> None:
    warnings = begin_warnings("id")
    turns = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "1", "content": []},
                text("b"),
                {"type": "tool_use", "id": "2", "name": "find", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "content": [{"type": "tool_reference", "tool_name": "clock"}],
                }
            ],
        },
    ]
    messages = anthropic_messages(MessagesRequest(max_tokens=1, messages=turns))
    assert messages[1]["content"] == "b" and messages[2]["content"] == "The tool clock can be called."
    assert [warning.partition(" are")[0] for warning in warnings.texts] == [
        "blocks of type server_tool_use",
        "blocks of type web_search_tool_result",
    ]


def conversation(num_uses: int) -> list[Any]:
    """Turns in which tools were used, each with a long result."""
    turns: list[Any] = [{"role": "user", "content": "Go."}]
    for number in range(num_uses):
        name = "note" if number == 0 else "clock"
        use = {"type": "tool_use", "id": str(number), "name": name, "input": {"n": number}}
        thought = {"type": "thinking", "thinking": f"t{number}", "signature": "any"}
        result = {"type": "tool_result", "tool_use_id": str(number), "content": f"result {number} " * 30}
        turns += [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]
    return turns


@pytest.mark.parametrize("streams", [False, True])
def test_old_results_of_tools_are_cleared(replay: Replay, served: AsyncLLM, streams: bool) -> None:
    replay.text = "Done."
    client = client_of(served)
    edit: dict[str, Any] = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 500},
        "keep": {"type": "tool_uses", "value": 2},
        "exclude_tools": ["note"],
        "clear_tool_inputs": True,
    }
    body = {"max_tokens": 50, "messages": conversation(5), "tools": [CLOCK], "stream": streams}
    edited = body | {"context_management": {"edits": [edit]}}
    answer = client.post(PATH, edited)
    results = [message for message in history(replay) if message["role"] == "tool"]
    assert [message["content"].startswith("result") for message in results] == [
        True,
        False,
        False,
        True,
        True,
    ]
    inputs = [message["tool_calls"][0]["function"]["arguments"] for message in history(replay)[1::2]]
    assert [inputs[1], inputs[2], inputs[3]] == [{}, {}, {"n": 3}]
    if streams:
        events = [
            json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: ")
        ]
        (end,) = (event for event in events if event["type"] == "message_delta")
        applied = end["context_management"]["applied_edits"]
    else:
        applied = answer.json["context_management"]["applied_edits"]
    (one,) = applied
    assert (one["type"], one["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 2)
    counting = {name: edited[name] for name in ("messages", "tools", "context_management")}
    counted = client.post(PATH + "/count_tokens", counting).json
    original = counted["context_management"]["original_input_tokens"]
    assert counted["input_tokens"] + one["cleared_input_tokens"] == original > 500
    assert counted["input_tokens"] == len(replay.last.prompt.token_ids)
    for kept in (
        {"trigger": {"type": "input_tokens", "value": 10**6}},
        {"trigger": {"type": "tool_uses", "value": 5}},
        {"clear_at_least": {"type": "input_tokens", "value": 10**6}},
        {"keep": {"type": "tool_uses", "value": 9}},
    ):
        client.post(PATH, body | {"context_management": {"edits": [edit | kept]}})
        assert "cleared" not in replay.prompt, kept


def test_old_reasoning_is_left_out(replay: Replay, served: AsyncLLM) -> None:
    replay.text = "Done."
    client = client_of(served, reasoning_parser="qwen3")
    for keep, left in (("all", 3), ({"type": "thinking_turns", "value": 1}, 1), ({"type": "all"}, 3)):
        edits = [{"type": "clear_thinking_20251015", "keep": keep}]
        body = {"max_tokens": 50, "messages": conversation(3), "tools": [CLOCK]}
        answer = client.post(PATH, body | {"context_management": {"edits": edits}})
        assert sum("reasoning_content" in message for message in history(replay)) == left
        applied = answer.json["context_management"]["applied_edits"]
        assert [edit["cleared_thinking_turns"] for edit in applied] == ([] if left == 3 else [2])


def test_other_edits_are_refused_by_name(served: AsyncLLM) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    for path in (PATH, PATH + "/count_tokens"):
        edits = {"edits": [{"type": "compact_20260112"}]}
        answer = client_of(served).post(path, body | {"context_management": edits})
        message = answer.json["error"]["message"]
        assert answer.status == 400 and "Invalid value 'compact_20260112'" in message
        assert "edits are clear_tool_uses_20250919, clear_thinking_20251015" in message


def test_what_is_counted_is_what_the_same_request_uses(replay: Replay, served: AsyncLLM) -> None:
    replay.text = "Done."
    client = client_of(served, reasoning_parser="qwen3")
    turns = conversation(2)
    turns[0] = {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "D"}}]}
    turns += [{"role": "system", "content": "Be brief."}]
    fields = {
        "messages": turns,
        "system": [text("s") | {"cache_control": {"type": "ephemeral"}}],
        "tools": [CLOCK, {"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305"}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    counted = client.post(PATH + "/count_tokens", fields).json["input_tokens"]
    usage = client.post(PATH, fields | {"max_tokens": 5}).json["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] > 0
