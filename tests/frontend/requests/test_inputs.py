"""What comes in is checked at the door, and completed by what the model knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagewire.frontend.requests.checked_params import params_for
from pagewire.frontend.requests.inputs import (
    Intake,
    Prepared,
    is_embeds_prompt,
    is_tokens_prompt,
    prompts_of,
)
from pagewire.frontend.requests.pooling import inputs as pooling
from pagewire.frontend.text.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.messages import EngineInfo, Submit, ToCore
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingInfo

LENGTH = 32


@pytest.fixture
def info(engine_info: EngineInfo, tokenizers: dict[str, Tokenizer]) -> EngineInfo:
    return msgspec.structs.replace(
        engine_info,
        vocab_size=tokenizers["byte_level"].vocab_size,
        max_model_len=LENGTH,
        eos_token_id=2,
        max_logprobs=5,
        max_n=8,
        seed=7,
    )


@pytest.fixture
def intake(info: EngineInfo, tokenizers: dict[str, Tokenizer]) -> Intake:
    return Intake(info, tokenizers["byte_level"])


@pytest.fixture
def prepare(intake: Intake) -> Callable[..., Prepared]:
    def prepare(prompt: Any, **params: Any) -> Prepared:
        return intake.prepare(prompt, SamplingParams(**params), "id")

    return prepare


def test_a_text(intake: Intake, prepare: Callable[..., Prepared]) -> None:
    prepared = prepare("The fox")
    request = prepared.request
    assert prepared.prompt_text == "The fox"
    assert intake.tokenizer is not None
    assert request.prompt.token_ids == intake.tokenizer.encode("The fox")
    assert request.prompt.token_ids[0] == intake.tokenizer.bos_token_id
    assert (request.key, request.request_id, request.eos_token_id, request.priority) == (0, "id", 2, 0)
    assert prepare(TextPrompt(prompt="The fox")).request.prompt.token_ids == request.prompt.token_ids


def test_token_ids(prepare: Callable[..., Prepared]) -> None:
    for prompt in ([5, 6], (5, 6), TokensPrompt(prompt_token_ids=[5, 6])):
        prepared = prepare(prompt)
        assert (prepared.request.prompt.token_ids, prepared.prompt_text) == ([5, 6], None)
    known = prepare(TokensPrompt(prompt_token_ids=[5, 6], prompt="ab", cache_salt="mine"))
    assert (known.request.prompt.token_ids, known.prompt_text, known.request.prompt.cache_salt) == (
        [5, 6],
        "ab",
        "mine",
    )


def test_a_prompt_may_have_empty_values_for_what_is_not_supported(prepare: Callable[..., Prepared]) -> None:
    prompt = {
        "prompt_token_ids": [5, 6],
        "token_type_ids": None,
        "multi_modal_data": {},
        "multi_modal_uuids": None,
        "mm_processor_kwargs": {},
    }
    assert prepare(prompt).request.prompt.token_ids == [5, 6]


def test_integers_of_other_libraries(prepare: Callable[..., Prepared]) -> None:
    class Int64:
        def __index__(self) -> int:
            return 5

    ids = prepare([Int64(), 6]).request.prompt.token_ids
    assert ids == [5, 6] and type(ids[0]) is int
    assert prompts_of([Int64(), Int64()]) != []


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "the prompt is empty"),
        ({"prompt_token_ids": []}, ValueError, "the prompt is empty"),
        ([-1], ValueError, "the prompt has token id -1, outside the vocabulary of 403"),
        ([1, 403], ValueError, "token id 403"),
        ([1, "a"], TypeError, "token ids must be integers, got 'a'"),
        ([True], TypeError, "token ids must be integers, got True"),
        ([1.0], TypeError, "token ids must be integers"),
        (None, TypeError, "a prompt is a string, token ids or a dict, got NoneType"),
        (b"text", TypeError, "got bytes"),
        (5, TypeError, "got int"),
        ("a\ud800b", ValueError, "not valid Unicode"),
        ({"prompt": 5}, TypeError, "must be a string, got int"),
        ({}, ValueError, "needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'"),
        (EmbedsPrompt(prompt_embeds=[[0.0]]), ValueError, "takes no embeddings as a prompt: start it with"),
        ({"data": 1, "data_format": "x"}, ValueError, "a DataPrompt is not supported: .*give a text"),
        ({"encoder_prompt": "a", "decoder_prompt": None}, ValueError, "encoder-decoder"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            ValueError,
            "multi_modal_data: the model takes no pictures or sounds",
        ),
        (
            {"prompt": "a", "multi_modal_uuids": {"image": ["a"]}},
            ValueError,
            "multi_modal_uuids: the model takes no",
        ),
        ({"prompt": "a", "mm_processor_kwargs": {"size": 1}}, ValueError, "mm_processor_kwargs: the model"),
        ({"prompt": "a", "data_format": "x"}, ValueError, "data_format: a DataPrompt is not supported: "),
        (
            {"prompt_token_ids": [1], "token_type_ids": [0]},
            ValueError,
            "token_type_ids: models that generate have no token types",
        ),
        ({"prompt": "a", "cache_slat": "b"}, ValueError, r"'cache_slat'; did you mean 'cache_salt'\?"),
        ({"promt": "a"}, ValueError, r"unknown key of a prompt 'promt'; did you mean 'prompt'\?"),
        ({"prompt": "a", 7: "b"}, ValueError, "unknown key of a prompt 7$"),
        ({"prompt": "a", "cache_salt": 1}, TypeError, "cache_salt must be a string"),
        ({"prompt": "a", "cache_salt": ""}, ValueError, "cache_salt must not be empty"),
        ([1] * LENGTH, ValueError, f"the prompt has {LENGTH} tokens, which leaves no room"),
        ([1] * (LENGTH + 1), ValueError, f"max_model_len is {LENGTH}"),
    ],
)
def test_bad_prompts(
    prompt: Any, error: type[Exception], message: str, prepare: Callable[..., Prepared]
) -> None:
    with pytest.raises(error, match=message):
        prepare(prompt)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 9}, "n=9 is over this engine's limit of 8"),
        ({"logprobs": 6}, "logprobs=6 is over this engine's max_logprobs=5"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1, all 403 of the vocabulary, is over .* max_logprobs=5"),
        ({"stop_token_ids": [403]}, "stop_token_ids has token id 403"),
        ({"allowed_token_ids": [1, 500]}, "allowed_token_ids has token id 500"),
        ({"logit_bias": {403: 1.0}}, "logit_bias has token id 403"),
        ({"bad_words_token_ids": [[999]]}, "bad_words has token id 999"),
        (
            {"min_tokens": 31, "max_tokens": 40},
            "min_tokens=31, but the prompt of 2 tokens leaves room for 30",
        ),
    ],
)
def test_bad_parameters(params: dict[str, Any], message: str, prepare: Callable[..., Prepared]) -> None:
    with pytest.raises(ValueError, match=message):
        prepare([1, 2], **params)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ({"priority": 2**40}, "priority must be in"),
        ({"priority": 2**70}, "priority must be in"),
        ({"priority": 0.5}, "priority must be an integer"),
        ({"priority": 5}, "priority=5 has no effect: requests are scheduled in order of arrival"),
        ({"age": -1.0}, "age must be in"),
        ({"age": 1e300}, "age must be in"),
        ({"age": math.inf}, "age must be in"),
        ({"age": math.nan}, "age must be in"),
        ({"request_id": 5}, "request_id must be a string"),
    ],
)
def test_a_place_in_the_queue(info: EngineInfo, place: dict[str, Any], error: str) -> None:
    """Whatever is to be done with the prompt."""
    place = {"request_id": "id"} | place
    with pytest.raises((ValueError, TypeError), match=error):
        Intake(info, None).prepare([1], None, **place)
    pools = msgspec.structs.replace(info, pooling=PoolingInfo(["embed"], "LAST", 2))
    with pytest.raises((ValueError, TypeError), match=error):
        pooling.prepare_pooling(Intake(pools, None), [1], pooling.check_pooling_params(None, pools), **place)


def test_priorities_of_an_engine_that_schedules_by_them(info: EngineInfo) -> None:
    intake = Intake(msgspec.structs.replace(info, scheduling_policy="priority"), None)
    assert intake.prepare([1], None, "id", priority=-5, age=60.0).request.priority == -5


def test_bad_arguments(intake: Intake) -> None:
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got dict"):
        intake.prepare("a", {"n": 1}, "id")  # type: ignore[arg-type]


def test_without_a_tokenizer(info: EngineInfo) -> None:
    intake = Intake(info, None)
    assert intake.prepare([1], SamplingParams(), "id").request.eos_token_id == 2
    for prompt, params, message in (
        ("text", {}, "there is no tokenizer"),
        ([1], {"stop": "x"}, "stop strings need a tokenizer"),
        ([1], {"bad_words": ["x"]}, "bad_words need a tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            intake.prepare(prompt, SamplingParams(**params), "id")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_tokens", "room"), [(None, 28), (28, 28), (29, 28), (10_000, 28), (27, 27), (1, 1)]
)
def test_max_tokens_is_cut_to_the_room(
    max_tokens: int | None, room: int, prepare: Callable[..., Prepared]
) -> None:
    assert prepare([1] * 4, max_tokens=max_tokens).request.params.max_tokens == room


@pytest.mark.parametrize(
    ("keep", "max_tokens", "left", "room"),
    [
        (None, 16, 30, 2),
        (5, 16, 5, 16),
        (100, 16, 30, 2),
        (-1, 16, 16, 16),
        (-1, None, 30, 2),
        (-1, 1, 30, 1),
        (-1, 100, 1, 31),
    ],
)
def test_truncation_keeps_the_last_tokens(
    keep: int | None, max_tokens: int | None, left: int, room: int, prepare: Callable[..., Prepared]
) -> None:
    prompt = list(range(30))
    request = prepare(prompt, truncate_prompt_tokens=keep, max_tokens=max_tokens).request
    assert request.prompt.token_ids == prompt[-left:]
    assert request.params.max_tokens == room


def test_truncation_saves_a_long_prompt(prepare: Callable[..., Prepared]) -> None:
    prompt = list(range(100))
    request = prepare(prompt, truncate_prompt_tokens=-1, max_tokens=None).request
    assert (request.prompt.token_ids, request.params.max_tokens) == (prompt[-31:], 1)
    with pytest.raises(ValueError, match="leaves no room"):
        prepare(prompt, truncate_prompt_tokens=50)


def test_parameters_are_copied(intake: Intake) -> None:
    params = SamplingParams(max_tokens=None, stop=["a"], bad_words=["fox"])
    before = params.clone()
    prepared = intake.prepare("The", params, "id")
    assert params == before
    assert prepared.request.params is not params


def test_further_ends_of_sequence(info: EngineInfo, tokenizers: dict[str, Tokenizer]) -> None:
    info = msgspec.structs.replace(info, generation_config={"eos_token_id": [2, 9, 8]})
    intake = Intake(info, tokenizers["byte_level"])
    params = intake.prepare([1], SamplingParams(stop_token_ids=[5]), "id").request.params
    assert params.stop_token_ids == [5, 8, 9]
    params = intake.prepare([1], SamplingParams(ignore_eos=True), "id").request.params
    assert params.stop_token_ids is None


def test_the_end_of_sequence_of_the_tokenizer(info: EngineInfo, tokenizers: dict[str, Tokenizer]) -> None:
    info = msgspec.structs.replace(info, eos_token_id=None)
    tokenizer = tokenizers["byte_level"]
    assert tokenizer.eos_token_id == 2
    assert Intake(info, tokenizer).prepare([1], None, "id").request.eos_token_id == 2
    assert Intake(info, None).prepare([1], None, "id").request.eos_token_id is None


@pytest.mark.parametrize("family", ["byte_level", "llama_2"])
def test_bad_words_in_all_spellings(family: str, info: EngineInfo, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[family]
    request = Intake(info, tokenizer).prepare([1], SamplingParams(bad_words=["fox", " dog"]), "id").request
    words = request.params.bad_words_token_ids
    assert words is not None
    texts = {tokenizer.decode(ids).strip() for ids in words}
    assert texts == {"fox", "dog"}
    for text in ("fox", " fox", "dog", " dog"):
        assert tokenizer.encode(text, add_special_tokens=False) in words
    line = tokenizer.encode("x\nfox", add_special_tokens=False)
    assert any(line[-len(ids) :] == ids for ids in words)
    assert len({tuple(ids) for ids in words}) == len(words)


def test_seeds(info: EngineInfo, tokenizers: dict[str, Tokenizer]) -> None:
    def seeds(engine_seed: int, salt: int, n: int = 50) -> list[int]:
        intake = Intake(msgspec.structs.replace(info, seed=engine_seed), None, salt)
        return [intake.prepare([1], SamplingParams(), "id").request.seed for _ in range(n)]

    first = seeds(0, 0)
    assert first == seeds(0, 0)
    every = {seed for engine in range(4) for salt in range(4) for seed in seeds(engine, salt)}
    assert len(every) == 4 * 4 * 50
    assert all(0 <= seed < 2**63 for seed in every)
    assert max(seeds(2**63 - 1, 2**64)) < 2**63
    given = Intake(info, None).prepare([1], SamplingParams(seed=-(2**63)), "id")
    assert given.request.seed == -(2**63)


def test_what_is_prepared_crosses_the_wire(prepare: Callable[..., Prepared]) -> None:
    request = prepare(
        "The fox", n=2, stop=["a"], bad_words=["fox"], max_tokens=None, logit_bias={"5": 1.0}, min_tokens=3
    ).request
    codec: Codec[ToCore] = Codec(ToCore)
    decoded = codec.decode(codec.encode(Submit([request])))
    assert decoded == Submit([request])


def test_one_prompt_or_many() -> None:
    assert prompts_of("a") == ["a"]
    assert prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of((1, 2)) == [[1, 2]]
    assert prompts_of({"prompt": "a"}) == [{"prompt": "a"}]
    assert prompts_of(["a", [1], {"prompt": "b"}]) == ["a", [1], {"prompt": "b"}]
    assert prompts_of([[1, 2], [3]]) == [[1, 2], [3]]
    assert prompts_of([]) == []
    for bad in (None, 5, b"a", [None], ["a", 1.5], [b"a"]):
        with pytest.raises(TypeError):
            prompts_of(bad)


def test_parameters_for_each_prompt() -> None:
    one, other = SamplingParams(), SamplingParams(n=2)
    assert params_for(one, 3) == [one, one, one]
    assert params_for([one, other], 2) == [one, other]
    with pytest.raises(ValueError, match="3 prompts, but 2 sampling parameters"):
        params_for([one, other], 3)
    for bad in (None, {"n": 1}, [one, None], "x"):
        with pytest.raises(TypeError, match="sampling_params must be"):
            params_for(bad, 2)  # type: ignore[arg-type]


def test_kinds_of_prompts() -> None:
    assert is_tokens_prompt(TokensPrompt(prompt_token_ids=[1])) and not is_tokens_prompt({"prompt": "a"})
    assert is_embeds_prompt({"prompt_embeds": 1}) and not is_embeds_prompt("prompt_embeds")
    assert not is_tokens_prompt([1])
