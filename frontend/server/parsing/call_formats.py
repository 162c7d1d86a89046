"""Formats that tool calls are composed of: what a dialect's format allows, its parser reads as valid calls.

Each is a format of a structural tag (`engine_core/grammar/structural_tag.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from pagewire.frontend.server.parsing.constrained import arguments_schema, move_references
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.budget import MAX_STRUCTURE_CHARS

GRAMMAR = "x-lark-grammar"  # keyword of a string's schema: the grammar that the string follows
# Where a grammar in Lark's notation matches any text, whatever comes after it.
ANY_TEXT = re.compile(
    r"\[(?:\\s\\S|\\S\\s|\\d\\D|\\w\\W)\]|\.\|\\n|\\n\|\.|\[\^(?!(?:[^\]\\]|\\.){0,200}?(?:\\n|\\s|<))|/[imux]*s[imux]*(?=\s|$)"
)

Format: TypeAlias = dict[str, Any]
Functions: TypeAlias = Sequence[dict[str, Any]]


def const(text: str) -> Format:
    """Return the format of one text."""
    return {"type": "const_string", "value": text}


def call_schema(schema: Any) -> Format:
    """Return the format of JSON that follows a schema."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*formats: Format) -> Format:
    """Return the format of some formats one after the other."""
    return {"type": "sequence", "elements": list(formats)}


def either(*formats: Format) -> Format:
    """Return the format of alternatives."""
    return {"type": "or", "elements": list(formats)}


def optional(form: Format) -> Format:
    """Return a format that may also be left out."""
    return either(form, const(""))


def tag(begin: str, content: Format, end: str) -> Format:
    """Return a format between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(forms: Sequence[Format], separator: str, parallel: bool) -> Format:
    """Return the format of one tag, or, if `parallel`, of several with a text between them."""
    return {
        "type": "tags_with_separator",
        "tags": list(forms),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


@dataclass(frozen=True)
class CallKeys:
    """The keys of a call that is a JSON object.

    arguments, name: of the arguments and of the function; without `name` the function is the only key, whose value
    has the arguments. labels: keys before, of numbers as strings.
    """

    arguments: str = "arguments"
    name: str = "name"
    labels: tuple[str, ...] = ()


NUMBER = {"type": "string", "pattern": "^[0-9]{1,4}$"}


def call_objects(functions: Functions, keys: CallKeys) -> list[Format]:
    """Return the formats of calls as JSON objects with their name and their arguments.

    If a string of one follows a grammar, all are spelled alike, so that the lexer does not need to look ahead.
    """
    if not any(map(input_of, functions)):
        return [call_object(function, keys) for function in functions]
    return [spelled_object(function, keys) for function in functions]


def input_of(function: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of a function's only parameter `input`, if it is text that follows a grammar; else None."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    part = properties.get("input") if len(properties) == 1 else None
    return part if isinstance(part, dict) and isinstance(part.get(GRAMMAR), str) else None


def arguments_format(function: dict[str, Any]) -> Format:
    """Return the format of a function's arguments as a JSON object."""
    if (part := input_of(function)) is None:
        return call_schema(arguments_schema(function))
    return sequence(const('{"input": '), json_value(part, {}), const("}"))


def spelled_object(function: dict[str, Any], keys: CallKeys) -> Format:
    """Return the format of one of `call_objects`, with the white space of `json.dumps`."""
    name = function["name"]
    if not keys.name:
        return sequence(const(f'{{"{name}": '), arguments_format(function), const("}"))
    parts = [const("{")]
    for label in keys.labels:
        parts += [const(f'"{label}": '), call_schema(NUMBER), const(", ")]
    named = const(f'"{keys.name}": "{name}", "{keys.arguments}": ')
    return sequence(*parts, named, arguments_format(function), const("}"))


def call_object(function: dict[str, Any], keys: CallKeys) -> Format:
    """Return the format of one of `call_objects`, by a schema."""
    name = function["name"]
    arguments = {"$ref": f"#/$defs/{name}"}
    if keys.name:
        labels = dict.fromkeys(keys.labels, NUMBER)
        properties = {**labels, keys.name: {"const": name}, keys.arguments: arguments}
    else:
        properties = {name: arguments}
    return call_schema(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
            "$defs": {name: move_references(arguments_schema(function), f"#/$defs/{name}")},
        }
    )


def trigger_format(forms: Sequence[Format], triggers: Collection[str], parallel: bool) -> Format:
    """Return the format of free text in which a trigger begins a tag; unless `parallel`, it ends with one."""
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": list(forms),
        "stop_after_first": not parallel,
    }


def json_value(part: Any, definitions: dict[str, Any]) -> Format:
    """Return the format of a value as JSON. part: its schema. definitions: keywords that this may refer to."""
    if isinstance(part, dict) and isinstance(part.get(GRAMMAR), str):
        return tag('"', {"type": "grammar", "grammar": part[GRAMMAR], "json_string": True}, '"')
    return call_schema({**part, **definitions} if isinstance(part, dict) else part)


def text_value(part: Any) -> Format:
    """Return the format of a string that stands between marks as it is. part: its schema.

    A grammar of any text is none here: the mark at the end would be a part of the text.
    """
    grammar = part.get(GRAMMAR) if isinstance(part, dict) else None
    if isinstance(grammar, str) and not ANY_TEXT.search(grammar):
        return {"type": "grammar", "grammar": grammar}
    return {"type": "any_text"}


def listed_arguments(
    function: dict[str, Any],
    write_name: Callable[[str], str],
    value: Callable[[Any, dict[str, Any]], Format],
    separator: str = ", ",
) -> Format:
    """Return the format of a function's arguments one after the other, in the order of their declaration.

    write_name: returns what stands before a value. value: returns the format of a value, as `json_value`.

    Raises:
        ValueError: a name or a value cannot be written so, or the format would be too large.
    """
    schema = arguments_schema(function)
    if (size := least_size(schema)) > MAX_STRUCTURE_CHARS:
        raise FieldValueError(
            "tools",
            f": the format of their calls would have over {size} characters, and may have "
            f"{MAX_STRUCTURE_CHARS}: have fewer parameters or definitions, or require the first parameters",
        )
    properties, required, definitions = keywords(schema)
    check_required(properties, required)
    names = [(name, write_name(name)) for name in properties]
    values = [value(part, definitions) for part in properties.values()]

    def rest(begin: int) -> list[Format]:
        """Return the formats of the arguments from `begin` on, after another argument."""
        following = zip(names[begin:], values[begin:], strict=True)
        arguments = [
            (name, sequence(const(separator + written), form)) for (name, written), form in following
        ]
        return [argument if name in required else optional(argument) for name, argument in arguments]

    starts = [
        sequence(const(names[i][1]), values[i], *rest(i + 1)) for i in range(num_starts(properties, required))
    ]
    return either(*starts, *([] if required else [const("")]))


def check_required(properties: Collection[str], required: set[str]) -> None:
    """Check that all required parameters are declared.

    Raises:
        ValueError: one is not.
    """
    if missing := required - set(properties):
        raise FieldValueError(
            "tools", f": the required parameter {quoted(min(missing))} is not among the properties"
        )


def keywords(schema: dict[str, Any]) -> tuple[dict[str, Any], set[str], dict[str, Any]]:
    """Return the properties of a function's arguments, those that are required, and the definitions of all."""
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return schema.get("properties") or {}, set(schema.get("required") or ()), definitions


def num_starts(names: Collection[str], required: Container[str]) -> int:
    """Return how many arguments may come first: those up to the first that is required."""
    first = next((place for place, name in enumerate(names) if name in required), None)
    return len(names) if first is None else first + 1


def least_size(schema: dict[str, Any]) -> int:
    """Return the characters of `listed_arguments` without the schemas of values, from the schema of all arguments.

    Whichever argument comes first, the formats of all that may follow stand after it, each with all definitions.
    """
    properties, required, definitions = keywords(schema)
    count = num_starts(properties, required)
    num_values = count * len(properties) - count * (count - 1) // 2
    return num_values * len(msgspec.json.encode(call_schema(definitions)))
