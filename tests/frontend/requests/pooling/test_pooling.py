"""Texts and parameters to pool: what becomes of them, what is refused, and how long texts are cut."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pagewire.frontend.requests.inputs import Intake
from pagewire.frontend.requests.pooling.inputs import check_pooling_params, prepare_pooling
from pagewire.frontend.requests.pooling.outputs import PoolingOutput
from pagewire.frontend.requests.pooling.scoring import cosine, max_sim, pairs_of
from pagewire.frontend.requests.pooling.text import encode, shares, take_beginning
from pagewire.frontend.text.prompts import TextPair
from pagewire.frontend.text.tokenizer import load_tokenizer
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import EmbeddingsInfo
from pagewire.ipc.wire.pooling import PoolerConfig, PoolingInfo, PoolingParams
from tests.engine_core.admission.test_pooling import info
from tests.frontend.word_pieces import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def tensor(*rows: list[float]) -> PoolingOutput:
    import array

    data = array.array("f", [value for row in rows for value in row]).tobytes()
    shape = (len(rows), len(rows[0])) if len(rows) > 1 else (len(rows[0]),)
    return PoolingOutput(Tensor("float32", shape, data))


@pytest.mark.parametrize("keep", [4, 5, 8, 9, 20])
@pytest.mark.parametrize(("first", "second"), [(3, None), (30, None), (3, 30), (30, 3), (12, 11), (2, 2)])
def test_cuts_as_the_library_does(tokenizer: Any, keep: int, first: int, second: int | None) -> None:
    """The strategy "longest_first" of tokenizers, which sentence-transformers uses."""
    import tokenizers

    texts = [" ".join(["cat", "sat", "mat"][i % 3] for i in range(n)) for n in (first, second or 0)]
    oracle = tokenizers.Tokenizer.from_str(tokenizer.original.to_str())
    oracle.enable_truncation(keep, strategy="longest_first")
    expected = oracle.encode(texts[0], None if second is None else texts[1])
    found = encode(tokenizer, texts[0], None if second is None else texts[1], keep, 64)
    assert found.token_ids == expected.ids
    assert found.second == (expected.type_ids.index(1) if 1 in expected.type_ids else 0)
    assert sum(shares([first, second or 0], keep)) <= max(keep, first + (second or 0))


def test_a_long_text_costs_what_its_beginning_costs(tokenizer: Any) -> None:
    """Of ten megabytes only the beginning is tokenized; of one word with no end, as much as it takes."""
    text = "the cat sat on the mat " * (10 << 20 >> 4)
    sizes: list[int] = []
    original = tokenizer.encode

    class Counting:
        def encode(self, part: str, special: bool) -> list[int]:
            sizes.append(len(part))
            return original(part, special)  # type: ignore[no-any-return]

    part = take_beginning(Counting(), text, 64)  # type: ignore[arg-type]
    assert sum(sizes) < 20_000 and text.startswith(part)
    assert encode(tokenizer, text, None, 64, 64) == encode(tokenizer, text[:5000], None, 64, 64)
    assert len(encode(tokenizer, "ab" * 300_000, None, 64, 64).token_ids) == 3


def test_requests_of_texts_and_pairs(tokenizer: Any) -> None:
    pooling = PoolingInfo(
        ["embed"], "MEAN", 8, token_types=True, prompts={"query": "query : "}, default_prompt_name=None
    )
    intake = Intake(info(pooling), tokenizer)
    params = check_pooling_params(PoolingParams(prompt_name="query"), intake.info)
    assert (params.task, params.all_tokens) == ("embed", True)
    plain, named, pair = (
        prepare_pooling(intake, prompt, own, "r").request
        for prompt, own in (
            ("cat", check_pooling_params(None, intake.info)),
            ({"prompt": "cat", "cache_salt": "s"}, params),
            (TextPair("cat", "dog"), check_pooling_params(None, intake.info)),
        )
    )
    ids = {word: tokenizer.original.token_to_id(word) for word in ("cat", "dog", "query", ":")}
    assert plain.prompt.token_ids == [2, ids["cat"], 3]
    assert named.prompt.token_ids == [2, ids["query"], ids[":"], ids["cat"], 3]
    assert named.prompt.cache_salt == "s"
    assert pair.prompt.token_ids == [2, ids["cat"], 3, ids["dog"], 3]
    assert isinstance(pair.task, PoolingParams) and pair.task.second_segment == 3


def test_token_types_of_token_ids(tokenizer: Any) -> None:
    """As `transformers` takes them, where the model has them."""
    ids = [2, 5, 3, 6, 3]
    for has_types in (True, False):
        intake = Intake(info(PoolingInfo(["embed"], "MEAN", 8, token_types=has_types)), tokenizer)

        def second(types: Any, **fields: Any) -> int:
            params = check_pooling_params(PoolingParams(**fields), intake.info)  # noqa: B023
            prompt = {"prompt_token_ids": ids, "token_type_ids": types}
            task = prepare_pooling(intake, prompt, params, "r").request.task  # noqa: B023
            assert isinstance(task, PoolingParams)
            return task.second_segment

        assert second(None) == second([0] * 5) == 0
        if not has_types:
            with pytest.raises(ValueError, match="token_type_ids: this model has no token types"):
                second([0, 0, 0, 1, 1])
            continue
        assert second([0, 0, 0, 1, 1]) == 3
        assert second([0, 0, 0, 1, 1], truncate_prompt_tokens=3) == 0
        for wrong in ([1] * 5, [0, 1, 0, 1, 1], [0, 0, 0, 1, 2], [0, 0, 0, 1, "1"]):
            with pytest.raises(ValueError, match="must be 0 for a first text, and then 1"):
                second(wrong)
        with pytest.raises(ValueError, match="has 4 entries, but the prompt 5 tokens"):
            second([0] * 4)
        with pytest.raises(TypeError, match="must be a list of 0 and 1, got 'no'"):
            second("no")
        with pytest.raises(ValueError, match=r"token_type_ids: .* with token ids"):
            prepare_pooling(
                intake, {"prompt": "cat", "token_type_ids": [0]}, check_pooling_params(None, intake.info), "r"
            )


EMBEDDER = info(PoolingInfo(["embed"], "LAST", 8))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (PoolingParams(task="classify"), "does not serve the task 'classify'"),
        (PoolingParams(task="reward"), "does not serve the task 'reward'"),
        (PoolingParams(dimensions=4), "were not trained for fewer"),
        (PoolingParams(prompt_name="quer"), "this model has none"),
        (PoolingParams(truncate_prompt_tokens=33), "over this model's maximum context length"),
    ],
)
def test_parameters_that_do_not_fit(params: PoolingParams, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_pooling_params(params, EMBEDDER)


def test_prompts_that_do_not_fit(tokenizer: Any) -> None:
    intake = Intake(EMBEDDER, tokenizer)
    params = check_pooling_params(None, EMBEDDER)
    for prompt, text in (
        ("cat " * 60, "maximum context length is 32"),
        ([1] * 33, "maximum context length is 32"),
        ([100], "outside the vocabulary of 100"),
        ([], "empty"),
        ("\ud800", "not valid Unicode"),
        ({"prompt": "cat", "prompt_embeds": [1]}, "takes no embeddings"),
        (TextPair("cat", "dog", ""), "cache_salt must not be empty"),
    ):
        with pytest.raises(ValueError, match=text):
            prepare_pooling(intake, prompt, params, "r")
    named = PoolingParams(task="embed", prompt_name="query")
    for prompt, text in (
        ([1, 2], "not before token ids"),
        (TextPair("cat", "dog"), "not before a pair of texts"),
    ):
        with pytest.raises(ValueError, match=text):
            prepare_pooling(intake, prompt, named, "r")
    with pytest.raises(ValueError, match="pools and does not generate"):
        intake.prepare("cat", None, "r")
    with pytest.raises(ValueError, match="generates text and does not pool"):
        check_pooling_params(None, info(None))


def test_what_parameters_refuse() -> None:
    for fields, text in (
        ({"task": "embedding"}, "unknown pooling task"),
        ({"dimensions": 0}, "dimensions must be at least 1"),
        ({"truncate_prompt_tokens": 0}, "at least 1, got 0"),
        ({"softmax": True, "activation": False}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=text):
            PoolingParams(**fields)
    assert PoolingParams(softmax=False).activation is False
    with pytest.raises(ValueError, match="unknown field of pooler_config"):
        PoolerConfig.read({"pooling_typ": "MEAN"})
    with pytest.raises(ValueError, match="must be one of LAST"):
        PoolerConfig.read({"pooling_type": "MAX"})


def test_scores_of_embeddings() -> None:
    assert cosine(tensor([1.0, 0.0]), tensor([1.0, 1.0])) == pytest.approx(2**-0.5)
    assert cosine(tensor([0.0, 0.0]), tensor([1.0, 1.0])) == 0.0
    query, document = tensor([1.0, 0.0], [0.0, 1.0]), tensor([0.5, 0.25], [0.0, 2.0])
    assert max_sim(query, document) == 2.5
    assert len(pairs_of("a", ["b", "c"])[1]) == 2
    with pytest.raises(ValueError, match="2 texts cannot be scored against 3"):
        pairs_of(["a", "b"], ["c", "d", "e"])


def test_embeddings_are_pooled_without_text() -> None:
    takes = msgspec.structs.replace(EMBEDDER, embeddings=EmbeddingsInfo(4, prompts=True))
    intake, params = Intake(takes, None), check_pooling_params(None, takes)
    rows: Any = {"prompt_embeds": np.ones((5, 4), np.float32), "cache_salt": "s"}
    prepared = prepare_pooling(intake, rows, params, "r")
    content = prepared.request.prompt
    assert (content.token_ids, content.cache_salt, prepared.prompt_text) == ([0] * 5, "s", None)
    assert [medium.num_tokens for medium in content.media] == [5]
    cut = check_pooling_params(PoolingParams(truncate_prompt_tokens=3), takes)
    with pytest.raises(ValueError, match="truncate_prompt_tokens does not go with prompt_embeds"):
        prepare_pooling(intake, rows, cut, "r")
