"""Objects in the schemas of tools have the names that they list, and no others, unless the schema says more."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import pagewire.demo
from pagewire.engine_core.grammar.compile import compile_grammar, load_tokenizer
from pagewire.frontend.server.parsing.closed_schema import close_schema
from pagewire.frontend.server.parsing.constrained import arguments_schema, calls_schema
from pagewire.ipc.wire.params import StructuredOutputsParams

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
NO = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, A | NO),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}} | NO),
        ({"properties": {"x": A, "y": {"type": "array", "items": A}}},
         {"properties": {"x": A | NO, "y": {"type": "array", "items": A | NO}}} | NO),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A | NO, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [A | NO]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": A | NO}}),
        ({"items": {"oneOf": [A, B]}}, {"items": {"oneOf": [A | NO, B | NO]}}),
        ({"prefixItems": [A]}, {"prefixItems": [A | NO]}),
        ({"additionalProperties": A}, {"additionalProperties": A | NO}),
    ],
)  # fmt: skip
def test_objects_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    assert close_schema(schema) == expected and schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        A | {"additionalProperties": True},
        A | {"additionalProperties": {"type": "integer"}},
        A | {"patternProperties": {"^x": {}}},
        A | {"propertyNames": {"maxLength": 3}},
        A | {"minProperties": 1},
        A | {"required": ["b"]},
        {"allOf": [A, B]},
        {"anyOf": [A, B], "properties": {"c": {}}},
        {"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": A}},
        {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": {"allOf": [A]}}},
        {"properties": {"x": {"allOf": [{"$ref": "#"}, {"required": ["y"]}]}}},
        {"not": A},
        {"$id": "https://example.com", "properties": {}},
        {"properties": 3},
        {"properties": {}, "required": 3},
    ],
)
def test_what_says_more_or_is_described_twice_stays(schema: dict[str, Any]) -> None:
    assert close_schema(schema) == schema


def test_no_argument_of_a_call_comes_twice() -> None:
    tokenizer = load_tokenizer(Path(pagewire.demo.__path__[0]), [2])
    place: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"at": place, "t": {"type": "integer"}}},
    }

    def fits(text: str, schema: dict[str, Any]) -> bool:
        tokens = tokenizer.tokenize_str(text)
        grammar = compile_grammar(StructuredOutputsParams(json=schema), tokenizer, 4100)
        return grammar.matcher().num_fitting(tokens) == len(tokens)

    good = '{"at":{"city":"Oslo"},"t":1}'
    bad = [
        good.replace('"t":1', '"t":1,"t":1'),
        good.replace('"t":1', '"t":1,"\\u0074":1'),
        good.replace('"t":1', '"z":1,"z":1'),
        good.replace('"Oslo"', '"Oslo","city":"Rome"'),
        good.replace('"Oslo"', '"Oslo","x":1'),
    ]
    for schema, wrap in (
        (arguments_schema(function), "{}"),
        (calls_schema([function], parallel=True), '[{{"name":"f","parameters":{}}}]'),
    ):
        assert fits(wrap.format(good), copy.deepcopy(schema))
        assert not any(fits(wrap.format(text), copy.deepcopy(schema)) for text in bad)
    assert fits('{"at":{},"t":1,"z":1,"z":1}'.replace("{},", '{"city":"Oslo"},'), function["parameters"])
