"""Typed decisions: questions about a state, and the probability of each allowed answer, without text.

    question --> prompt, labels --> two reads of the next token --> shares of the labels --> answer

A question is one message of a user, which begins with the state, so the prefix cache has it for all but the first.
Each answer has a label, which is one token where the reply begins. One read has the labels' shares, exactly, as the
only tokens that are allowed; another the likeliest label's own probability among all tokens.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.frontend import wiring
from pagewire.frontend.requests.outputs import RequestOutput
from pagewire.frontend.text.prompts import TokensPrompt
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams

MAX_QUESTIONS, MAX_OPTIONS, MAX_LEVELS = 64, 26, 10
YES_NO = (("yes", ("yes", "Yes")), ("no", ("no", "No")))

QuestionId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
OptionName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class ChoiceQuestion(msgspec.Struct, tag="choice", forbid_unknown_fields=True):
    """Which of several options is right. criteria: descriptions by the options' names."""

    instructions: str
    criteria: Annotated[dict[OptionName, str | None], Meta(min_length=1, max_length=MAX_OPTIONS)]


class YesOrNoQuestion(msgspec.Struct, tag="noul", forbid_unknown_fields=True):
    """Whether something is true. criteria: what "true" and "false" mean."""

    instructions: str
    criteria: dict[Literal["true", "false"], str | None] | None = None


class RatingQuestion(msgspec.Struct, tag="score", forbid_unknown_fields=True):
    """How far up a scale something is. criteria: the names of the levels, the lowest first."""

    instructions: str
    criteria: Annotated[list[str], Meta(min_length=2, max_length=MAX_LEVELS)]


Question: TypeAlias = ChoiceQuestion | YesOrNoQuestion | RatingQuestion
Questions: TypeAlias = Annotated[dict[QuestionId, Question], Meta(min_length=1, max_length=MAX_QUESTIONS)]


class ChoiceAnswer(msgspec.Struct, tag="choice"):
    """The likeliest option, and the probability of each by its name. confidence: its own among all tokens."""

    choice: str
    probabilities: dict[str, float]
    confidence: float


class YesOrNoAnswer(msgspec.Struct, tag="noul"):
    """noul: the probability of yes. confidence: that of the likelier answer among all tokens."""

    noul: float
    probabilities: dict[str, float]
    confidence: float


class RatingAnswer(msgspec.Struct, tag="score"):
    """score: the expected level, counted from 0. legend: the levels' names. probabilities: of each, by number."""

    score: float
    legend: dict[str, str]
    probabilities: dict[str, float]
    confidence: float


class Diagnostics(msgspec.Struct):
    """How far the model kept to the labels.

    label_mass: the probability of all labels among all tokens. argmax_is_label: the likeliest token is one.
    """

    label_mass: float
    argmax_is_label: bool


Answer: TypeAlias = ChoiceAnswer | YesOrNoAnswer | RatingAnswer


class Decision(msgspec.Struct):
    """The answer to one question."""

    answer: Answer
    diagnostics: Diagnostics


class LabelledAnswer(NamedTuple):
    """An answer that is allowed. name: its key in `probabilities`. labels: spellings, all of which count for it."""

    name: str
    labels: tuple[str, ...]
    description: str


class PreparedQuestion(NamedTuple):
    """A question as it is read. label_ids: the tokens of each answer."""

    question: Question
    prompt: TokensPrompt
    names: list[str]
    label_ids: list[list[int]]

    @property
    def params(self) -> tuple[SamplingParams, SamplingParams]:
        """The parameters of two reads: for the labels' shares, and for the likeliest label among all tokens."""
        ids = sorted(token_id for own in self.label_ids for token_id in own)
        shared: dict[str, Any] = {
            "max_tokens": 1,
            "allowed_token_ids": ids,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "seed": 0,
        }
        shares = SamplingParams(temperature=1.0, logprobs=len(ids), processed_logprobs=True, **shared)
        return shares, SamplingParams(temperature=0.0, logprobs=1, **shared)

    def decision(self, shares: RequestOutput, likeliest: RequestOutput) -> Decision:
        """The decision by the two reads."""
        found = _logprobs(shares)
        by_name = {
            name: math.fsum(math.exp(found[token_id]) for token_id in ids)
            for name, ids in zip(self.names, self.label_ids, strict=True)
        }
        total = math.fsum(by_name.values())
        probabilities = {name: value / total for name, value in by_name.items()}
        (token_id,) = likeliest.outputs[0].token_ids
        among_all = _logprobs(likeliest)
        mass = min(1.0, math.exp(among_all[token_id] - found[token_id]))
        best = max(among_all, key=lambda each: (among_all[each], -each))
        is_label = any(best in ids for ids in self.label_ids)
        return Decision(make_answer(self.question, probabilities, mass), Diagnostics(mass, is_label))


class AskedQuestion:
    """A question to a model, or to its adapter.

    Attributes:
        allowed: the answers to it, with their labels.
    """

    def __init__(self, question: Question, tokenizer: Tokenizer) -> None:
        self._question, self._tokenizer = question, tokenizer
        self.allowed = answers_allowed(question, tokenizer)

    def message(self, state: Any, instructions: str | None) -> str:
        """Return the message that asks it. It begins with the state, which all questions share."""
        text = state if isinstance(state, str) else msgspec.json.encode(state).decode()
        lines = [text, "", *([instructions, ""] if instructions else []), self._question.instructions]
        lines += [f"{each.labels[0]} = {each.description}" for each in self.allowed if each.description]
        labels = ", ".join(each.labels[0] for each in self.allowed)
        return "\n".join([*lines, f"Answer with one of {labels} and nothing else."])

    def prepare(self, prompt: TokensPrompt, salt: str | None = None) -> PreparedQuestion:
        """Find the tokens of the labels after its prompt. salt: the prompt's cache salt.

        Raises:
            ValueError: a label is not one token there, or two are the same.
        """
        names, label_ids, seen = [], [], set[int]()
        for each in self.allowed:
            ids = [_label_id(self._tokenizer, prompt, label, salt) for label in each.labels]
            known = [token_id for token_id in ids if token_id is not None and token_id not in seen]
            if ids[0] is None or not known:
                raise ValueError(
                    f"the label {quoted(each.labels[0])} is not one token of its own where this model's reply "
                    "begins, so its probability cannot be read"
                )
            seen.update(known)
            names.append(each.name)
            label_ids.append(known)
        return PreparedQuestion(self._question, prompt, names, label_ids)


def _logprobs(output: RequestOutput) -> dict[int, float]:
    """The log probabilities of the only token's candidates."""
    rows = output.outputs[0].logprobs
    candidates = None if rows is None else rows[0]
    assert candidates is not None, "the parameters ask for them"
    return {token_id: entry.logprob for token_id, entry in candidates.items()}


def make_answer(question: Question, probabilities: dict[str, float], mass: float) -> Answer:
    """The answer to a question. mass: of all labels."""
    best = max(probabilities, key=lambda name: probabilities[name])
    confidence = probabilities[best] * mass
    if isinstance(question, ChoiceQuestion):
        return ChoiceAnswer(best, probabilities, confidence)
    if isinstance(question, YesOrNoQuestion):
        return YesOrNoAnswer(probabilities["yes"], probabilities, confidence)
    score = math.fsum(int(level) * value for level, value in probabilities.items())
    legend = {str(level): name for level, name in enumerate(question.criteria)}
    return RatingAnswer(score, legend, probabilities, confidence)


def answers_allowed(question: Question, tokenizer: Tokenizer) -> list[LabelledAnswer]:
    """Return the answers to a question, with their labels: letters, numbers, or yes and no, if these are tokens."""
    if isinstance(question, ChoiceQuestion):
        named = zip(string.ascii_uppercase, question.criteria.items(), strict=False)
        return [
            LabelledAnswer(name, (letter,), f"{name}: {text}" if text else name)
            for letter, (name, text) in named
        ]
    if isinstance(question, YesOrNoQuestion):
        texts = question.criteria or {}
        meaning = (texts.get("true") or "", texts.get("false") or "")
        if all(len(tokenizer.encode(name, add_special_tokens=False)) == 1 for name, _ in YES_NO):
            words = zip(YES_NO, meaning, strict=True)
            return [LabelledAnswer(name, labels, text) for (name, labels), text in words]
        rows = zip(("yes", "no"), "AB", meaning, strict=True)
        return [
            LabelledAnswer(name, (label,), f"{name}: {text}" if text else name) for name, label, text in rows
        ]
    return [LabelledAnswer(str(level), (str(level),), name) for level, name in enumerate(question.criteria)]


def decision_variables(
    tokenizer: Tokenizer, chat_template: str | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The variables of the chat template: those given, and no reasoning for a template that can begin with one.

    Raises:
        ValueError: there is no template.
    """
    reads = "enable_thinking" in wiring.template_source(tokenizer, chat_template, with_tools=False)
    return ({"enable_thinking": False} if reads else {}) | dict(given or {})


def _label_id(tokenizer: Tokenizer, prompt: TokensPrompt, label: str, salt: str | None) -> int | None:
    """The token that a label is behind a prompt; None if it is not one, or changes those before it."""
    before = prompt["prompt_token_ids"]
    ids = tokenizer.encode_turn(prompt["prompt"] + label, False, salt)
    if len(ids) != len(before) + 1 or ids[:-1] != before:
        return None
    shown = tokenizer.decode(ids[-1:], skip_special_tokens=False)  # not a token for unknown words
    return ids[-1] if shown.strip() == label else None


def questions_of(given: Mapping[str, Any]) -> dict[str, Question]:
    """Questions given as structs or as the objects that /v1/systemone takes.

    Raises:
        msgspec.ValidationError: (a ValueError) one is malformed, or they are too many.
    """
    plain = {name: msgspec.to_builtins(question) for name, question in given.items()}
    questions: dict[str, Question] = msgspec.convert(plain, Questions)
    return questions


def reads_of(prepared: Sequence[PreparedQuestion]) -> tuple[list[TokensPrompt], list[SamplingParams]]:
    """The prompts and parameters of all reads, two for each question."""
    prompts = [each.prompt for each in prepared for _ in range(2)]
    return prompts, [params for each in prepared for params in each.params]


def decisions_of(prepared: Sequence[PreparedQuestion], outputs: Sequence[RequestOutput]) -> list[Decision]:
    """The decisions, given the outputs of `reads_of`."""
    return [
        each.decision(*pair)
        for each, pair in zip(prepared, zip(outputs[::2], outputs[1::2], strict=True), strict=True)
    ]
