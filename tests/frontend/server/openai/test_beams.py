"""Beam search over HTTP, on a core whose next tokens depend on the last one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.messages import Request
from tests.frontend.conftest import EOS, FakeCore
from tests.frontend.logprob_rows import rows
from tests.frontend.server.client import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "w5"}]
VOCAB = 64


def all_tokens(request: Request) -> list[int]:
    """The prompt, and the tokens of the beam."""
    return [*request.prompt.token_ids, *(request.output_token_ids or [[]])[0]]


def ranked(request: Request) -> list[tuple[int, float]]:
    """The next tokens and their log probabilities, most likely first: five tokens have most of the probability."""
    last = all_tokens(request)[-1]
    weights = dict.fromkeys(range(VOCAB), 0.01)
    weights |= {2 + (last + step) % 5: 8.0 - step for step in range(5)}
    weights[EOS] = 7.5
    total = sum(weights.values())
    pairs = [(token_id, math.log(weight / total)) for token_id, weight in weights.items()]
    return sorted(pairs, key=lambda pair: -pair[1])


def logprobs_of(request: Request) -> LogprobRows:
    top = ranked(request)
    top = [top[0], *top[: request.params.logprobs]]
    return rows([[token_id for token_id, _ in top]], [[logprob for _, logprob in top]], [1])


@pytest.fixture
def beam_client(serve: Callable[..., Client], core: FakeCore) -> Client:
    """A server on a core that extends beams."""
    core.auto = True
    core.answer = lambda request, index: [ranked(request)[0][0]]
    core.logprobs = logprobs_of
    return serve()


def steps(core: FakeCore) -> list[Request]:
    """All requests that the core has received."""
    return list(core.submitted.values())


def test_the_best_n_beams_come_in_the_order_of_the_search(beam_client: Client) -> None:
    """With best_of over n, too: they are not ranked again without the length penalty."""
    body: dict[str, Any] = {"prompt": "w5", "use_beam_search": True, "max_tokens": 5, "length_penalty": -2.0}

    def texts(**fields: Any) -> list[str]:
        answer = beam_client.post(COMPLETIONS, body | fields)
        assert answer.status == 200, answer.body
        assert [choice["index"] for choice in answer.json["choices"]] == list(range(fields["n"]))
        return [choice["text"] for choice in answer.json["choices"]]

    all_beams = texts(n=4)
    assert len(set(all_beams)) == 4
    assert len({len(text.split()) for text in all_beams}) > 1
    for n in (1, 2, 3):
        assert texts(n=n, best_of=4) == all_beams[:n]
    assert texts(n=4, length_penalty=3.0) != all_beams


def test_beams_of_chat(beam_client: Client) -> None:
    body = {"messages": HELLO, "use_beam_search": True, "max_tokens": 4}
    completion = {"prompt": "w5", "use_beam_search": True, "max_tokens": 4, "n": 3}
    expected = [choice["text"] for choice in beam_client.post(COMPLETIONS, completion).json["choices"]]
    answer = beam_client.post(CHAT, body | {"n": 2, "best_of": 3}).json
    assert [choice["message"]["content"] for choice in answer["choices"]] == expected[:2]


@pytest.mark.parametrize("target", [COMPLETIONS, CHAT])
def test_the_steps_of_a_search_have_the_salt_and_the_priority(
    beam_client: Client, core: FakeCore, engine: AsyncLLM, target: str
) -> None:
    engine.info.scheduling_policy = "priority"
    body: dict[str, Any] = {
        "use_beam_search": True,
        "n": 2,
        "max_tokens": 3,
        "cache_salt": "s",
        "priority": 2,
    }
    body |= {"messages": HELLO} if target == CHAT else {"prompt": "w5"}
    assert beam_client.post(target, body).status == 200
    assert len(steps(core)) > 2
    assert {(request.prompt.cache_salt, request.priority) for request in steps(core)} == {("s", 2)}


@pytest.mark.parametrize("target", [COMPLETIONS, CHAT])
def test_the_prompt_is_truncated(beam_client: Client, core: FakeCore, target: str) -> None:
    body: dict[str, Any] = {"use_beam_search": True, "max_tokens": 1, "truncate_prompt_tokens": 2}
    body |= (
        {"messages": [{"role": "user", "content": "w5 w6 w7"}]} if target == CHAT else {"prompt": "w5 w6 w7"}
    )
    answer = beam_client.post(target, body).json
    assert [request.prompt.token_ids for request in steps(core)] == [[6, 7]]
    assert answer["usage"]["prompt_tokens"] == 2


def test_beams_end_at_every_end_of_sequence_token(
    beam_client: Client, core: FakeCore, engine: AsyncLLM
) -> None:
    body = {"prompt": "w5", "use_beam_search": True, "n": 4, "max_tokens": 4, "return_token_ids": True}
    before = beam_client.post(COMPLETIONS, body).json["choices"]
    assert any(6 in choice["token_ids"][:-1] for choice in before)
    engine.info.generation_config["eos_token_id"] = [EOS, 6]
    try:
        choices = beam_client.post(COMPLETIONS, body).json["choices"]
    finally:
        del engine.info.generation_config["eos_token_id"]
    assert not any({EOS, 6} & set(choice["token_ids"][:-1]) for choice in choices)
    assert {choice["stop_reason"] for choice in choices if choice["finish_reason"] == "stop"} == {None, 6}
    stopped = beam_client.post(COMPLETIONS, body | {"stop_token_ids": [6]}).json["choices"]
    assert [choice["token_ids"] for choice in stopped] == [choice["token_ids"] for choice in choices]
    assert [choice["text"] for choice in stopped] == [choice["text"] for choice in choices]


def test_min_tokens(beam_client: Client) -> None:
    body = {"prompt": "w5", "use_beam_search": True, "n": 4, "max_tokens": 4, "return_token_ids": True}
    body["length_penalty"] = 0.0

    def lengths(**fields: Any) -> list[int]:
        choices = beam_client.post(COMPLETIONS, body | fields).json["choices"]
        return [len(choice["token_ids"]) for choice in choices if choice["finish_reason"] == "stop"]

    assert min(lengths()) == 1
    assert min(lengths(min_tokens=2)) == 3


@pytest.mark.parametrize("value", [True, False, "never"])
def test_early_stopping_reaches_the_search(beam_client: Client, core: FakeCore, value: Any) -> None:
    body = {"prompt": "w5", "use_beam_search": True, "n": 2, "max_tokens": 30, "length_penalty": 0.5}
    answer = beam_client.post(COMPLETIONS, body | {"early_stopping": value})
    assert answer.status == 200, answer.body
    lengths = {len(all_tokens(request)) for request in steps(core)}
    assert max(lengths) == {True: 2, False: 3, "never": 8}[value]  # the prompt is one token


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("top_p", 0.9, 1),
        ("top_k", 5, -1),
        ("min_p", 0.1, 0),
        ("seed", 0, None),
        ("stop", "w3", []),
        ("logprobs", 0, None),
        ("prompt_logprobs", 0, None),
    ],
)
def test_fields_without_a_meaning_in_beam_search_are_refused_by_name(
    beam_client: Client, core: FakeCore, field: str, value: Any, neutral: Any
) -> None:
    body: dict[str, Any] = {"prompt": "w5", "use_beam_search": True, "max_tokens": 1}
    answer = beam_client.post(COMPLETIONS, body | {field: value})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert answer.error["message"].startswith(f"{field} is not supported with use_beam_search: ")
    assert "instead" in answer.error["message"] and not core.submitted
    assert beam_client.post(COMPLETIONS, body | {field: neutral}).status == 200


def test_what_changes_logits_reaches_every_step(beam_client: Client, core: FakeCore) -> None:
    edits: dict[str, Any] = {"presence_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {"3": 1}}
    body = {"prompt": "w5", "use_beam_search": True, "n": 2, "max_tokens": 3, "bad_words": ["w3"]}
    assert beam_client.post(COMPLETIONS, body | edits).status == 200
    for request in steps(core):
        params = request.params
        assert (params.presence_penalty, params.repetition_penalty, params.logit_bias) == (0.5, 1.5, {3: 1})
        assert params.bad_words_token_ids and params.processed_logprobs


def test_forms_of_the_output_are_refused(beam_client: Client, core: FakeCore) -> None:
    answer = beam_client.post(COMPLETIONS, {"prompt": "w5", "use_beam_search": True, "guided_regex": "a"})
    assert answer.status == 400 and "structured outputs are not supported" in answer.error["message"]
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": HELLO, "use_beam_search": True, "tools": [tool], "tool_choice": "required"}
    answer = beam_client.post(CHAT, body)
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    answer = beam_client.post(CHAT, {"messages": HELLO, "use_beam_search": True, "logprobs": True})
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert (
        beam_client.post(
            CHAT, {"messages": HELLO, "use_beam_search": True, "logprobs": False, "max_tokens": 1}
        ).status
        == 200
    )


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 0.5), ("early_stopping", "never")])
def test_parameters_of_beam_search_need_it(
    beam_client: Client, core: FakeCore, field: str, value: Any
) -> None:
    for target, body in ((COMPLETIONS, {"prompt": "w5"}), (CHAT, {"messages": HELLO})):
        answer = beam_client.post(target, {**body, field: value})
        assert (answer.status, answer.error["param"]) == (400, field)
        assert "set use_beam_search" in answer.error["message"]
    assert not core.submitted
    assert beam_client.post(COMPLETIONS, {"prompt": "w5", "early_stopping": "always"}).status == 422


def test_a_search_may_be_wider_than_max_logprobs(beam_client: Client, core: FakeCore) -> None:
    answer = beam_client.post(
        COMPLETIONS, {"prompt": "w5", "use_beam_search": True, "n": 30, "max_tokens": 2}
    )
    assert answer.status == 200 and len(answer.json["choices"]) == 30
    assert {request.params.logprobs for request in steps(core)} == {31}


@pytest.mark.parametrize("value", [1e308, -1e308, -2000.0, 16.5, -16.5])
def test_a_length_penalty_has_bounds(beam_client: Client, value: float) -> None:
    body = {"prompt": "w5", "use_beam_search": True, "max_tokens": 5, "n": 2, "length_penalty": value}
    answer = beam_client.post(COMPLETIONS, body)
    assert (answer.status, answer.error["param"]) == (400, "length_penalty")
    assert "length_penalty must be in [-16.0, 16.0]" in answer.error["message"]


@pytest.mark.parametrize("value", [16.0, -16.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_the_largest_length_penalties(beam_client: Client, value: float, early_stopping: Any) -> None:
    body = {"prompt": "w5", "use_beam_search": True, "max_tokens": 5, "n": 2, "length_penalty": value}
    answer = beam_client.post(COMPLETIONS, body | {"early_stopping": early_stopping})
    assert answer.status == 200, answer.body
    assert len(answer.json["choices"]) == 2
