"""Typed decisions of the demo model: probabilities are those of transformers, and the same each time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire import LLM
from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.requests.decisions import (
    AskedQuestion,
    ChoiceAnswer,
    ChoiceQuestion,
    RatingAnswer,
    RatingQuestion,
    YesOrNoAnswer,
    YesOrNoQuestion,
)
from pagewire.ipc.files.hub import model_folder
from tests.frontend.server.client import Client

STATE = {"ticket": "A list was changed while a for statement ran over it."}
QUESTIONS: dict[str, Any] = {
    "part": ChoiceQuestion("Which part is it about?", {"lists": "sequences", "files": None, "classes": None}),
    "bug": YesOrNoQuestion("Is it a bug?", {"true": "something is wrong"}),
    "hard": RatingQuestion("How hard is it?", ["easy", "middling", "hard", "very hard"]),
}
LABELS = {"part": ["A", "B", "C"], "bug": ["A", "B"], "hard": ["0", "1", "2", "3"]}


@pytest.fixture(scope="module")
def llm(address: str) -> Iterator[LLM]:
    with LLM.attach(address) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, dict[str, float]]:
    """The probability of each label among all tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_folder("demo"), dtype=torch.float32)
    tokenizer, found = llm.get_tokenizer(), {}
    own = llm.session.intake.tokenizer
    assert own is not None
    for name, question in QUESTIONS.items():
        messages = [{"role": "user", "content": AskedQuestion(question, own).message(STATE, None)}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        with torch.no_grad():
            probabilities = model(torch.tensor([ids])).logits[0, -1].double().softmax(0)
        found[name] = {
            label: float(probabilities[tokenizer.convert_tokens_to_ids(label)]) for label in LABELS[name]
        }
    return found


def close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=2e-4, abs_tol=1e-9)


def test_probabilities_are_those_of_transformers(llm: LLM, expected: dict[str, dict[str, float]]) -> None:
    decisions = llm.decide(STATE, QUESTIONS)
    assert list(decisions) == list(QUESTIONS)
    for name, decision in decisions.items():
        mass = sum(expected[name].values())
        assert close(decision.diagnostics.label_mass, mass)
    part, bug, hard = (decision.answer for decision in decisions.values())
    assert (
        isinstance(part, ChoiceAnswer) and isinstance(bug, YesOrNoAnswer) and isinstance(hard, RatingAnswer)
    )
    letters, mass = expected["part"], sum(expected["part"].values())
    for name, letter in zip(("lists", "files", "classes"), "ABC", strict=True):
        assert close(part.probabilities[name], letters[letter] / mass)
    assert part.choice == max(part.probabilities, key=lambda each: part.probabilities[each])
    assert close(part.confidence, max(letters.values()))
    words = expected["bug"]
    assert close(bug.noul, words["A"] / sum(words.values()))  # "yes" is no token of this model
    levels, mass = expected["hard"], sum(expected["hard"].values())
    assert close(hard.score, sum(int(level) * value for level, value in levels.items()) / mass)
    assert hard.legend == {"0": "easy", "1": "middling", "2": "hard", "3": "very hard"}


def test_decisions_are_the_same_alone_and_together(llm: LLM) -> None:
    """Bit by bit: whatever runs beside them, and whether the state was cached."""
    together = llm.decide(STATE, QUESTIONS)
    assert llm.decide(STATE, QUESTIONS) == together
    llm.reset_prefix_cache()
    for name, question in reversed(QUESTIONS.items()):
        assert llm.decide(STATE, {name: question}) == {name: together[name]}


def test_questions_are_objects_too(llm: LLM) -> None:
    plain = {
        "part": {"type": "choice", "instructions": "Which?", "criteria": {"a": None, "b": "second"}},
        "bug": {"type": "noul", "instructions": "Is it?"},
    }
    typed = {"part": ChoiceQuestion("Which?", {"a": None, "b": "second"}), "bug": YesOrNoQuestion("Is it?")}
    assert llm.decide("a state", plain) == llm.decide("a state", typed)


@pytest.mark.parametrize(
    "question",
    [
        {"type": "choice", "instructions": "?", "criteria": {}},
        {"type": "choice", "instructions": "?", "criteria": {str(number): None for number in range(27)}},
        {"type": "score", "instructions": "?", "criteria": ["one"]},
        {"type": "noul", "instructions": "?", "more": 1},
        {"type": "else", "instructions": "?"},
    ],
)
def test_malformed_questions_are_refused(llm: LLM, question: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected|unknown|Invalid"):
        llm.decide("a state", {"q": question})
    with pytest.raises(ValueError, match="length"):
        llm.decide("a state", {})


def test_over_http(address: str, llm: LLM) -> None:
    engine = AsyncLLM.attach(address)
    client = Client(engine)
    body: dict[str, Any] = {
        "state": STATE,
        "questions": {
            "part": {
                "type": "choice",
                "instructions": "Which part is it about?",
                "criteria": {"lists": "sequences", "files": None, "classes": None},
            },
            "hard": {
                "type": "score",
                "instructions": "How hard is it?",
                "criteria": ["easy", "middling", "hard", "very hard"],
            },
        },
    }
    answer = client.post("/v1/systemone", body).json
    decisions = llm.decide(STATE, {name: QUESTIONS[name] for name in ("part", "hard")})
    part, hard = (decision.answer for decision in decisions.values())
    assert isinstance(part, ChoiceAnswer) and isinstance(hard, RatingAnswer)
    assert answer["object"] == "structured_decision" and answer["id"].startswith("decision-")
    assert answer["answers"]["part"] == {
        "type": "choice",
        "choice": part.choice,
        "probabilities": part.probabilities,
        "confidence": part.confidence,
    }
    assert answer["answers"]["hard"]["score"] == hard.score
    assert answer["usage"]["output_tokens"] == 2 and answer["usage"]["input_tokens"] > 50
    assert answer["diagnostics"]["part"]["label_mass"] == decisions["part"].diagnostics.label_mass
    body["questions"]["part"]["criteria"] = {}
    assert client.post("/v1/systemone", body).status == 422
    engine.shutdown()
