"""Tools over HTTP: a core replays the text of a model, and OpenAI's client reads the responses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import pagewire.demo
from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.wiring import create_app
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.wire.messages import EngineInfo, Request
from tests.frontend.conftest import FakeCore
from tests.frontend.logprob_rows import rows
from tests.serving import serving

DEMO = Path(pagewire.demo.__file__).parent
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK: list[Any] = [{"role": "user", "content": "Weather in Köln?"}]
HERMES = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 🦊"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
MISTRAL = (
    'Let me see. [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln 🦊"}}, {"name": "clock"}]'
)
LLAMA = (
    'Let me see.\n{"name": "get_weather", "parameters": {"city": "Köln 🦊"}}; '
    '{"name": "clock", "parameters": {}}'
)
PYTHONIC = "Let me see.\n[get_weather(city='Köln 🦊'), clock()]"


class Replay:
    """A core that answers every request with `text`, and servers on it."""

    def __init__(self, core: FakeCore, tokenizer: Tokenizer) -> None:
        self.core, self.tokenizer = core, tokenizer
        self.text = ""
        core.auto, core.reason = True, "stop"
        core.answer = lambda request, index: tokenizer.encode(self.text, add_special_tokens=False)

    @contextmanager
    def serve(self, template: str = TEMPLATE, **options: Any) -> Iterator[str]:
        """Return the URL of a server on the core, which runs in a thread."""
        with serving(self.core.address, ServerOptions(port=0, chat_template=template, **options)) as url:
            yield url + "/v1"

    @property
    def last(self) -> Any:
        """The last request that the core received."""
        return self.core.submitted[max(self.core.submitted)]

    @property
    def prompt(self) -> str:
        """The prompt of the last request."""
        return self.tokenizer.decode(self.last.prompt.token_ids)


@pytest.fixture
def replay(new_core: Callable[..., FakeCore], engine_info: EngineInfo) -> Replay:
    tokenizer = load_tokenizer(DEMO)
    core = new_core()
    core.info = msgspec.structs.replace(
        engine_info, tokenizer=str(DEMO), model_path=str(DEMO), vocab_size=4096
    )
    return Replay(core, tokenizer)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="x", max_retries=0)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def gathered(chunks: Any) -> tuple[str, list[list[str]], list[str], set[str | None]]:
    """Join a stream: content, [id, name, arguments] of calls, pieces of arguments, finish reasons."""
    content, calls, pieces, reasons = "", [], [], set()
    for chunk in chunks:
        (choice,) = chunk.choices
        reasons.add(choice.finish_reason)
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert call.type == "function"
                calls.append([call.id, call.function.name, ""])
            if call.function.arguments:
                calls[call.index][2] += call.function.arguments
                pieces.append(call.function.arguments)
    return content, calls, pieces, reasons - {None}


def test_calls_have_the_log_probability_of_every_token(replay: Replay) -> None:
    """Also of those that no part of the message shows; in a stream each stands once."""
    replay.text = HERMES
    ids = replay.tokenizer.encode(HERMES, add_special_tokens=False)
    token_ids = itertools.cycle(ids)
    replay.core.logprobs = lambda request: rows([[next(token_ids), 6]], [[-1.5, -2.0]], [1])
    request: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER, CLOCK]}
    request |= {"logprobs": True, "top_logprobs": 1}
    with (
        replay.serve(enable_auto_tool_choice=True, tool_call_parser="hermes") as url,
        client_of(url) as client,
    ):
        (choice,) = client.chat.completions.create(**request).choices
        assert choice.finish_reason == "tool_calls" and len(calls_of(choice.message)) == 2
        assert choice.logprobs is not None and choice.logprobs.content is not None
        whole = choice.logprobs.content
        assert [token.logprob for token in whole] == [-1.5] * len(ids)
        streamed: list[Any] = []
        for chunk in client.chat.completions.create(**request, stream=True):
            (part,) = chunk.choices
            streamed += part.logprobs.content if part.logprobs is not None else []
        assert streamed == whole


def test_effort_none_turns_thoughts_off(replay: Replay) -> None:
    template = "{{ 'silent' if enable_thinking is false else 'aloud' }} {{ reasoning_effort }}"
    request: Any = {"model": "fake", "messages": ASK}
    with replay.serve(template) as url, client_of(url) as client:
        replay.text = "Yes."
        for effort, prompt in (("none", "silent none"), ("low", "aloud low")):
            client.chat.completions.create(**request, reasoning_effort=effort)
            assert replay.prompt == prompt


@pytest.mark.parametrize(
    ("parser", "text"),
    [("hermes", HERMES), ("mistral", MISTRAL), ("llama3_json", LLAMA), ("pythonic", PYTHONIC)],
)
def test_the_model_chooses(replay: Replay, parser: str, text: str) -> None:
    request: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER, CLOCK]}
    with replay.serve(enable_auto_tool_choice=True, tool_call_parser=parser) as url, client_of(url) as client:
        replay.text = text
        (choice,) = client.chat.completions.create(**request).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        (weather, clock) = calls_of(choice.message)
        assert (weather[0], json.loads(weather[1])) == ("get_weather", {"city": "Köln 🦊"})
        assert clock == ("clock", "{}")
        assert "get_weather" in replay.prompt and "Köln" in replay.prompt
        assert replay.last.params.skip_special_tokens == (parser != "mistral")

        content, calls, pieces, reasons = gathered(client.chat.completions.create(**request, stream=True))
        assert (content, reasons) == ("Let me see.", {"tool_calls"})
        assert [tuple(call[1:]) for call in calls] == [weather, clock]
        assert len({call[0] for call in calls}) == 2
        assert len(pieces) >= 2  # how many depends on how fast they are read

        single = client.chat.completions.create(**request, parallel_tool_calls=False)
        assert calls_of(single.choices[0].message) == [weather]

        replay.text = "It rains. "
        (choice,) = client.chat.completions.create(**request).choices
        assert (choice.message.content, choice.finish_reason) == ("It rains. ", "stop")
        assert choice.message.tool_calls is None
        content, calls, _, reasons = gathered(client.chat.completions.create(**request, stream=True))
        assert (content, calls, reasons) == ("It rains. ", [], {"stop"})

        replay.text = text[: text.index("ln") + 1]
        replay.core.reason = "length"
        (choice,) = client.chat.completions.create(**request).choices
        assert choice.finish_reason == "length"


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


@pytest.mark.parametrize("template", [PLAIN, TEMPLATE])
def test_a_model_of_no_known_dialect_takes_tools(replay: Replay, template: str) -> None:
    """Without any flag, over every API: whether its template shows tools in some way of its own, or none."""
    call = '{"name": "get_weather", "arguments": {"city": "Köln 🦊"}}'
    replay.text = f"So.\n<tool_call>\n{call}\n</tool_call>" if template is PLAIN else f"So.\n{call}"
    arguments = {"city": "Köln 🦊"}
    function: dict[str, Any] = WEATHER["function"]  # type: ignore[assignment]
    messages_tool = {
        "name": "get_weather",
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    with replay.serve(template) as url, client_of(url) as client:
        request: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER]}
        for stream in (False, True):
            if stream:
                content, calls, _, _ = gathered(client.chat.completions.create(**request, stream=True))
                calls = [call[1:] for call in calls]  # type: ignore[misc]
            else:
                message = client.chat.completions.create(**request).choices[0].message
                content, calls = message.content or "", [list(each) for each in calls_of(message)]
            assert (content, [(name, json.loads(text)) for name, text in calls]) == (
                "So.",
                [("get_weather", arguments)],
            )
        assert "The weather of a city." in replay.prompt and replay.last.params.structured_outputs is not None
        tool: Any = {"type": "function", **function}
        response = client.responses.create(model="fake", input="?", tools=[tool])
        found = [item for item in response.output if item.type == "function_call"]
        assert [(item.name, json.loads(item.arguments)) for item in found] == [("get_weather", arguments)]
        asked = {"model": "fake", "max_tokens": 99, "messages": ASK, "tools": [messages_tool]}
        answer: Any = client.post("/messages", body=asked, cast_to=object)
        assert [block["input"] for block in answer["content"] if block["type"] == "tool_use"] == [arguments]
        (model,) = client.models.list().data
        assert model.tool_call_parser == ("prompted" if template is PLAIN else "json")  # type: ignore[attr-defined]


def test_calls_in_the_prompt_of_a_template_that_shows_none(replay: Replay) -> None:
    called = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    history: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    replay.text = "Fine."
    with replay.serve(PLAIN) as url, client_of(url) as client:
        client.chat.completions.create(model="fake", messages=history, tools=[CLOCK], tool_choice="none")  # type: ignore[list-item]
        assert replay.prompt == (
            "[user]Weather in Köln?\n"
            '[assistant]<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
            '[user]<tool_response name="clock">\nnoon\n</tool_response>\n[assistant]'
        )


def test_a_function_or_any_call_is_required(replay: Replay) -> None:
    request: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER, CLOCK]}
    named = {"type": "function", "function": {"name": "get_weather"}}
    with replay.serve() as url, client_of(url) as client:
        replay.text = '{"city": "Köln"}'
        (choice,) = client.chat.completions.create(**request, tool_choice=named).choices
        assert calls_of(choice.message) == [("get_weather", '{"city": "Köln"}')]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        schema = json.loads(replay.last.params.structured_outputs.json)
        assert schema == WEATHER["function"]["parameters"] | {"additionalProperties": False}  # type: ignore[index]
        stream = client.chat.completions.create(**request, tool_choice=named, stream=True)
        content, calls, pieces, reasons = gathered(stream)
        assert (content, calls[0][1:], reasons) == ("", ["get_weather", replay.text], {"tool_calls"})
        assert "".join(pieces) == replay.text

        replay.text = (
            '[{"name": "clock", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Köln"}}]'
        )
        (choice,) = client.chat.completions.create(**request, tool_choice="required").choices
        assert calls_of(choice.message) == [("clock", "{}"), ("get_weather", '{"city": "Köln"}')]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        stream = client.chat.completions.create(**request, tool_choice="required", stream=True)
        content, calls, _, reasons = gathered(stream)
        assert (content, reasons) == ("", {"tool_calls"})
        assert [call[1:] for call in calls] == [["clock", "{}"], ["get_weather", '{"city": "Köln"}']]


def test_a_call_that_comes_at_once_with_its_end(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow server gets several tokens in a delta; OpenAI's client wants the reason in an event of its own."""

    def at_once(requests: list[Request]) -> None:
        for request in requests:
            replay.core.tokens(request.key, replay.core.answer(request, 0), finish_reason="stop")

    monkeypatch.setattr(replay.core, "_generate", at_once)
    request: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER], "tool_choice": "required"}
    with replay.serve() as url, client_of(url) as client:
        replay.text = '[{"name": "get_weather", "parameters": {"city": "Köln"}}]'
        with client.chat.completions.stream(**request) as events:
            done = [event.arguments for event in events if event.type == "tool_calls.function.arguments.done"]
        assert done == ['{"city": "Köln"}']


def test_some_of_the_tools_are_allowed(replay: Replay) -> None:
    replay.text = '[{"name": "clock", "parameters": {}}]'
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    with replay.serve(tool_call_parser="mistral") as url, client_of(url) as client:
        message = (
            client.chat.completions.create(
                model="fake",
                messages=ASK,
                tools=[WEATHER, CLOCK],
                tool_choice=choice,  # type: ignore[list-item]
            )
            .choices[0]
            .message
        )
        assert calls_of(message) == [("clock", "{}")]
        assert message.tool_calls and len(message.tool_calls[0].id) == 9  # as the model's template wants it
        schema = json.loads(replay.last.params.structured_outputs.json)
        assert list(schema["$defs"]) == ["clock"] and "get_weather" not in replay.prompt


def test_a_template_of_the_server_that_cannot_be_used(replay: Replay) -> None:
    engine = AsyncLLM.attach(replay.core.address)
    try:
        for template, message in (("nowhere.jinja", "neither a template"), ("{% if %}", "not valid")):
            with pytest.raises(ValueError, match=message):
                create_app(engine, ServerOptions(chat_template=template))
    finally:
        engine.shutdown()


def test_no_tools(replay: Replay) -> None:
    replay.text = HERMES
    request: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER], "tool_choice": "none"}
    flags: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with replay.serve(**flags) as url, client_of(url) as client:
        (choice,) = client.chat.completions.create(**request).choices
        assert (choice.message.content, choice.message.tool_calls) == (HERMES, None)
        assert choice.finish_reason == "stop" and "get_weather" not in replay.prompt
    with replay.serve(**flags, prompt_unused_tools=True) as url, client_of(url) as client:
        (choice,) = client.chat.completions.create(**request).choices
        assert choice.message.content == HERMES and "get_weather" in replay.prompt


def test_a_conversation_with_calls_and_their_answers(replay: Replay) -> None:
    replay.text = HERMES
    flags: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with replay.serve(**flags) as url, client_of(url) as client:
        message = (
            client.chat.completions.create(model="fake", messages=ASK, tools=[WEATHER, CLOCK])
            .choices[0]
            .message
        )  # type: ignore[list-item]
        assert message.tool_calls is not None
        answers: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls
        ]
        history: list[Any] = [*ASK, message.model_dump(exclude_none=True), *answers]
        client.chat.completions.create(model="fake", messages=history, tools=[WEATHER, CLOCK])  # type: ignore[list-item]
        # Templates get arguments as data, not as text.
        assert '"arguments": {"city": "Köln 🦊"}' in replay.prompt and "rain" in replay.prompt
        assert '"name": "clock"}]' in replay.prompt  # the answer is named, for templates that want it
        with pytest.raises(openai.BadRequestError, match="must be the id of an earlier tool call"):
            client.chat.completions.create(model="fake", messages=[*ASK, answers[0]])


def test_refused_tools_and_choices(replay: Replay) -> None:
    def refused(field: str | None, message: str, **request: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.chat.completions.create(model="fake", messages=ASK, **request)
        assert caught.value.param == field

    with replay.serve(tool_call_parser="none") as url, client_of(url) as client:
        refused("tool_choice", "--tool-call-parser none", tools=[WEATHER])
        refused("tool_choice", "--tool-call-parser none", tools=[WEATHER], tool_choice="auto")
        refused("tool_choice", "no tool 'x', only get_weather", tools=[WEATHER],
                tool_choice={"type": "function", "function": {"name": "x"}})  # fmt: skip
        refused("tool_choice", "needs tools", tool_choice="required")
        refused("tool_choice", "must be 'none'", tools=[WEATHER], tool_choice="any")
        refused(
            "tool_choice", "must be 'none'", tools=[WEATHER], tool_choice={"type": "function", "function": 3}
        )
        for allowed, message in (
            (None, "needs a mode"),
            ({"mode": "none"}, "needs a mode"),
            ({"mode": "required", "tools": [{"type": "function", "function": {"name": "x"}}]}, "no tool 'x'"),
            ({"mode": "required"}, "needs tools"),
        ):
            choice = {"type": "allowed_tools", "allowed_tools": allowed}
            refused("tool_choice", message, tools=[WEATHER], tool_choice=choice)
        refused("tools", "there are two functions named 'clock'", tools=[CLOCK, CLOCK])
        refused("tools", r"tools\[0\] must be", tools=[{"type": "code_interpreter"}])
        refused(
            "tools", r"tools\[0\].function.name", tools=[{"type": "function", "function": {"name": "a b"}}]
        )
        for parameters in ([], {"type": "string"}):
            refused("tools", "JSON schema of an object",
                    tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])  # fmt: skip
        refused("tool_choice", "cannot be constrained by guided_regex", tools=[WEATHER], tool_choice="required",
                extra_body={"guided_regex": "a"})  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "prompt_end", "text", "expected"),
    [
        ("qwen3", "<think>\n", "Hm.\n</think>\n\nRain", ("Hm.", "Rain", 0)),
        ("qwen3", "<think>\n\n</think>\n\n", "Rain", ("", "Rain", 0)),
        ("qwen3", "", "Rain", ("", "Rain", 0)),
        ("deepseek_r1", "<think>\n", "Hm.\n</think>\n\nRain", ("Hm.", "Rain", 0)),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "Rain", ("", "Rain", 0)),
        ("deepseek_r1", "", "Hm.", ("Hm.", "", 0)),
        ("deepseek_r1", "<think>\n", "Hm.\n" + HERMES, ("Hm.\nLet me see.", "", 2)),
    ],
)
def test_the_end_of_the_prompt_says_where_the_reply_begins(
    replay: Replay, parser: str, prompt_end: str, text: str, expected: tuple[str, str, int], stream: bool
) -> None:
    """In chat completions and in responses, whole and streamed."""
    flags: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": parser}
    template = "{{ messages | tojson }}" + prompt_end.replace("\n", "{{ '\\n' }}")
    request: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER, CLOCK]}
    replay.text = text
    with (
        replay.serve(trust_request_chat_template=True, **flags) as url,
        client_of(url) as client,
    ):
        answer = client.chat.completions.create(
            **request, stream=stream, extra_body={"chat_template": template}
        )
        assert replay.prompt.endswith(prompt_end)
        if not stream:
            message = answer.choices[0].message
            thoughts = getattr(message, "reasoning_content", None) or ""
            assert (thoughts, message.content or "", len(calls_of(message))) == expected
            return
        chunks = list(answer)
        content, calls, _, _ = gathered(chunks)
        pieces = (getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks)
        thoughts = "".join(piece or "" for piece in pieces)
        assert (thoughts, content, len(calls)) == expected


def test_a_message_that_is_continued_within_its_reasoning(replay: Replay) -> None:
    replay.text = "so.</think>Rain"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for parser, content, expected in (
        ("qwen3", "<think>\nHm, ", ("so.", "Rain")),
        ("deepseek_r1", "<think>Hm</think>It is", (None, "so.</think>Rain")),
    ):
        with (
            replay.serve(trust_request_chat_template=True, reasoning_parser=parser) as url,
            client_of(url) as client,
        ):
            message = (
                client.chat.completions.create(
                    model="fake",
                    messages=[*ASK, {"role": "assistant", "content": content}],
                    extra_body={"chat_template": template, "continue_final_message": True},
                )
                .choices[0]
                .message
            )
            assert replay.prompt.endswith(content)
            assert (getattr(message, "reasoning_content", None), message.content) == expected


def test_reasoning_of_responses_begins_where_the_prompt_says(replay: Replay) -> None:
    replay.text = "Hm.\n</think>\n\nRain"
    with (
        replay.serve(reasoning_parser="qwen3", template=TEMPLATE + "<think>{{ '\\n' }}") as url,
        client_of(url) as client,
    ):
        assert client.responses.create(model="fake", input="Weather?").output_text == "Rain"
        with client.responses.stream(model="fake", input="Weather?") as stream:
            assert stream.get_final_response().output_text == "Rain"


def test_reasoning_is_separate_from_the_answer(replay: Replay) -> None:
    replay.text = "<think>\nHm, Köln.\n</think>\n\n" + HERMES
    flags: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    request: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER, CLOCK]}
    with replay.serve(**flags) as url, client_of(url) as client:
        message = client.chat.completions.create(**request).choices[0].message
        assert message.reasoning_content == "Hm, Köln."
        assert message.content == "Let me see." and len(message.tool_calls) == 2
        thoughts = content = ""
        for chunk in client.chat.completions.create(**request, stream=True):
            thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            content += chunk.choices[0].delta.content or ""
        assert (thoughts, content) == ("Hm, Köln.", "Let me see.")
        plain = client.chat.completions.create(model="fake", messages=ASK).choices[0].message
        assert plain.reasoning_content == "Hm, Köln." and plain.content == HERMES  # type: ignore[attr-defined]
        replay.text = '{"a": "</think>"}'
        forced = client.chat.completions.create(
            model="fake", messages=ASK, response_format={"type": "json_object"}
        )
        assert forced.choices[0].message.content == replay.text


def test_templates_of_requests(replay: Replay, tmp_path: Path) -> None:
    replay.text = "ok"
    file = tmp_path / "secret"
    file.write_text("secret")

    def ask(template: str, **variables: Any) -> str:
        body = {"chat_template": template, "chat_template_kwargs": variables}
        client.chat.completions.create(model="fake", messages=ASK, extra_body=body)
        return replay.prompt

    with (
        replay.serve() as url,
        client_of(url) as client,
        pytest.raises(openai.BadRequestError, match="not allowed"),
    ):
        ask("{{ 1 }}")
    with replay.serve(trust_request_chat_template=True) as url, client_of(url) as client:
        assert ask("{{ x }}{{ messages | length }}", x=2, y=3) == "21"
        for template, message in (
            (str(file), "neither a template"),
            ("{{ 9 ** 9999 }}", "numbers that are too large"),
            (
                "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
                "more than 16777216 char",
            ),
            ("{{ raise_exception('no') }}", "rejects the conversation: no"),
            ("{% if %}", "not valid"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(template)
        with pytest.raises(openai.BadRequestError, match="cannot set tokenize") as caught:
            ask("{{ 1 }}", tokenize=True)
        assert caught.value.param == "chat_template_kwargs"
