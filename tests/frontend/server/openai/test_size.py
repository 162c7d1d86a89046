"""A request that is too large is refused at the door: nothing of it is rendered, tokenized or submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.http import body
from pagewire.frontend.server.openai import prepared_chat
from pagewire.ipc.wire.budget import MAX_CONTAINERS, MAX_TOOL_VALUES, MIN_CHARS
from pagewire.ipc.wire.messages import Abort, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.logprob_rows import rows
from tests.frontend.server.client import Answer, Client

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "w5"}
NEEDED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "w5"},
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "w5"},
    "/v1/responses/input_tokens": {"input": "w5"},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [5]},
}
NAME = "x" * 1025


def tool(index: int, num_properties: int = 0) -> dict[str, Any]:
    properties = {f"p{number}": {} for number in range(num_properties)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": f"f{index}", "parameters": parameters}}


@pytest.fixture
def untouched(engine: AsyncLLM, core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Asserts that nothing was tokenized or submitted since the last time."""
    tokenizer = engine.session.intake.tokenizer
    assert tokenizer is not None
    encoded: list[str] = []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return [5]

    monkeypatch.setattr(tokenizer, "encode", encode)

    def check() -> None:
        assert encoded == []
        assert not [message for message in core.seen.queue if isinstance(message, Submit)]

    return check


TOO_LONG = [
    *[(path, {"cache_salt": NAME}) for path in (COMPLETIONS, CHAT, RESPONSES)],
    *[(path, {"user": NAME}) for path in (COMPLETIONS, CHAT, RESPONSES)],
    *[(path, {"model": NAME}) for path in NEEDED],
    (COMPLETIONS, {"request_id": NAME}),
    *[(path, {"stop": "x" * 1025}) for path in (COMPLETIONS, CHAT, RESPONSES)],
    *[(path, {"stop": ["x"] * 129}) for path in (COMPLETIONS, CHAT, RESPONSES)],
    (COMPLETIONS, {"stop_token_ids": [5] * 4097}),
    (COMPLETIONS, {"bad_words": ["x"] * 2049}),
    (COMPLETIONS, {"bad_words": ["x" * 257]}),
    *[(path, {"guided_choice": ["x"] * 16385}) for path in (COMPLETIONS, CHAT)],
    (CHAT, {"guided_regex": "x" * ((1 << 18) + 1)}),
    *[(path, {"tools": [tool(index) for index in range(1025)]}) for path in (CHAT, RESPONSES, "/tokenize")],
    (CHAT, {"tools": [tool(0, MAX_TOOL_VALUES)]}),
    ("/tokenize", {"tools": [tool(0, MAX_TOOL_VALUES)]}),
    ("/v1/responses/input_tokens", {"tools": [tool(0, MAX_TOOL_VALUES)["function"] | {"type": "function"}]}),
    *[(path, {"messages": [USER] * 16385}) for path in (CHAT, "/tokenize")],
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 16385}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * 10000}] * 2}),
    (RESPONSES, {"input": [USER] * 16385}),
    (COMPLETIONS, {"prompt": ["w5"] * 1025}),
    ("/detokenize", {"tokens": [5] * ((1 << 17) + 1)}),
]


def test_what_is_too_long_is_refused_by_name(client: Client, untouched: Callable[[], None]) -> None:
    for path, fields in TOO_LONG:
        answer = client.post(path, NEEDED[path] | fields)
        (name,) = fields
        assert answer.status == 400, (path, name, answer.body[:200])
        assert answer.error["message"].startswith(("there must be 1 to", name)), answer.error
        assert len(answer.body) < 500
        untouched()


def test_large_schemas_are_not_read_on_the_event_loop(
    serve: Callable[..., Client], core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of tools, nor other data for the template: each is copied value by value."""
    core.auto = True
    client = serve(
        tool_call_parser="none"
    )  # so that the schemas are not in the prompt, which has no room for them
    on_loop: list[bool] = []

    def watched(name: str) -> None:
        work = getattr(prepared_chat, name)

        def watch(*args: Any, **kwargs: Any) -> Any:
            on_loop.append(asyncio._get_running_loop() is not None)
            return work(*args, **kwargs)

        monkeypatch.setattr(prepared_chat, name, watch)

    watched("tool_use"), watched("chat_prompt"), watched("constrain_params")
    for number, seen in ((1, [True] * 3), (10_000, [False] * 3)):
        fields = {"tools": [tool(0, number)], "tool_choice": "required"}
        assert client.post(CHAT, NEEDED[CHAT] | fields).status == 200
        assert on_loop == seen
        on_loop.clear()
    large = {f"x{number}": 0 for number in range(10_000)}
    for fields in ({"chat_template_kwargs": large}, {"messages": [USER | {"x": large}]}):
        assert client.post(CHAT, NEEDED[CHAT] | fields).status == 200
        assert on_loop[1:2] == [False]
        on_loop.clear()


def test_a_body_that_is_nested_too_deeply_is_no_json(client: Client) -> None:
    """Nor does it raise what the server would log as its own failure."""
    for path in NEEDED:
        answer = client.post(path, b'{"unknown": ' + b"[" * 5000 + b"]" * 5000 + b"}")
        assert answer.status == 400 and "not valid JSON" in answer.error["message"], (path, answer.body)


def test_a_large_field_out_of_its_bounds_is_not_read_twice(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would hold up everybody: the error names it without its value."""
    checked: list[str] = []
    monkeypatch.setattr(body, "check_field", lambda kind, name, value: checked.append(name))
    small = client.post(COMPLETIONS, {"prompt": "w5", "stop_token_ids": [2**70]})
    large = client.post(COMPLETIONS, {"prompt": "w5", "stop_token_ids": [5] * (1 << 19) + [2**70]})
    assert (small.status, large.status, checked) == (422, 422, ["stop_token_ids"])
    assert small.error["param"] == large.error["param"] == "stop_token_ids"


def test_a_text_that_cannot_fit_is_refused_by_its_characters(
    client: Client, untouched: Callable[[], None]
) -> None:
    text = "w5 " * (MIN_CHARS // 3 + 1)
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}
    for path, fields in (
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": ["w5", text], "add_special_tokens": False}),
        (COMPLETIONS, {"prompt": [5] * 5000}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (CHAT, {"messages": [{"role": "user", "content": text[: MIN_CHARS // 2 + 9]}] * 2}),
        (CHAT, parts),
        (RESPONSES, {"input": text}),
        ("/tokenize", {"prompt": text, "messages": None}),
        ("/tokenize", parts),
    ):
        answer = client.post(path, NEEDED[path] | fields)
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded", answer.body[:200]
        assert "maximum context length" in answer.error["message"]
        untouched()


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"prompt": ["w5"] * 129, "n": 8}, "--max-request-sequences"),
        ({"prompt": ["w5"] * 513, "best_of": 2}, "--max-request-sequences"),
        ({"prompt": ["w5"] * 128, "n": 8, "max_tokens": 4096}, None),
        ({"prompt": ["w5"] * 5, "max_tokens": 4096}, None),
        (
            {"prompt": "w5", "max_tokens": 1 << 40},
            None,
        ),  # a single sequence may be as long as the model takes
    ],
)
def test_the_sequences_of_a_request(client: Client, core: FakeCore, fields: Any, option: str | None) -> None:
    answer = client.post(COMPLETIONS, {"max_tokens": 1} | fields)
    if option is None:
        assert answer.status == 200
    else:
        assert answer.status == 400 and option in answer.error["message"]
        assert answer.error["code"] == "request_too_large"


def test_the_options_set_the_limits(serve: Callable[..., Client], core: FakeCore) -> None:
    core.auto = True
    client = serve(max_request_sequences=4, max_request_tokens=100)
    for path in (COMPLETIONS, CHAT):
        assert client.post(path, NEEDED[path] | {"n": 4, "max_tokens": 25}).status == 200
        more = client.post(path, NEEDED[path] | {"n": 5, "max_tokens": 1})
        assert "n=5 are 5 sequences; a request may have at most 4" in more.error["message"]
        longer = client.post(path, NEEDED[path] | {"n": 4, "max_tokens": 26})
        assert (
            "104 tokens; a request may ask for at most 100 (--max-request-tokens)" in longer.error["message"]
        )
    assert client.post(CHAT, NEEDED[CHAT]).status == 200
    unlimited = client.post(CHAT, NEEDED[CHAT] | {"n": 2})  # up to the context length each
    assert "8192 tokens" in unlimited.error["message"]


def test_logit_edits_count_for_each_sequence(client: Client, untouched: Callable[[], None]) -> None:
    fields = {"prompt": ["w5"] * 1024, "stop_token_ids": [5] * 1025, "max_tokens": 1}
    assert "at most 1048576 are allowed" in client.post(COMPLETIONS, fields).error["message"]
    untouched()


def test_a_body_of_brackets_is_refused_before_it_is_decoded(client: Client) -> None:
    body = b'{"prompt": "w5", "vllm_xargs": {"a": [' + b"{}," * MAX_CONTAINERS + b"{}]}"
    answer = client.post(COMPLETIONS, body)  # which lacks a bracket at its end
    assert answer.status == 413 and f"at most {MAX_CONTAINERS}" in answer.error["message"]


def test_parameters_are_checked_once_for_all_prompts(
    client: Client, core: FakeCore, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, words = engine.session.intake.tokenizer, []
    assert tokenizer is not None
    encode_batch: Callable[..., list[list[int]]] = tokenizer.encode_batch

    def counted(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        words.extend(texts)
        return encode_batch(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    assert client.post(COMPLETIONS, {"prompt": ["w5"] * 50, "bad_words": ["w7"]}).status == 200
    assert sum("w7" in word for word in words) == 3  # at the start, after a space, after a line break
    assert len(core.expect(Submit).requests) == 50


# ---------------------------------------------------------------- log probabilities


@pytest.fixture
def logprobs(core: FakeCore) -> Callable[..., Answer]:
    core.auto = True
    core.logprobs = lambda request: rows([[2, 5, 6]], [[-0.5, -0.25, -1.0]], [2])
    return lambda client, path, **fields: client.post(path, NEEDED[path] | fields)


CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 2}


def test_an_answer_with_too_many_log_probabilities_is_refused(
    serve: Callable[..., Client], core: FakeCore, logprobs: Callable[..., Answer]
) -> None:
    core.answer = lambda request, index: [2] * 8
    client = serve(max_request_logprobs=24)
    for path, fields in ((COMPLETIONS, {"logprobs": 2}), (CHAT, CHAT_LOGPROBS)):
        assert logprobs(client, path, max_tokens=9, **fields).status == 200
        core.expect(Submit)
        answer = logprobs(client, path, n=2, max_tokens=9, **fields)
        assert answer.status == 400 and answer.error["param"] == "logprobs"
        assert "at most 24 are kept for a request (--max-request-logprobs)" in answer.error["message"]
        (request,) = core.expect(Submit).requests
        abort = core.expect(Abort)
        assert request.key in abort.keys or (request.key, 0) in abort.sequences


def test_a_stream_that_is_read_may_have_any_number(serve: Callable[..., Client], core: FakeCore) -> None:
    client = serve(max_request_logprobs=6)
    position = rows([[2, 5, 6]], [[-0.5, -0.25, -1.0]], [2])
    body = {"prompt": "w5", "logprobs": 2, "stream": True, "max_tokens": 9}

    async def read() -> list[bytes]:
        call = client.call("POST", COMPLETIONS, body)
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        events = []
        for number in range(9):
            core.tokens(request.key, [2], logprobs=position, finish_reason="length" if number == 8 else None)
            while b"token_logprobs" not in (event := (await call.message()).get("body", b"")):
                pass
            events.append(event)
        while (await call.message()).get("more_body"):
            pass
        await call.task
        return events

    assert len(client.run(read)) == 9


def test_log_probabilities_of_prompts_are_counted_before_anything_is_submitted(
    serve: Callable[..., Client], core: FakeCore
) -> None:
    client = serve(max_request_logprobs=29)
    fields = {"prompt": [[5, 6, 7]] * 5, "prompt_logprobs": 1, "max_tokens": 1}
    answer = client.post(COMPLETIONS, fields)
    assert answer.status == 400 and answer.error["param"] == "prompt_logprobs"
    echo = {"prompt": [[5, 6, 7]] * 5, "logprobs": 1, "echo": True, "max_tokens": 0}
    assert client.post(COMPLETIONS, echo).error["param"] == "prompt_logprobs"
    copies = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "n": 5}  # each choice has them
    assert client.post(COMPLETIONS, copies).error["param"] == "prompt_logprobs"
    assert core.seen.empty() or not [m for m in core.seen.queue if isinstance(m, Submit)]


# ---------------------------------------------------------------- what the document says


def test_limits_are_in_the_document(client: Client) -> None:
    schemas = client.get("/openapi.json").json["components"]["schemas"]

    def limits(schema: str, name: str) -> set[tuple[str, int]]:
        kinds = schemas[schema]["properties"][name].get("anyOf", [schemas[schema]["properties"][name]])
        return {(key, kind[key]) for kind in kinds for key in kind if key.startswith("max")}

    for schema in ("CompletionRequest", "ChatRequest", "ResponsesRequest"):
        assert limits(schema, "cache_salt") == {("maxLength", 1024)}
        assert limits(schema, "stop") == {("maxLength", 1024), ("maxItems", 128)}
        assert limits(schema, "logit_bias") == {("maxProperties", 1 << 19)}
    assert limits("ChatRequest", "messages") == {("maxItems", 16384)}
    assert limits("ChatRequest", "tools") == {("maxItems", 1024)}


def test_equal_names_of_tools_are_found_at_once(client: Client) -> None:
    tools = [tool(index) for index in range(1000)] + [tool(7)]
    answer = client.post(CHAT, NEEDED[CHAT] | {"tools": tools})
    assert answer.error["message"] == "tools: there are two functions named 'f7'"
