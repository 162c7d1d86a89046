"""Closes the objects in the schemas of tools: they have no names but those in `properties`, unless they say more.

A grammar cannot see that a name which the schema does not list comes twice, and no function expects such names. In
XGrammar's strict mode, the default, and so in vLLM, it is the same; OpenAI's strict tools must say it themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas")
ON_NAMES = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
    "minProperties",
)
DEFINITIONS = ("$defs", "definitions")
ONE_SCHEMA = ("additionalProperties", "contains", "items", "unevaluatedItems", "unevaluatedProperties")
MANY_SCHEMAS = ("items", "prefixItems")
BY_NAME = ("properties", "patternProperties", *DEFINITIONS)
NESTING = frozenset((*IN_PLACE, *BY_NAME, *ONE_SCHEMA, *MANY_SCHEMAS))  # without any, nothing is to be closed


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema in which `additionalProperties` is false for objects that do not say more.

    An object stays as it is if it has another keyword on its names, requires names that it does not list, or if
    several schemas describe it together (`allOf`, `$ref` beside `properties`): each would forbid names of others.
    """
    shared = list(shared_references(schema, alone=True))
    if any(not reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)) for reference in shared):
        return schema
    result: dict[str, Any] = close(schema, alone=True, open_definitions=bool(shared))
    return result


def close(schema: Any, *, alone: bool, open_definitions: bool) -> Any:
    """Return a copy of a part of a schema, as `close_schema`.

    alone: no other schema describes the same value. open_definitions: others may describe what definitions do.
    """
    if not isinstance(schema, dict) or "$id" in schema:  # references below an id are relative to it
        return schema
    result = dict(schema)
    for keyword, place, part, is_alone in schema_parts(schema, alone=alone):
        value = close(
            part,
            alone=is_alone and not (open_definitions and keyword in DEFINITIONS),
            open_definitions=open_definitions,
        )
        if place is None:
            result[keyword] = value
        else:
            if result[keyword] is schema[keyword]:
                result[keyword] = schema[keyword].copy()
            result[keyword][place] = value
    if alone and lists_its_names(schema):
        result["additionalProperties"] = False
    return result


def lists_its_names(schema: dict[str, Any]) -> bool:
    """True if a schema has `properties`, requires none but these, and says no more of an object's names."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if any(keyword in schema for keyword in (*IN_PLACE, *ON_NAMES)):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def shared_references(schema: Any, *, alone: bool) -> Iterator[str]:
    """The references in a schema to what describes a value together with another schema."""
    if not isinstance(schema, dict) or "$id" in schema:
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (alone and describes_alone(schema)):
        yield reference
    for _, _, part, is_alone in schema_parts(schema, alone=alone):
        yield from shared_references(part, alone=is_alone)


def describes_alone(schema: dict[str, Any]) -> bool:
    """True if a schema has nothing on names beside its one keyword that brings in another schema."""
    return "properties" not in schema and sum(keyword in schema for keyword in IN_PLACE) == 1


def schema_parts(schema: dict[str, Any], *, alone: bool) -> Iterator[tuple[str, Any, Any, bool]]:
    """The schemas in a schema, each with its keyword, its place in the keyword's value (None: it is that value),
    and whether no other schema describes the same value.
    """
    for keyword in ONE_SCHEMA:
        if isinstance(schema.get(keyword), dict):
            yield keyword, None, schema[keyword], True
    for keyword in BY_NAME:
        if isinstance(by_name := schema.get(keyword), dict):
            for name, part in by_name.items():
                if isinstance(part, dict) and not NESTING.isdisjoint(part):
                    yield keyword, name, part, True
    for keyword in MANY_SCHEMAS:
        if isinstance(items := schema.get(keyword), list):
            yield from ((keyword, index, part, True) for index, part in enumerate(items))
    for keyword in ("allOf", "anyOf", "oneOf"):
        if isinstance(items := schema.get(keyword), list):
            is_alone = alone and describes_alone(schema) and (keyword != "allOf" or len(items) == 1)
            yield from ((keyword, index, part, is_alone) for index, part in enumerate(items))
