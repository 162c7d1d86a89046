"""Calls that the request demands: the output is constrained to them, and needs no marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import Parser, Reading

DATA = ("const", "enum", "default", "examples")  # what stands there is no schema
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class NamedCall(Parser):
    """The whole output is the arguments of one function."""

    def __init__(self, function: str, new_id: Callable[[], str] = call_id) -> None:
        self.function = function
        super().__init__(new_id)

    def read(self) -> Reading[None]:
        self.start_call(self.function)
        self._in_arguments = True
        while not (yield from self.at_end()):
            self._at = len(self._text)
        self.pass_arguments()


class RequiredCalls(JSONCalls):
    """The whole output is a list of calls."""

    def read(self) -> Reading[None]:
        yield from self.space()
        yield from self.call_list()
        yield from self.rest()


def arguments_schema(function: dict[str, Any]) -> dict[str, Any]:
    """What the arguments of a function must look like."""
    return {"type": "object", **(function.get("parameters") or {})}


def calls_schema(functions: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """What a list of calls must look like: an array of `{"name": ..., "parameters": ...}`, not empty.

    Each function's schema stands under its name in `$defs`, and its references are moved along.
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
        function["name"]: moved(arguments_schema(function), f"#/$defs/{function['name']}")
        for function in functions
    }
    return schema


def moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root (`#`, `#/...`) lead to `place` instead."""
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # references below an id are relative to it
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[name] = place + value[1:]
        elif name in NAMED_SCHEMAS and isinstance(value, dict):
            found[name] = {key: moved(part, place) for key, part in value.items()}
        else:
            found[name] = value if name in DATA else moved(value, place)
    return found
