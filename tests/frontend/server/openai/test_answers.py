"""Completions and chat on a core that answers w2 w3 w4: what comes out, whole and streamed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.ipc.wire.messages import Request, Submit, TokenDelta
from tests.frontend.conftest import FakeCore
from tests.frontend.logprob_rows import rows
from tests.frontend.server.client import Client

HELLO = [{"role": "user", "content": "w5 w6"}]


def test_completion(client: Client) -> None:
    answer = client.post("/v1/completions", {"model": "fake", "prompt": "w5 w6", "max_tokens": 3})
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json["id"].startswith("cmpl-") and answer.json["model"] == "fake"
    assert answer.json["object"] == "text_completion"
    (choice,) = answer.json["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "w2 w3 w4", "length")
    assert answer.json["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat(client: Client) -> None:
    answer = client.post("/v1/chat/completions", {"messages": HELLO})
    assert answer.json["id"].startswith("chatcmpl-") and answer.json["object"] == "chat.completion"
    (choice,) = answer.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": "w2 w3 w4", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer.json["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("w5", [[5]]),
        (["w5", "w6 w7"], [[5], [6, 7]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["w5", [6]], [[5], [6]]),
    ],
)
def test_prompts(client: Client, core: FakeCore, prompt: Any, expected: list[list[int]]) -> None:
    """Choices come in the order of the prompts, n to each."""
    core.answer = lambda request, index: [request.prompt.token_ids[0] + 10 + index]
    answer = client.post("/v1/completions", {"prompt": prompt, "n": 2})
    assert [request.prompt.token_ids for request in core.expect(Submit).requests] == expected
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(2 * len(expected)))
    texts = [choice["text"] for choice in answer.json["choices"]]
    assert texts == [f"w{ids[0] + 10 + i}" for ids in expected for i in range(2)]
    assert answer.json["usage"]["prompt_tokens"] == sum(map(len, expected))


def merged(rng: random.Random, deltas: list[TokenDelta]) -> list[list[TokenDelta]]:
    """The tokens of several sequences in steps of any size, in any order between sequences."""
    steps: list[list[TokenDelta]] = []
    rest = {(delta.key, delta.index): list(delta.token_ids) for delta in deltas}
    while rest:
        step = []
        for place in rng.sample(sorted(rest), rng.randint(1, len(rest))):
            count = rng.randint(1, len(rest[place]))
            ids, rest[place] = rest[place][:count], rest[place][count:]
            done = not rest[place]
            step.append(TokenDelta(*place, ids, "length" if done else None))
            if done:
                del rest[place]
        steps.append(step)
    return steps


@pytest.mark.parametrize("chat", [False, True])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_streams_say_what_whole_answers_say(serve: Any, core: FakeCore, chat: bool, data: Any) -> None:
    """However the tokens come: text, finish reasons and counts are the same."""
    client = serve()
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    n = data.draw(st.integers(1, 3))
    stop = data.draw(st.sampled_from([None, "w9", "w7 w8"]))
    answers = data.draw(
        st.lists(st.lists(st.integers(2, 12), min_size=1, max_size=9), min_size=n, max_size=n)
    )
    body: dict[str, Any] = {"n": n, "max_tokens": 9, "stop": stop}
    body |= {"messages": HELLO} if chat else {"prompt": "w5"}
    target = "/v1/chat/completions" if chat else "/v1/completions"

    def ask(stream: bool) -> Any:
        async def play() -> Any:
            more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            call = client.call("POST", target, body | more)
            submit = await asyncio.to_thread(core.expect, Submit)
            (request,) = submit.requests
            deltas = [TokenDelta(request.key, index, ids) for index, ids in enumerate(answers)]
            for step in merged(rng, deltas):
                core.deltas(step)
            return await call.answer()

        return client.run(play)

    whole, stream = ask(False).json, ask(True).events
    *events, last = stream
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for expected in whole["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == expected["index"]]
        if chat:
            assert parts[0]["delta"]["role"] == expected["message"]["role"]
            text = "".join(part["delta"].get("content", "") for part in parts)
            assert text == expected["message"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == expected["text"]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [expected["finish_reason"]]
        assert parts[-1]["stop_reason"] == expected["stop_reason"]


def test_the_first_event_comes_with_the_first_token(serve: Callable[..., Client], core: FakeCore) -> None:
    client = serve()

    async def play() -> None:
        call = client.call("POST", "/v1/completions", {"prompt": "w5", "stream": True})
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        core.tokens(request.key, [7])
        assert (await call.message())["type"] == "http.response.start"
        first = await call.message()
        assert b'"text":"w7"' in first["body"] and first["more_body"]
        core.tokens(request.key, [8], finish_reason="length")
        assert b'"text":" w8"' in (await call.message())["body"]
        call.hang_up()
        await call.task

    client.run(play)


def test_usage_in_streams(client: Client) -> None:
    def usages(**options: bool) -> list[Any]:
        body = {"prompt": "w5", "stream": True, "stream_options": options}
        return [event.get("usage", "none") for event in client.post("/v1/completions", body).events]

    assert set(usages()) == {"none"}
    *before, last = usages(include_usage=True)
    assert set(before) == {None} and last["completion_tokens"] == 3
    *before, last = usages(include_usage=True, continuous_usage_stats=True)
    assert [usage["completion_tokens"] for usage in before] == sorted(
        usage["completion_tokens"] for usage in before
    )
    assert before[-1] == last


def test_echo(client: Client) -> None:
    body: dict[str, Any] = {"prompt": "w5 w6", "echo": True}
    assert client.post("/v1/completions", body).json["choices"][0]["text"] == "w5 w6w2 w3 w4"
    assert (
        client.post("/v1/completions", body | {"prompt": [5, 6]})
        .json["choices"][0]["text"]
        .startswith("w5 w6")
    )
    events = client.post("/v1/completions", body | {"stream": True}).events
    assert "".join(c["text"] for event in events for c in event["choices"]) == "w5 w6w2 w3 w4"
    only = client.post("/v1/completions", body | {"max_tokens": 0}).json
    assert only["choices"][0]["text"] == "w5 w6" and only["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_of_chat(serve: Callable[..., Client], core: FakeCore, n: int) -> None:
    """A stream has them in its first event, and says what the whole answer says."""
    client = serve()

    def ask(stream: bool) -> Any:
        async def play() -> Any:
            body = {"messages": HELLO, "prompt_logprobs": 1, "stream": stream, "n": n}
            call = client.call("POST", "/v1/chat/completions", body)
            (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
            positions = rows([[6, 9]], [[-2.0, -0.5]], [3])
            core.tokens(request.key, [7], prompt_logprobs=positions, finish_reason="length")
            for index in range(1, n):
                core.tokens(request.key, [8], index, finish_reason="length")
            return await call.answer()

        return client.run(play)

    expected = [
        None,
        {
            "6": {"logprob": -2.0, "rank": 3, "decoded_token": " w6"},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": " w9"},
        },
    ]
    assert ask(False).json["prompt_logprobs"] == expected
    first, *others = ask(True).events
    assert first["prompt_logprobs"] == expected and first["choices"][0]["delta"]["role"] == "assistant"
    assert others and not any("prompt_logprobs" in event for event in others)


def test_chat_continues_and_echoes_the_last_message(client: Client, core: FakeCore) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "w8 w9"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    answer = client.post("/v1/chat/completions", body).json
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "w8 w9w2 w3 w4",
        "refusal": None,
    }
    assert core.expect(Submit).requests[0].prompt.token_ids == [5, 6, 8, 9]
    events = client.post("/v1/chat/completions", body | {"stream": True}).events
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "w8 w9w2 w3 w4"


def test_token_ids(client: Client) -> None:
    body: dict[str, Any] = {"prompt": "w5 w6", "return_token_ids": True}
    (choice,) = client.post("/v1/completions", body).json["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [2, 3, 4])
    events = client.post("/v1/completions", body | {"stream": True}).events
    assert [i for event in events for c in event["choices"] for i in c["token_ids"]] == [2, 3, 4]
    assert events[0]["choices"][0]["prompt_token_ids"] == [5, 6]


def test_models(client: Client) -> None:
    (model,) = client.get("/v1/models").json["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("fake", 4096, "model")
    assert client.get("/v1/models/fake").json == model
    assert client.get("/v1/models/other").status == 404


def test_several_names(serve: Callable[..., Client], core: FakeCore, engine: Any) -> None:
    """Any of them is taken, the first is told."""
    core.auto = True
    engine.info.served_model_names[:] = ["first", "org/second"]
    client = serve()
    assert client.post("/v1/completions", {"model": "org/second", "prompt": "w5"}).json["model"] == "first"
    assert [model["id"] for model in client.get("/v1/models").json["data"]] == ["first", "org/second"]
    assert client.get("/v1/models/org/second").json["id"] == "org/second"


@pytest.mark.parametrize("name", ["first:latest", "/models/first.gguf"])
def test_tags_and_paths_are_names_of_the_model(
    name: str, serve: Callable[..., Client], core: FakeCore, engine: Any
) -> None:
    core.auto = True
    engine.info.served_model_names[:], engine.info.model = ["first"], "/models/first.gguf"
    client = serve(any_model_name=False)
    assert client.post("/v1/completions", {"model": name, "prompt": "w5"}).json["model"] == "first"
    assert (
        client.post("/api/chat", {"model": name, "messages": HELLO, "stream": False}).json["model"] == "first"
    )
    assert client.get(f"/v1/models/{name.strip('/')}").status == (404 if "/" in name else 200)
    wrong = client.post("/v1/completions", {"model": "other:latest", "prompt": "w5"})
    assert (wrong.status, wrong.error["message"]) == (404, "there is no model 'other'; served: first")


def test_a_name_with_a_tag_can_be_the_models(
    serve: Callable[..., Client], core: FakeCore, engine: Any
) -> None:
    core.auto = True
    engine.info.served_model_names[:] = ["first:latest"]
    answer = serve().post("/v1/completions", {"model": "first:latest", "prompt": "w5"})
    assert answer.json["model"] == "first:latest"


def test_tokenize(client: Client) -> None:
    answer = client.post("/tokenize", {"prompt": "w5 w6", "return_token_strs": True}).json
    assert answer == {"tokens": [5, 6], "count": 2, "max_model_len": 4096, "token_strs": ["▁w5", "▁w6"]}
    assert client.post("/tokenize", {"messages": HELLO}).json["tokens"] == [5, 6]
    assert client.post("/detokenize", {"tokens": [5, 6]}).json == {"prompt": "w5 w6"}
    assert client.post("/detokenize", {"tokens": [999]}).status == 400
    assert client.post("/tokenize", {}).status == 400


def test_priority_and_salt(client: Client, core: FakeCore, engine: AsyncLLM) -> None:
    engine.info.scheduling_policy = "priority"
    client.post("/v1/completions", {"prompt": ["w5", [6]], "priority": 3, "cache_salt": "s"})
    requests: list[Request] = core.expect(Submit).requests
    assert [(request.priority, request.prompt.cache_salt) for request in requests] == [(3, "s")] * 2
    client.post("/v1/chat/completions", {"messages": HELLO, "cache_salt": "s"})
    assert core.expect(Submit).requests[0].prompt.cache_salt == "s"
