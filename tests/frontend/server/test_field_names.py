"""Each API words errors by its own names of fields."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pagewire.frontend.server.anthropic.field_names import FIELD_NAMES as ANTHROPIC
from pagewire.frontend.server.anthropic.protocol import MessagesRequest
from pagewire.frontend.server.http.errors import APIError, FieldNames, api_error
from pagewire.frontend.server.ollama.field_names import FIELD_NAMES as OLLAMA
from pagewire.frontend.server.ollama.protocol import OllamaChatRequest
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.parsing.choice import NOT_AUTO
from pagewire.frontend.server.responses.field_names import FIELD_NAMES as RESPONSES
from pagewire.frontend.server.responses.protocol import ResponsesRequest
from pagewire.ipc.errors import Field, FieldValueError, root_of
from pagewire.ipc.wire.messages import Submit, TokenDelta
from pagewire.ipc.wire.params import SamplingParams
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client

APIS: list[tuple[Mapping[str, str], Any]] = [
    (ANTHROPIC, MessagesRequest),
    (OLLAMA, OllamaChatRequest),
    (RESPONSES, ResponsesRequest),
]


@pytest.mark.parametrize(("names", "request_type"), APIS, ids=["anthropic", "ollama", "responses"])
def test_a_table_has_fields_of_the_library_and_of_its_api(
    names: Mapping[str, str], request_type: Any
) -> None:
    names = {path: name for path, name in names.items() if path != NOT_AUTO}
    ours = {*SamplingParams.__struct_fields__, *ChatRequest.__struct_fields__}
    assert {root_of(path) for path in names} <= ours
    theirs = set(request_type.__struct_fields__)
    assert {root_of(path) for path in names.values()} <= theirs
    # A field that both have is one field.
    assert all(root_of(path) == root_of(names[path]) for path in names if root_of(path) in theirs)


@pytest.mark.parametrize(
    ("names", "path", "found", "param"),
    [
        ({}, "tools[2].function.name", "tools[2].function.name", "tools"),
        (ANTHROPIC, "tools[2].function.name", "tools[2].name", "tools"),
        (ANTHROPIC, "tools[2].function.parameters", "tools[2].input_schema", "tools"),
        (ANTHROPIC, "messages[4].tool_call_id", "messages.tool_use_id", "messages"),
        (ANTHROPIC, "messages[4].content", "messages[4].content", "messages"),
        (ANTHROPIC, "stop", "stop_sequences", "stop_sequences"),
        (ANTHROPIC, "stop_token_ids", "stop_token_ids", "stop_token_ids"),
        (RESPONSES, "messages[4].tool_calls[1].id", "input.tool_calls[1].id", "input"),
        (RESPONSES, "messages", "input", "input"),
        (RESPONSES, "response_format", "text.format", "text"),
        (OLLAMA, "temperature", "options.temperature", "options"),
    ],
)
def test_paths(names: Mapping[str, str], path: str, found: str, param: str) -> None:
    assert FieldNames(names).path(path) == found
    assert FieldNames(names).param(path) == param
    assert FieldNames(names, ()).param(path) is None  # a field that the request has not


def test_errors_are_worded() -> None:
    names = FieldNames(RESPONSES, ResponsesRequest.__struct_fields__)
    error = FieldValueError("min_tokens", "must be at most ", Field("max_tokens"), "=5, got max_tokens")
    reported = api_error(error, names)
    assert reported.message == "min_tokens must be at most max_output_tokens=5, got max_tokens"
    assert (reported.status, reported.param) == (400, "min_tokens")
    assert api_error(error).message == str(error)
    assert api_error(ValueError("max_tokens is no field here"), names).param is None
    own = APIError(413, "messages: too many", param="messages", code="request_too_large")
    assert (api_error(own, names).param, api_error(own, names).code) == ("input", "request_too_large")
    assert api_error(own) is own


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/v1/completions", {"prompt": "w5"}, "max_tokens", "max_tokens=7 is too many"),
        ("/v1/responses", {"input": "w5"}, "max_output_tokens", "max_output_tokens=7 is too many"),
        (
            "/v1/messages",
            {"max_tokens": 7, "messages": [{"role": "user", "content": "w5"}]},
            None,
            "max_tokens=7 is",
        ),
        ("/api/generate", {"prompt": "w5", "stream": False}, None, "options.num_predict=7 is too many"),
    ],
)
def test_the_field_of_an_error_of_the_core(
    serve: Callable[..., Client], core: FakeCore, path: str, body: Any, param: str | None, text: str
) -> None:
    client = serve()

    async def play() -> Answer:
        call = client.call("POST", path, body)
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        refusal = FieldValueError("max_tokens", "=7 is too many")
        core.deltas(
            [
                TokenDelta(
                    request.key,
                    0,
                    [],
                    "error",
                    error=str(refusal),
                    error_type="ValueError",
                    error_place=refusal.place,
                )
            ]
        )
        return await call.answer()

    answer = client.run(play)
    assert answer.status == 400 and text in str(answer.json["error"])
    if param is not None:
        assert answer.error["param"] == param
