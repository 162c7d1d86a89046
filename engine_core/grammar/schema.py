"""Prepares JSON schemas for llguidance: rewrites what it would get wrong or reject, and refuses the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.wire.params import StructuredOutputsParams

MAX_MULTIPLE = 100_000  # llguidance builds an automaton with this many states, in a third of a second
WHITESPACE = r" |\n[ \t]{0,20}"  # allowed between two JSON tokens unless disable_any_whitespace is set

SCHEMAS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS_OF_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

# Formats that llguidance lacks, each with a stricter one that it has: every "email" is a valid "idn-email".
NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
}
# Formats that JSON Schema defines; others have no meaning and are removed.
FORMATS = {
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-template",
    "uuid",
}
IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf")


def json_schema(schema: dict[str, Any], structure: StructuredOutputsParams) -> dict[str, Any]:
    """The schema to compile: rewritten in place, with llguidance's options overridden by the request's.

    Raises:
        GrammarError: the schema uses something that is not supported.
    """
    for part in subschemas(schema):
        check_multiple(part.get("multipleOf"))
        rewrite_bounds(part)
        rewrite_format(part)
        rewrite_names(part)
        rewrite_unevaluated(part)
        check_min_properties(part)
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if structure.disable_additional_properties and "properties" in part:
            part.setdefault("additionalProperties", False)
    pattern = WHITESPACE if structure.whitespace_pattern is None else structure.whitespace_pattern
    flexible = pattern != "" and not structure.disable_any_whitespace
    return schema | {
        "x-guidance": {
            "whitespace_flexible": flexible,
            "whitespace_pattern": pattern if flexible else None,
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "lenient": False,
        }
    }


def check_multiple(multiple: Any) -> None:
    """Refuse a `multipleOf` whose automaton would be too large.

    Raises:
        GrammarError: it is above MAX_MULTIPLE.
    """
    if isinstance(multiple, int) and multiple > MAX_MULTIPLE:
        raise GrammarError(f"json: multipleOf: {multiple} is not supported: the maximum is {MAX_MULTIPLE}")


def check_min_properties(part: dict[str, Any]) -> None:
    """Refuse `minProperties` where names are free: llguidance counts a repeated name twice, JSON once.

    Raises:
        GrammarError: the schema needs more properties than it requires by name.
    """
    minimum, required = part.get("minProperties"), part.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    named_only = part.get("additionalProperties") is False and "patternProperties" not in part
    if isinstance(minimum, int) and minimum > num_required + 1 and not named_only:
        raise GrammarError(
            f"json: minProperties: {minimum} needs additionalProperties: false and no patternProperties"
        )


def rewrite_bounds(part: dict[str, Any]) -> None:
    """Make an exclusive integer bound a slightly tighter inclusive one, if the other bound is less than 1 away.

    llguidance would include the bound itself there. Only numbers very close to the bound are lost.
    """
    for exclusive, plain, other, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        bound = part.get(exclusive)
        far = next((part[name] for name in other if name in part), None)
        if not isinstance(bound, (int, float)) or not isinstance(far, (int, float)):
            continue
        gap = (far - bound) * sign
        if 0 < gap < 1 and bound == int(bound):
            del part[exclusive]
            inner = bound + sign * 10.0 ** (math.floor(math.log10(gap)) - 6)
            part[plain] = max(inner * sign, part.get(plain, inner) * sign) * sign


def rewrite_format(part: dict[str, Any]) -> None:
    """Replace a format that llguidance lacks by a stricter one that it has, and drop unknown formats.

    Dates must have a year from 1 on: llguidance allows year 0, which many languages cannot parse.
    """
    name = part.get("format")
    if name in ("date", "date-time"):
        part.setdefault("pattern", "^([1-9]|0[1-9]|00[1-9]|000[1-9])")
    if name in NARROWER:
        part["format"] = NARROWER[name]
    elif isinstance(name, str) and name not in FORMATS:
        del part["format"]


def rewrite_names(part: dict[str, Any]) -> None:
    """Rewrite `propertyNames`, if it is a pattern or an enum, as `patternProperties` or `properties`."""
    names = part.get("propertyNames")
    if not isinstance(names, dict) or "properties" in part or "patternProperties" in part:
        return
    rest = part.get("additionalProperties", True)
    constraints = {name: value for name, value in names.items() if (name, value) != ("type", "string")}
    if list(constraints) == ["pattern"]:
        part["patternProperties"] = {constraints["pattern"]: rest}
    elif list(constraints) == ["enum"] and isinstance(constraints["enum"], list):
        part["properties"] = {name: rest for name in constraints["enum"] if isinstance(name, str)}
    else:
        return
    part["additionalProperties"] = False
    del part["propertyNames"]


def rewrite_unevaluated(part: dict[str, Any]) -> None:
    """Rewrite `unevaluated...` as the plain keyword, if no in-place subschema could evaluate anything."""
    for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in part and not any(name in part for name in IN_PLACE):
            part.setdefault(plain, part.pop(keyword))


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all its subschemas, except the booleans true and false."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner = [schema.get(name) for name in SCHEMAS]
    for name in LISTS_OF_SCHEMAS:
        if isinstance(schemas := schema.get(name), list):
            inner += schemas
    for name in MAPS_OF_SCHEMAS:
        if isinstance(by_name := schema.get(name), dict):
            inner += by_name.values()
    for part in inner:
        yield from subschemas(part)
