"""Tells JSON schemas from shapes such as `{"name": "string"}`, which as schemas would constrain nothing."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import shortened

# Keywords of all drafts.
CONSTRAINTS = frozenset(
    (
        "$defs",
        "$dynamicRef",
        "$recursiveRef",
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "contains",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "definitions",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "not",
        "nullable",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "then",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    )
)
ANNOTATIONS = frozenset(
    (
        "$anchor",
        "$comment",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "$vocabulary",
        "default",
        "deprecated",
        "description",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
        "x-guidance",
    )
)
PYTHON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
SHOWN_PROPERTIES = 3  # of a shape, in the schema that an error shows


def check_is_schema(name: str, value: dict[str, Any]) -> None:
    """Refuse an object that is not a JSON schema: it would allow any JSON. name: of the parameter.

    Raises:
        ValueError: it constrains nothing, and its keys are not all keywords; the text shows how to write it.
    """
    if CONSTRAINTS.isdisjoint(value) and not ANNOTATIONS.issuperset(value):
        schema = shortened(json.dumps(schema_of(value), ensure_ascii=False), 400)
        raise FieldValueError(name, f"is not a JSON schema, and would allow anything: write it as {schema}")


def schema_of(shape: Any) -> dict[str, Any]:
    """The schema that is meant by a shape, whose values are types or examples; of its first properties only."""
    if isinstance(shape, dict):
        properties = {key: schema_of(value) for key, value in islice(shape.items(), SHOWN_PROPERTIES)}
        return {"type": "object", "properties": properties, "required": list(properties)}
    if isinstance(shape, list):
        return {"type": "array", "items": schema_of(shape[0])} if shape else {"type": "array"}
    if isinstance(shape, str):
        kind = PYTHON_TYPES.get(shape, shape)
        return {"type": kind if kind in TYPES else "string"}
    if shape is None:
        return {"type": "null"}
    return {"type": PYTHON_TYPES[type(shape).__name__]}
