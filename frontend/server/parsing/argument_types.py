"""Conversion of arguments without quotes to JSON: the schema of a parameter says what its text stands for."""

from __future__ import annotations

import json
from typing import Any, NoReturn

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # models write these, too
ONLY_TEXT = frozenset({"string"})
MAX_REFERENCES = 8  # of one part to another, and on


class ParameterTypes:
    """The JSON types that the parameters of one function may have. schema: of all its arguments."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._known: dict[int, frozenset[str]] = {}  # by id of a part of the schema: none is looked at twice

    def of(self, name: str) -> frozenset[str]:
        """Return the types that a parameter may have."""
        properties = self._schema.get("properties")
        return self.types(properties.get(name, True) if isinstance(properties, dict) else True)

    def types(self, part: Any) -> frozenset[str]:
        """Return the types that a part of the schema allows."""
        if not isinstance(part, dict):
            return JSON_TYPES
        if id(part) not in self._known:
            self._known[id(part)] = JSON_TYPES  # of a reference to the part from within it
            self._known[id(part)] = self._types(part)
        return self._known[id(part)]

    def _types(self, part: dict[str, Any]) -> frozenset[str]:
        allowed = JSON_TYPES
        named = part.get("type")
        if named is not None:
            names = {
                name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)
            }
            allowed &= names | ({"integer"} if "number" in names else set())
        if isinstance(values := part.get("enum"), list):
            allowed &= frozenset().union(*map(types_of, values))
        if "const" in part:
            allowed &= types_of(part["const"])
        if isinstance(reference := part.get("$ref"), str):
            allowed &= self.types(self._referred(reference))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(parts := part.get(keyword), list) and parts:
                allowed &= frozenset().union(*map(self.types, parts))
        return allowed or JSON_TYPES

    def inner(self, part: Any, name: str | None) -> Any:
        """Return the part of the schema for a member of an object, or for the items of a list (None); True: any."""
        part = self.resolved(part)
        if name is None:
            return part.get("items", True)
        properties = part.get("properties")
        return properties.get(name, True) if isinstance(properties, dict) else True

    def resolved(self, part: Any) -> dict[str, Any]:
        """Return a part of the schema, or what its reference names; {} if it is no object."""
        for _ in range(MAX_REFERENCES):
            reference = part.get("$ref") if isinstance(part, dict) else None
            if not isinstance(reference, str):
                break
            part = self._referred(reference)
        return part if isinstance(part, dict) else {}

    def _referred(self, reference: str) -> Any:
        """Return the part of the schema that a reference names; True, which allows all, if there is none."""
        part: Any = self._schema
        path = reference.removeprefix("#").strip("/")
        for step in path.split("/") if path else ():
            step = step.replace("~1", "/").replace("~0", "~")
            part = part.get(step, True) if isinstance(part, dict) else True
        return part if reference.startswith("#") else True


def types_of(value: Any) -> frozenset[str]:
    """Return the types that fit a JSON value: a whole number is an integer and a number."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case str():
            return ONLY_TEXT
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def argument_json(text: str, types: frozenset[str]) -> str:
    """Return an argument as JSON: `text` itself if it is JSON of an allowed type, else as a string.

    JSON of another type stays what it is where no string is allowed, for the client to judge.
    """
    written = text.strip()
    written = PYTHON_CONSTANTS.get(written, written)
    try:
        found = types_of(json.loads(written, parse_constant=reject)) - ONLY_TEXT
    except (ValueError, RecursionError):
        found = frozenset()
    is_value = bool(found & types) or (bool(found) and "string" not in types)
    return written if is_value else json.dumps(text, ensure_ascii=False)


def reject(constant: str) -> NoReturn:
    """Refuse a number that Python's JSON has and JSON has not."""
    raise ValueError(f"{constant} is not JSON")
