"""Formats of tool calls as models write them, for outputs that are constrained to calls or something else.

Each is a format of a structural tag (`engine_core/grammar/structural_tag.py`). What it allows, the parser of the
same name reads as calls with valid arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from pagewire.frontend.server.parsing import hermes, llama3_json, mistral
from pagewire.frontend.server.parsing.constrained import arguments_schema, moved

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
        ValueError: a parameter's name is not an identifier.
    """
    calls = [tag(f"{function['name']}(", keyword_arguments(function), ")") for function in functions]
    return tag("[", tags(calls, ", ", parallel), "]")


def keyword_arguments(function: dict[str, Any]) -> Format:
    """Return the format of a function's arguments as Python's keyword arguments, in the order of their declaration.

    Raises:
        ValueError: a parameter's name is not an identifier.
    """
    schema = arguments_schema(function)
    required, definitions = (
        schema.get("required") or (),
        {key: schema[key] for key in ("$defs", "definitions") if key in schema},
    )
    names, values = [], []
    for name, part in (schema.get("properties") or {}).items():
        if not name.isidentifier():
            raise ValueError(
                f"tools: the pythonic format of calls has no way to write the parameter {name!r:.100}"
            )
        names.append(name)
        values.append(json_schema({**part, **definitions} if isinstance(part, dict) else part))
    if missing := set(required) - set(names):
        raise ValueError(f"tools: the required parameter {min(missing)!r:.100} is not among the properties")

    def rest(begin: int) -> list[Format]:
        """Return the formats of the arguments from `begin` on, after another argument."""
        following = zip(names[begin:], values[begin:], strict=True)
        arguments = [(name, sequence(const(f", {name}="), value)) for name, value in following]
        return [argument if name in required else optional(argument) for name, argument in arguments]

    first = next((place for place, name in enumerate(names) if name in required), None)
    places = range(len(names) if first is None else first + 1)
    starts = [sequence(const(f"{names[i]}="), values[i], *rest(i + 1)) for i in places]
    return either(*starts, *([const("")] if first is None else []))


CALL_FORMATS: dict[str, Callable[[Sequence[dict[str, Any]], bool], Format]] = {
    "hermes": hermes_calls,
    "mistral": mistral_calls,
    "llama3_json": llama3_json_calls,
    "pythonic": pythonic_calls,
}
