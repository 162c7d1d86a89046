"""Formats of tool calls as models write them, for outputs that are constrained to calls or something else.

Each is a format of a structural tag (`engine_core/grammar/structural_tag.py`). What it allows, the parser of the
same name reads as calls with valid arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, TypeAlias

import msgspec

from pagewire.frontend.server.parsing import hermes, llama3_json, mistral
from pagewire.frontend.server.parsing.constrained import arguments_schema, moved
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.budget import MAX_STRUCTURE_CHARS

Format: TypeAlias = dict[str, Any]


def const(text: str) -> Format:
    """Return the format of one text."""
    return {"type": "const_string", "value": text}


def json_schema(schema: Any) -> Format:
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


def call_object(function: dict[str, Any], arguments: str) -> Format:
    """Return the format of a call as an object with `name` and `arguments` (or another name for these)."""
    name = function["name"]
    return json_schema(
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
            "$defs": {name: moved(arguments_schema(function), f"#/$defs/{name}")},
        }
    )


def hermes_calls(functions: Sequence[dict[str, Any]], parallel: bool) -> Format:
    """Return the format of calls in tags."""
    begin, end = f"{hermes.OPEN}\n", f"\n{hermes.CLOSE}"
    calls = [tag(begin, call_object(function, "arguments"), end) for function in functions]
    return tags(calls, "\n", parallel)


def llama3_json_calls(functions: Sequence[dict[str, Any]], parallel: bool) -> Format:
    """Return the format of bare objects, with the mark before them or not."""
    calls = [tag("", call_object(function, "parameters"), "") for function in functions]
    return sequence(optional(const(llama3_json.MARK)), tags(calls, "; ", parallel))


def mistral_calls(functions: Sequence[dict[str, Any]], parallel: bool) -> Format:
    """Return the format of a list of objects after a mark, or of names and arguments after a mark each."""
    listed = [tag("", call_object(function, "arguments"), "") for function in functions]
    named = [
        tag(mistral.MARK + function["name"] + mark, json_schema(arguments_schema(function)), "")
        for function in functions
        for mark in ("", mistral.ARGUMENTS_MARK)
    ]
    return either(tag(f"{mistral.MARK}[", tags(listed, ", ", parallel), "]"), tags(named, "", parallel))


def pythonic_calls(functions: Sequence[dict[str, Any]], parallel: bool) -> Format:
    """Return the format of a list of calls in Python's syntax.

    Raises:
        ValueError: a parameter's name is not an identifier, or the format would be too large.
    """
    if (size := sum(map(least_size, functions))) > MAX_STRUCTURE_CHARS:
        raise ValueError(
            f"tools: their pythonic format would have over {size} characters, and may have {MAX_STRUCTURE_CHARS}: "
            "have fewer parameters or definitions, or require the first parameters"
        )
    calls = [tag(f"{function['name']}(", keyword_arguments(function), ")") for function in functions]
    return tag("[", tags(calls, ", ", parallel), "]")


def keyword_arguments(function: dict[str, Any]) -> Format:
    """Return the format of a function's arguments as Python's keyword arguments, in the order of their declaration.

    Raises:
        ValueError: a parameter's name is not an identifier.
    """
    schema = arguments_schema(function)
    properties, required, definitions = keywords(schema)
    names, values = [], []
    for name, part in properties.items():
        if not name.isidentifier():
            raise ValueError(
                f"tools: the pythonic format of calls has no way to write the parameter {quoted(name)}"
            )
        names.append(name)
        values.append(json_schema({**part, **definitions} if isinstance(part, dict) else part))
    if missing := required - set(names):
        raise ValueError(f"tools: the required parameter {quoted(min(missing))} is not among the properties")

    def rest(begin: int) -> list[Format]:
        """Return the formats of the arguments from `begin` on, after another argument."""
        following = zip(names[begin:], values[begin:], strict=True)
        arguments = [(name, sequence(const(f", {name}="), value)) for name, value in following]
        return [argument if name in required else optional(argument) for name, argument in arguments]

    starts = [
        sequence(const(f"{names[i]}="), values[i], *rest(i + 1)) for i in range(num_starts(names, required))
    ]
    return either(*starts, *([] if required else [const("")]))


def keywords(schema: dict[str, Any]) -> tuple[dict[str, Any], set[str], dict[str, Any]]:
    """Return the properties of a function's arguments, those that are required, and the definitions of all."""
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return schema.get("properties") or {}, set(schema.get("required") or ()), definitions


def num_starts(names: Collection[str], required: Container[str]) -> int:
    """Return how many arguments may come first: those up to the first that is required."""
    first = next((place for place, name in enumerate(names) if name in required), None)
    return len(names) if first is None else first + 1


def least_size(function: dict[str, Any]) -> int:
    """Return the characters of a function's format without its schemas: it grows with the square of the parameters.

    Whichever argument comes first, the formats of all that may follow stand after it, each with all definitions.
    """
    properties, required, definitions = keywords(arguments_schema(function))
    count = num_starts(properties, required)
    num_values = count * len(properties) - count * (count - 1) // 2
    return num_values * len(msgspec.json.encode(json_schema(definitions)))


CALL_FORMATS: dict[str, Callable[[Sequence[dict[str, Any]], bool], Format]] = {
    "hermes": hermes_calls,
    "mistral": mistral_calls,
    "llama3_json": llama3_json_calls,
    "pythonic": pythonic_calls,
}
