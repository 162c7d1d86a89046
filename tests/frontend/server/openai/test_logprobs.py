"""Log probabilities in the forms of the two APIs."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.server.openai.logprobs import TokenNames, chat_logprobs, completion_logprobs
from pagewire.frontend.text.logprobs import Logprob, token_bytes, token_text
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.wire.messages import EngineInfo, Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.logprob_rows import rows
from tests.frontend.server.client import Client

POSITIONS = [
    {7: Logprob(-3.0, 5, "b"), 8: Logprob(-0.5, 1, "c"), 9: Logprob(-1.0, 2, "d")},
    {8: Logprob(-math.inf, 1, "c"), 9: Logprob(-2.0, 2, "d")},
]


def test_completions() -> None:
    names = TokenNames(load_tokenizer("demo"), as_ids=False)
    part = completion_logprobs(names, [7, 8], POSITIONS, [0, 1], top=1)
    assert part.tokens == ["b", "c"] and part.text_offset == [0, 1]
    assert part.token_logprobs == [-3.0, -9999.0]
    assert part.top_logprobs == [{"b": -3.0, "c": -0.5}, {"c": -9999.0}]
    first = completion_logprobs(names, [9, 9], [None, {9: Logprob(-1.0, 1, "dd")}], [0, 1], top=1)
    assert first.token_logprobs == [None, -1.0] and first.top_logprobs[0] is None
    assert first.tokens[0] == token_text(load_tokenizer("demo"), 9)


def test_minus_one_is_all_of_them() -> None:
    names = TokenNames(load_tokenizer("demo"), as_ids=True)
    part = completion_logprobs(names, [7], POSITIONS[:1], [0], top=-1)
    assert part.top_logprobs == [{"token_id:7": -3.0, "token_id:8": -0.5, "token_id:9": -1.0}]
    (token,) = chat_logprobs(names, [7], POSITIONS[:1], top=-1).content or []
    assert [each.token for each in token.top_logprobs] == ["token_id:8", "token_id:9", "token_id:7"]


def test_no_candidate_is_lost_for_having_the_text_of_another() -> None:
    names = TokenNames(load_tokenizer("demo"), as_ids=False)
    position = {7: Logprob(-3.0, 5, "b"), 8: Logprob(-0.5, 1, "b"), 9: Logprob(-1.0, 2, "d")}
    part = completion_logprobs(names, [7], [position], [0], top=2)
    assert part.top_logprobs == [{"b": -3.0, "token_id:8": -0.5, "d": -1.0}]


@pytest.fixture
def byte_fallback_core(new_core: Any, engine_info: EngineInfo, folders: dict[str, Path]) -> FakeCore:
    """A core whose tokenizer spells unknown characters as bytes, and marks spaces in the names of tokens."""
    core: FakeCore = new_core()
    folder, size = str(folders["llama_2"]), load_tokenizer(folders["llama_2"]).vocab_size
    core.info = msgspec.structs.replace(engine_info, tokenizer=folder, model_path=folder, vocab_size=size)
    return core


def completed(core: FakeCore, token_ids: list[int], **fields: Any) -> Any:
    """The choices of a completion with these tokens, each with one other candidate; a stream's events joined."""
    engine = AsyncLLM.attach(core.address)
    client = Client(engine)

    async def play() -> Any:
        call = client.call("POST", "/v1/completions", {"prompt": "The fox", "logprobs": 1} | fields)
        (request,) = (await asyncio.to_thread(core.expect, Submit)).requests
        prompt_ids = request.prompt.token_ids
        prompt = rows(
            [[i, i] for i in prompt_ids[1:]], [[-1.0, -1.0]] * len(prompt_ids[1:]), [1] * len(prompt_ids[1:])
        )
        for index, token_id in enumerate(token_ids):
            core.tokens(
                request.key,
                [token_id],
                logprobs=rows([[token_id, 5]], [[-2.0, -1.0]], [2]),
                prompt_logprobs=prompt if index == 0 and fields.get("echo") else None,
                finish_reason="length" if index == len(token_ids) - 1 else None,
            )
        return await call.answer()

    try:
        answer = client.run(play)
        assert answer.status == 200, answer.body
        answers = answer.events if fields.get("stream") else [answer.json]
        return [choice for part in answers for choice in part["choices"]]
    finally:
        engine.shutdown()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_the_text_that_tokens_add(
    byte_fallback_core: FakeCore, stream: bool, echo: bool
) -> None:
    """A byte token adds a part of a character, whatever its name is."""
    tokenizer = load_tokenizer(byte_fallback_core.info.tokenizer)
    text = "x𝄞 The 𝄞𝄞 fox"
    ids = tokenizer.encode(text, add_special_tokens=False)
    choices = completed(byte_fallback_core, ids, stream=stream, echo=echo)
    prompt = "The fox" if echo else ""
    whole = "".join(choice["text"] for choice in choices)
    assert whole == prompt + text
    offsets = [place for choice in choices for place in choice["logprobs"]["text_offset"]]
    names = [name for choice in choices for name in choice["logprobs"]["tokens"]]
    assert len(offsets) == len(names) == len(ids) + (len(tokenizer.encode("The fox")) if echo else 0)
    output = offsets[len(offsets) - len(ids) :]
    assert output[0] == len(prompt) and offsets == sorted(offsets)
    for place, token_id in zip(output, ids, strict=True):
        (name,) = tokenizer.convert_ids_to_tokens([token_id])
        added = "𝄞" if name and name.startswith("<0x") else token_text(tokenizer, token_id)
        assert whole.startswith(added if place > len(prompt) else added.lstrip(), place)


def test_words_with_and_without_a_space_are_different_candidates(byte_fallback_core: FakeCore) -> None:
    tokenizer = load_tokenizer(byte_fallback_core.info.tokenizer)
    names = tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))
    start, rest, word = names.index("▁true"), names.index("true"), "true"
    position = {
        start: Logprob(-1.0, 1, token_text(tokenizer, start)),
        rest: Logprob(-2.0, 2, token_text(tokenizer, rest)),
    }
    part = completion_logprobs(TokenNames(tokenizer, as_ids=False), [start], [position], [0], top=2)
    assert part.top_logprobs == [{f" {word}": -1.0, word: -2.0}]
    (token,) = chat_logprobs(TokenNames(tokenizer, as_ids=False), [start], [position], top=2).content or []
    assert bytes(token.bytes or ()).decode() == f" {word}"
    assert [bytes(other.bytes or ()).decode() for other in token.top_logprobs] == [f" {word}", word]


def test_chat() -> None:
    content = chat_logprobs(TokenNames(load_tokenizer("demo"), as_ids=True), [7, 8], POSITIONS, top=2).content
    assert content is not None
    assert [token.token for token in content] == ["token_id:7", "token_id:8"]
    assert [[top.token for top in token.top_logprobs] for token in content] == [
        ["token_id:8", "token_id:9"],
        ["token_id:8", "token_id:9"],
    ]
    assert content[1].logprob == -9999.0
    (bare,) = chat_logprobs(TokenNames(None, as_ids=False), [7], POSITIONS[:1], top=0).content or []
    assert (bare.token, bare.bytes, bare.top_logprobs) == ("token_id:7", None, [])


@pytest.mark.parametrize("text", ["Grüße, 你好 🦙!", "def f(x): return x"])
def test_bytes_join_to_the_text(
    text: str, tokenizers: dict[str, Tokenizer], folders: dict[str, Path]
) -> None:
    """Also where a character is split into several tokens."""
    checked = 0
    for tokenizer in [load_tokenizer("demo"), *tokenizers.values()]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decoder is None or tokenizer.decode(ids) != text:
            continue  # a tokenizer whose decoded text is not the one that was encoded
        joined = b"".join(token_bytes(tokenizer, token_id) for token_id in ids)
        if joined.decode(errors="replace").replace(" ", "") == text.replace(" ", ""):
            checked += 1
    assert checked
