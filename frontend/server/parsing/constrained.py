"""Parsers and schemas for calls that the request requires: the output is constrained to them and has no marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagewire.frontend.server.parsing.closed_schema import close_schema
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import Parser, Reading

DATA = ("const", "enum", "default", "examples")  # keywords whose values are data, not schemas
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class NamedCall(Parser):
    """Parser for an output that is entirely the arguments of one function."""

    def __init__(self, function: str, new_id: Callable[[], str] = call_id) -> None:
        self.function = function
        super().__init__(new_id)

    def read(self) -> Reading[None]:
        self.start_call(self.function)
        self._in_arguments = True
        while not (yield from self.at_end()):
            self._at = len(self._text)
        self.emit_pending_arguments()


class RequiredCalls(JSONCalls):
    """Parser for an output that is entirely a list of calls.

    Where it ends too early after a call, what there is of the next one is no content, and dropped.
    """

    def read(self) -> Reading[None]:
        yield from self.space()
        listed = yield from self.call_list()
        if not listed and self._num_calls and self._ended:
            self._at = len(self._text)
            self.drop()
        yield from self.rest()


def arguments_schema(function: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments, with its objects closed, see `close_schema`."""
    return close_schema({"type": "object", **(function.get("parameters") or {})})


def calls_schema(functions: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of calls: a non-empty array of `{"name": ..., "parameters": ...}`.

    Each function's schema is placed under its name in `$defs`, and its references are adjusted.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "parameters": {"$ref": f"#/$defs/{function['name']}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    schema["$defs"] = {
        function["name"]: move_references(arguments_schema(function), f"#/$defs/{function['name']}")
        for function in functions
    }
    return schema


def move_references(schema: Any, place: str) -> Any:
    """Return a copy of a schema whose references to its own root (`#`, `#/...`) point to `place` instead."""
    if isinstance(schema, list):
        return [move_references(part, place) for part in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # references below an id are relative to it
        return schema
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            result[name] = place + value[1:]
        elif name in NAMED_SCHEMAS and isinstance(value, dict):
            result[name] = {key: move_references(part, place) for key, part in value.items()}
        else:
            result[name] = value if name in DATA else move_references(value, place)
    return result
