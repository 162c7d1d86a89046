"""Questions, their labels, and answers from log probabilities."""

from __future__ import annotations

import math

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pagewire.frontend.requests.decisions import (
    AskedQuestion,
    ChoiceQuestion,
    RatingAnswer,
    RatingQuestion,
    YesOrNoAnswer,
    YesOrNoQuestion,
    make_answer,
)
from pagewire.frontend.text.prompts import TokensPrompt
from pagewire.frontend.text.tokenizer import FastTokenizer

QUESTION = YesOrNoQuestion("Is it?", {"false": "it is not"})


def tokenizer(*words: str) -> FastTokenizer:
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return FastTokenizer(own)


def prompt_for(own: FastTokenizer, text: str) -> TokensPrompt:
    return TokensPrompt(prompt=text, prompt_token_ids=own.encode(text))


def test_spellings_count_together() -> None:
    own = tokenizer("yes", "Yes", "no")
    asked = AskedQuestion(QUESTION, own)
    assert [(each.name, each.labels) for each in asked.allowed] == [
        ("yes", ("yes", "Yes")),
        ("no", ("no", "No")),
    ]
    prepared = asked.prepare(prompt_for(own, "a b "))
    assert prepared.names == ["yes", "no"]
    assert prepared.label_ids == [[1, 2], [3]]  # "No" is unknown
    shares, likeliest = prepared.params
    assert shares.allowed_token_ids == likeliest.allowed_token_ids and shares.processed_logprobs


def test_the_state_comes_first() -> None:
    own = tokenizer("yes", "no")
    message = AskedQuestion(QUESTION, own).message({"a": 1}, "Be strict.")
    assert message.startswith('{"a":1}\n') and message.index("Be strict.") < message.index("Is it?")
    assert "no = it is not" in message and message.endswith("Answer with one of yes, no and nothing else.")


def test_labels_must_be_tokens_of_their_own() -> None:
    own = tokenizer("A", "B")
    choice = ChoiceQuestion("Which?", {"one": None, "two": "the second", "three": None})
    asked = AskedQuestion(choice, own)
    assert [each.description for each in asked.allowed] == ["one", "two: the second", "three"]
    with pytest.raises(ValueError, match="'A' is not one token"):  # it is one with the word before it
        asked.prepare(prompt_for(own, "x"))
    del asked.allowed[2]
    assert asked.prepare(prompt_for(own, "x ")).label_ids == [[1], [2]]


def test_answers() -> None:
    score = make_answer(RatingQuestion("?", ["low", "middle", "high"]), {"0": 0.25, "1": 0.25, "2": 0.5}, 0.5)
    assert score == RatingAnswer(
        1.25, {"0": "low", "1": "middle", "2": "high"}, {"0": 0.25, "1": 0.25, "2": 0.5}, 0.25
    )
    answer = make_answer(QUESTION, {"yes": 0.2, "no": 0.8}, 1.0)
    assert isinstance(answer, YesOrNoAnswer) and math.isclose(answer.noul, 0.2) and answer.confidence == 0.8
