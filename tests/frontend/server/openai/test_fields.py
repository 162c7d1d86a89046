"""Fields of requests come to the engine as what they mean."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.api.off_loop import OffLoopThreads
from pagewire.frontend.requests.outputs import CompletionOutput, best_outputs
from pagewire.frontend.server.http.body import SMALL_BODY_BYTES, Decoder
from pagewire.frontend.server.http.warnings import begin_warnings
from pagewire.frontend.server.openai.constraints import demanded_constraint
from pagewire.frontend.server.openai.protocol import ChatRequest, CompletionRequest
from pagewire.ipc.wire.messages import Submit
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client

HELLO = [{"role": "user", "content": "w5"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def sent(client: Client, core: FakeCore, **fields: Any) -> SamplingParams:
    """The parameters that the core gets."""
    client.post("/v1/completions", {"prompt": "w5 w6"} | fields)
    params: SamplingParams = core.expect(Submit).requests[0].params
    return params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 3),
        ("min_p", 0.25),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("seed", 7),
        ("n", 3),
        ("stop", ["w9"]),
        ("stop_token_ids", [9]),
        ("bad_words", ["w9"]),
        ("include_stop_str_in_output", True),
        ("ignore_eos", True),
        ("max_tokens", 5),
        ("min_tokens", 2),
        ("logprobs", 2),
        ("prompt_logprobs", 2),
        ("skip_special_tokens", False),
        ("spaces_between_special_tokens", False),
        ("truncate_prompt_tokens", 1),
        ("allowed_token_ids", [2, 3]),
    ],
)
def test_fields_of_the_same_name(client: Client, core: FakeCore, name: str, value: Any) -> None:
    assert getattr(sent(client, core, **{name: value}), name) == value


def test_other_fields(client: Client, core: FakeCore) -> None:
    assert sent(client, core, logit_bias={"9": -100}).logit_bias == {9: -100.0}
    assert sent(client, core, vllm_xargs={"a": 1}).extra_args == {"a": 1}
    assert sent(client, core).max_tokens == 16
    assert sent(client, core).output_kind is RequestOutputKind.FINAL_ONLY
    assert sent(client, core, stream=True).output_kind is RequestOutputKind.DELTA
    best = sent(client, core, n=2, best_of=3)
    assert (best.n, best.num_returned, best.logprobs) == (3, 2, 0)
    assert sent(client, core, n=2, best_of=2).num_returned is None


def test_chat_fields(client: Client, core: FakeCore) -> None:
    def chat(**fields: Any) -> SamplingParams:
        client.post("/v1/chat/completions", {"messages": HELLO} | fields)
        params: SamplingParams = core.expect(Submit).requests[0].params
        return params

    assert chat().max_tokens == 4095  # all that the model's length leaves
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3


def test_the_models_recommendations(serve: Callable[..., Client], core: FakeCore, engine: AsyncLLM) -> None:
    """They stand behind what a request gives."""
    core.auto = True
    engine.info.generation_config.update(temperature=0.25, top_k=4, max_new_tokens=9)
    client = serve()
    params = sent(client, core, top_k=5)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 5, 16)
    assert client.post("/v1/chat/completions", {"messages": HELLO}).status == 200
    assert core.expect(Submit).requests[0].params.max_tokens == 9


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_null_is_as_good_as_nothing(client: Client, kind: Any) -> None:
    """For every field but the one that a request is about."""
    chat = kind is ChatRequest
    needed = {"messages": HELLO} if chat else {"prompt": "w5"}
    nulls = {field.name: None for field in msgspec.structs.fields(kind) if field.name not in needed}
    target = "/v1/chat/completions" if chat else "/v1/completions"
    answer = client.post(target, needed | nulls)
    assert answer.status == 200, answer.body


def test_unknown_fields_are_named_once(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    fields = {f"x{i}": i for i in range(30)} | {"y" * 1000: 1, "user": "known"}
    assert client.post("/v1/completions", {"prompt": "w5"} | fields).status == 200
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "'x0', 'x1'" in record.getMessage() and "user" not in record.getMessage()
    assert len(record.getMessage()) < 600


def test_of_very_many_unknown_fields_only_the_first_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a known one is out of its bounds: their names and values would hold up the event loop."""
    decoder = Decoder(CompletionRequest)
    monkeypatch.setattr(decoder, "_names", None)
    unknown = b",".join(b'"x%d": 0' % number for number in range(50_000))
    begin_warnings("r")
    assert decoder.decode(b'{"prompt": "w5", "y`z": 1, %b}' % unknown).prompt == "w5"
    assert [record.getMessage() for record in caplog.records] == [
        "request r: unknown fields are ignored: 'y`z'"
    ]
    with pytest.raises(ValueError, match=r"temperature must be .* got -3"):
        decoder.decode(b'{%b, "prompt": "w5", "temperature": -3}' % unknown)
    long = b'{"prompt": "w5%b"}' % (b"u" * SMALL_BODY_BYTES)
    assert decoder.decode(long).suffix is None and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"store": True, "metadata": {"a": "b"}}, ["metadata has no effect", "store has no effect"]),
        ({"prediction": {"type": "content", "content": "x"}}, ["prediction has no effect"]),
        ({"store": False, "metadata": None, "user": "u", "safety_identifier": "s"}, []),
        ({"guided_decoding_backend": "xgrammar"}, ["guided_decoding_backend has no effect: all grammars"]),
        ({"guided_decoding_backend": "auto", "mm_processor_kwargs": {}, "logits_processors": []}, []),
        ({"extra": 1, 'odd"\\\n\u00e4': 2}, ["unknown fields are ignored: 'extra', 'odd\\\"\\\\\\\\\\\\n?'"]),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"},
            ["the chat template does not read 'reasoning_effort', 'enable_thinking', so they have no effect"],
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            ["response_format has no effect: tool_choice requires calls"],
        ),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "text"}}, []),
        ({"tools": TOOLS, "tool_choice": "none"}, []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_said_to_the_client_and_in_the_log(
    client: Client, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], named: list[str], stream: bool
) -> None:
    found: list[str] = []

    async def ask() -> None:
        call = client.call("POST", "/v1/chat/completions", {"messages": HELLO, "stream": stream} | fields)
        start = await call.message()
        assert start["status"] == 200
        found.extend(value.decode() for name, value in start["headers"] if name == b"warning")
        call.hang_up()
        await call.task

    client.run(ask)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(found) == len(warnings) == len(named)
    assert all(header.startswith(f'299 pagewire "{text}') for header, text in zip(found, named, strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"guided_decoding_backend": "mine"},
            "guided_decoding_backend='mine' is not supported: all grammars",
        ),
        ({"logits_processors": ["x" * 10_000]}, "logits_processors"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params={'a': 1} is not supported yet"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is for JSON"),
        ({"guided_whitespace_pattern": " ", "guided_regex": "a"}, "whitespace_pattern is for JSON"),
        ({"guided_whitespace_pattern": " ", "guided_choice": ["a"]}, "whitespace_pattern is for JSON"),
        (
            {
                "guided_whitespace_pattern": " ",
                "structured_outputs": {"json": {"type": "string"}, "whitespace_pattern": ""},
            },
            "guided_whitespace_pattern and whitespace_pattern of structured_outputs contradict each other",
        ),
        ({"guided_json": {"name": "string"}}, "json is not a JSON schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"name": "string"}}}},
            "json is not a JSON schema",
        ),
    ],
)
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/completions"])
def test_what_would_have_no_effect_is_refused(
    client: Client, target: str, fields: dict[str, Any], message: str
) -> None:
    body = {"messages": HELLO} if "chat" in target else {"prompt": "w5"}
    answer = client.post(target, body | fields)
    assert answer.status == 400 and answer.error["message"].startswith(message)


def test_a_pattern_of_whitespace_beside_structured_outputs(client: Client, core: FakeCore) -> None:
    structure = {"json": {"type": "string"}}
    for given in (structure, structure | {"whitespace_pattern": " "}):
        params = sent(client, core, structured_outputs=given, guided_whitespace_pattern=" ")
        assert params.structured_outputs is not None and params.structured_outputs.whitespace_pattern == " "


def test_the_service_tier_is_always_the_default(client: Client) -> None:
    body = {"messages": HELLO, "service_tier": "flex"}
    assert client.post("/v1/chat/completions", body).json["service_tier"] == "default"
    events = client.post("/v1/chat/completions", body | {"stream": True}).events
    assert {event["service_tier"] for event in events} == {"default"}
    assert "service_tier" not in client.post("/v1/chat/completions", {"messages": HELLO}).json


def test_the_user_is_logged(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagewire.server")
    for target, body in (
        ("/v1/completions", {"prompt": "w5", "user": "anna"}),
        ("/v1/chat/completions", {"messages": HELLO, "safety_identifier": "anna"}),
        ("/v1/responses", {"input": "w5", "user": "anna"}),
    ):
        caplog.clear()
        assert client.post(target, body).status == 200
        assert 'user="anna"' in caplog.text


def test_truncation_keeps_the_last_tokens(client: Client, core: FakeCore) -> None:
    body = {"prompt": "w5 w6 w7", "truncate_prompt_tokens": 2, "truncation_side": "left"}
    assert client.post("/v1/completions", body).status == 200
    assert core.expect(Submit).requests[0].prompt.token_ids == [6, 7]


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<"}],
                    "triggers": ["<"],
                }
            },
            {"structural_tag": {"structures": [{"begin": "<"}], "triggers": ["<"]}},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            {"json": SCHEMA, "whitespace_pattern": " ?"},
        ),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    ],
)
def test_structured_outputs(fields: Any, expected: Any) -> None:
    request = msgspec.convert({"prompt": "w5"} | fields, CompletionRequest)
    assert demanded_constraint(request) == (None if expected is None else StructuredOutputsParams(**expected))


def test_best_of_gives_the_most_likely(serve: Callable[..., Client], core: FakeCore) -> None:

    outputs = [
        CompletionOutput(i, str(i), [2] * n, total)
        for i, (n, total) in enumerate([(1, -3), (4, -4), (2, -4)])
    ]
    assert [(one.index, one.text) for one in best_outputs(outputs, 2)] == [(0, "1"), (1, "2")]
    assert best_outputs(outputs, 3) == outputs


def test_templates_in_requests(serve: Callable[..., Client], core: FakeCore) -> None:
    """Only where they are trusted; the server's own goes before the model's."""
    core.auto = True
    body = {"messages": HELLO, "chat_template": "w7 {{ messages[0].content }}"}
    assert serve(trust_request_chat_template=True).post("/v1/chat/completions", body).status == 200
    assert core.expect(Submit).requests[0].prompt.token_ids == [7, 5]
    own = serve(chat_template="w8 {{ messages[0].content }}", response_role="bot")
    answer = own.post("/v1/chat/completions", {"messages": HELLO})
    assert core.expect(Submit).requests[0].prompt.token_ids == [8, 5]
    assert answer.json["choices"][0]["message"]["role"] == "bot"


def test_templates_in_requests_have_threads_of_their_own(
    serve: Callable[..., Client], core: FakeCore
) -> None:
    """Those that are slow hold up neither other requests nor, beyond a bounded queue, one another."""
    core.auto = True
    client, release = serve(trust_request_chat_template=True), threading.Event()
    work = client.app.state.service.request_templates = OffLoopThreads("chat templates", 1, 1)
    body = {"messages": HELLO, "chat_template": "w7 {{ messages[0].content }}"}

    async def beside_slow_ones() -> list[Answer]:
        slow = [asyncio.ensure_future(work.run(lambda: release.wait(20))) for _ in range(2)]
        await asyncio.sleep(0)
        refused = await client.call("POST", "/v1/chat/completions", body).answer()
        other = await client.call("POST", "/v1/chat/completions", {"messages": HELLO}).answer()
        release.set()
        assert await asyncio.gather(*slow) == [True, True]
        later = await client.call("POST", "/v1/chat/completions", body).answer()
        return [refused, other, later]

    refused, other, later = client.run(beside_slow_ones)
    assert refused.status == 429 and "1 chat templates are already waiting" in refused.error["message"]
    assert other.status == later.status == 200


def test_what_templates_are_given(serve: Callable[..., Client], core: FakeCore) -> None:
    core.auto = True
    client = serve(
        chat_template="{{ documents[0].text }} {{ reasoning_effort }} {{ verbosity }} {{ messages[0].content }}"
    )
    body = {"messages": HELLO, "documents": [{"text": "w7"}], "reasoning_effort": "w8", "verbosity": "w9"}
    assert client.post("/v1/chat/completions", body).status == 200
    assert core.expect(Submit).requests[0].prompt.token_ids == [7, 8, 9, 5]
