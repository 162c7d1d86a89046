"""Structured output on the demo model: whatever is finished is what was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pagewire import (
    LLM,
    GuidedDecodingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from pagewire.frontend.requests.outputs import BatchError
from tests.end_to_end.http_server import Server

SCHEMAS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"), parse_float=Decimal
)
SEEDS = 3
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def params_for_schemas(seeds: int) -> list[SamplingParams]:
    """For each of `SCHEMAS`, as many requests as seeds."""
    return [
        SamplingParams(
            seed=seed,
            max_tokens=300,
            structured_outputs=StructuredOutputsParams(json=json.dumps(entry["schema"], default=float)),
        )
        for entry in SCHEMAS
        for seed in range(seeds)
    ]


def outputs_of(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    """The outputs of a batch, those that were refused among them."""
    try:
        return llm.generate(list(prompts), params, use_tqdm=False)
    except BatchError as error:
        return error.outputs


def exact(text: str) -> Decimal | float:
    """A number as it is written; 1e999999999999 is beyond decimals, too."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Does a text follow a schema? With decimal numbers: 0.3 is a multiple of 0.1."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    found: bool = kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(
        json.loads(text, parse_float=exact)
    )
    return found


def faults(outputs: list[RequestOutput], seeds: int) -> list[tuple[dict[str, Any], str]]:
    """(schema, text) of finished outputs that do not follow theirs. outputs: for `params_for_schemas(seeds)`."""
    found = []
    for i, output in enumerate(outputs):
        schema, completion = SCHEMAS[i // seeds]["schema"], output.outputs[0]
        if completion.finish_reason == "stop" and not is_valid(completion.text, schema):
            found.append((schema, completion.text))
    return found


def test_every_finished_output_validates(llm: LLM) -> None:
    params = params_for_schemas(SEEDS)
    size = (
        20 * SEEDS
    )  # 20 schemas at a time: a slow machine compiles no more before the last one has waited too long
    parts = [params[start : start + size] for start in range(0, len(params), size)]
    outputs = [output for part in parts for output in outputs_of(llm, ["The answer is"] * len(part), part)]
    assert faults(outputs, SEEDS) == []
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert len(SCHEMAS) >= 150 and reasons.count("error") <= 0.15 * len(reasons)
    assert reasons.count("stop") > 0.75 * len(reasons)
    for start in range(0, len(reasons), SEEDS):  # a schema is served or refused, whatever the seed
        assert len({reason == "error" for reason in reasons[start : start + SEEDS]}) == 1


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {"type": "integer"}, "then": {"minimum": 5}}, '"if", "then"'),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "format": "regex"}, "format: regex"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.com/a.json"}, "example.com/a.json is not in the schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no output can satisfy it"),
        ({"type": "object", "minProperties": 2}, "minProperties: 2"),
        ({"type": "integer", "multipleOf": 10**9}, "multipleOf: 1000000000"),
        ({"type": "elephant"}, "elephant"),
    ],
)
def test_what_is_not_supported_is_named(llm: LLM, schema: dict[str, Any], named: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        llm.generate("x", params, use_tqdm=False)
    assert (
        isinstance(caught.value, BatchError) and caught.value.outputs[0].outputs[0].finish_reason == "error"
    )


CASES: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
    ({"regex": "^(yes|no)!$"}, "(yes|no)!"),
    ({"choice": ["red", "green", "dark blue", 'a "quoted" one', "größer 😀"]}, ".+"),
    ({"grammar": 'root ::= "a" [b-d]{3} tail\ntail ::= "e" | "f" tail'}, "a[b-d]{3}f*e"),
    ({"grammar": 'start: "[" WORD ("," WORD)* "]"\nWORD: /[a-z]{1,4}/'}, r"\[[a-z]{1,4}(,[a-z]{1,4})*\]"),
]


@pytest.mark.parametrize(("structure", "pattern"), CASES)
def test_regular_expressions_choices_and_grammars(llm: LLM, structure: dict[str, Any], pattern: str) -> None:
    params = [
        SamplingParams(max_tokens=200, n=4, seed=5, structured_outputs=StructuredOutputsParams(**structure)),
        SamplingParams(max_tokens=200, temperature=0, guided_decoding=GuidedDecodingParams(**structure)),
    ]
    outputs = llm.generate(["Say something"] * 2, params, use_tqdm=False)
    finished = [c for output in outputs for c in output.outputs if c.finish_reason == "stop"]
    assert len(finished) >= 3
    for completion in finished:
        assert re.fullmatch(pattern, completion.text)
        assert "choice" not in structure or completion.text in structure["choice"]


def test_a_json_object_and_bounded_whitespace(llm: LLM) -> None:
    params = SamplingParams(max_tokens=400, n=8, seed=3, structured_outputs={"json_object": True})  # type: ignore[arg-type]
    finished = [
        completion.text
        for completion in llm.generate("Data:", params, use_tqdm=False)[0].outputs
        if completion.finish_reason == "stop"
    ]
    assert finished and all(isinstance(json.loads(text), dict) for text in finished)
    for text in finished:
        strings = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert re.search(r"\n\s*\n| {21}|^\s|\s$", strings) is None


def test_whitespace_and_additional_properties_are_options(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    structure = StructuredOutputsParams(
        json=schema, disable_any_whitespace=True, disable_additional_properties=True
    )
    params = SamplingParams(n=8, seed=1, max_tokens=50, structured_outputs=structure)
    texts = {completion.text for completion in llm.generate("x", params, use_tqdm=False)[0].outputs}
    assert texts <= {'{"a":true}', '{"a":false}'}


def test_tagged_parts_follow_their_schema(llm: LLM) -> None:
    tag = {"structures": [{"begin": "<add>", "schema": PERSON, "end": "</add>"}], "triggers": ["<"]}
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    params = SamplingParams(
        n=8,
        seed=2,
        max_tokens=120,
        logit_bias={tokenizer.encode("<", False)[-1]: 8.0},
        structured_outputs=StructuredOutputsParams(structural_tag=tag),
    )
    outputs = llm.generate("Call it:", params, use_tqdm=False)[0].outputs
    parts = [part for output in outputs for part in output.text.split("<add>")[1:] if "</add>" in part]
    assert parts
    for part in parts:
        assert is_valid(part.partition("</add>")[0], PERSON)
    for output in outputs:  # nothing but tags begins with the trigger
        assert re.search("<(?!a|$)", re.sub("<add>.*?(</add>|$)", "", output.text, flags=re.DOTALL)) is None


def test_a_grammar_that_allows_everything_changes_nothing(llm: LLM) -> None:
    prompts = ["Once", "The list is", "A dictionary", "x = "]
    plain = SamplingParams(max_tokens=40, temperature=0, logprobs=2)
    masked = plain.clone()
    masked.structured_outputs = StructuredOutputsParams(regex=r"(.|\n)*")
    outputs = llm.generate(prompts * 2, [plain] * 4 + [masked] * 4, use_tqdm=False)
    for one, other in zip(outputs[:4], outputs[4:], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_other_parameters_hold_as_well(llm: LLM) -> None:
    digits = StructuredOutputsParams(regex="[0-9]{1,30}")
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    seven, eight = (tokenizer.encode(digit, False)[-1] for digit in "78")
    asked = [
        SamplingParams(max_tokens=40, structured_outputs=digits, min_tokens=10, seed=1),
        SamplingParams(max_tokens=40, structured_outputs=digits, allowed_token_ids=[seven, 2], seed=1),
        SamplingParams(max_tokens=40, structured_outputs=digits, logit_bias={eight: 100.0}, ignore_eos=True),
        SamplingParams(
            max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[ab]"), bad_words=["a"]
        ),
        SamplingParams(max_tokens=3, structured_outputs=StructuredOutputsParams(regex="[0-9]{30}")),
        SamplingParams(max_tokens=40, structured_outputs=digits, stop_token_ids=[seven], temperature=0),
        SamplingParams(max_tokens=40, structured_outputs=digits, stop="5", include_stop_str_in_output=True),
        SamplingParams(max_tokens=40, structured_outputs=digits, allowed_token_ids=[2, 300], seed=1),
    ]
    outputs = [output.outputs[0] for output in outputs_of(llm, ["n = "] * len(asked), asked)]
    least, only, biased, without, cut, _, stopped, nothing = outputs
    assert re.fullmatch("[0-9]{10,30}", least.text) and len(least.token_ids) >= 10
    assert re.fullmatch("7*", only.text)
    assert biased.text == "8" * 30 and biased.finish_reason == "stop"
    assert without.text == "b"
    assert cut.finish_reason == "length" and re.fullmatch("[0-9]+", cut.text)
    assert all(re.fullmatch("[0-9]*", output.text) for output in outputs if output is not without)
    assert stopped.stop_reason != "5" or stopped.text.endswith("5")
    assert nothing.finish_reason in ("stop", "error") and len(nothing.text) == 0


def test_an_error_in_one_request_leaves_the_others_alone(llm: LLM) -> None:
    good = SamplingParams(max_tokens=20, temperature=0)
    expected = llm.generate("Once", good, use_tqdm=False)[0].outputs[0].token_ids
    impossible = SamplingParams(
        max_tokens=20,
        structured_outputs={"regex": "[0-9]+"},
        allowed_token_ids=[300],  # type: ignore[arg-type]
    )
    refused = SamplingParams(max_tokens=20, structured_outputs={"regex": "("})  # type: ignore[arg-type]
    outputs = outputs_of(llm, ["Once"] * 4, [good, impossible, refused, good])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert outputs[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids == expected


ALTERNATIVES = {
    "anyOf": [
        {"type": "object", "properties": {f"p{i}": {"type": "integer"}, "q": {"type": "string"}}}
        for i in range(395)
    ]
}
LATE = {
    "type": "object",
    "properties": {"a": {"const": "x y z " * 20}, "b": ALTERNATIVES},
    "required": ["a", "b"],
    "additionalProperties": False,
}


FAILING = (
    ({"guided_json": ALTERNATIVES}, "json: too complex"),
    ({"guided_json": {"type": "string", "pattern": "a?" * 2500}}, "json: too complex"),
    (
        {"structured_outputs": {"json": LATE, "disable_any_whitespace": True}},
        "does not fit the grammar",  # after many tokens
    ),
    ({"guided_regex": "([a-f][0-9]){20}" + "a?" * 2000}, "too many expressions"),  # the same
    ({"allowed_token_ids": [2], "min_tokens": 5}, "no token can be generated"),  # found by the worker
)


def test_a_grammar_that_fails_is_the_client_s_mistake(
    start_server: Callable[..., Server], address: str
) -> None:
    """Whether it fails before or after the first tokens, in a stream and out of it."""
    server = start_server("--attach", address, "--port", "0")
    asked = [{"role": "user", "content": "Hi"}]
    for constraint, message in FAILING:
        for path, body in (
            ("/v1/completions", {"prompt": "The"}),
            ("/v1/chat/completions", {"messages": asked}),
        ):
            fields = body | constraint | {"max_tokens": 200}
            status, answer = server.request("POST", path, fields)
            assert status == 400 and answer["error"]["type"] == "invalid_request_error"
            assert message in answer["error"]["message"]
            with server.begin("POST", path, fields | {"stream": True}) as response:
                events = response.read().decode()
            assert message in events and "invalid_request_error" in events
