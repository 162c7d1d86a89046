"""Renders the part of Go's templates that the chart in deploy/helm keeps to: values, `if`, `else`, few functions.

Helm itself comes with no Python package. Where it is installed, a test compares its rendering with this one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

TAG = re.compile(r"(\s*)\{\{-\s*(.*?)\s*\}\}|\{\{\s*(.*?)\s*\}\}", re.S)
PIPE = re.compile(r"\s*\|\s*")


def render(template: str, context: Mapping[str, Any]) -> str:
    """The text of a template. context: `Values`, `Release` and `Chart`.

    Raises:
        ValueError: it uses anything else of Go's templates. KeyError: there is no such value.
    """
    pieces: list[str] = []
    taken = [True]  # of each open `if`: whether its lines count
    for text, action in parts(template):
        if all(taken):
            pieces.append(text)
        word, _, rest = action.partition(" ")
        if word == "if":
            taken.append(all(taken) and bool(value(rest, context)))
        elif action == "else":
            taken[-1] = not taken[-1]
        elif action == "end":
            taken.pop()
        elif action and all(taken):
            pieces.append(shown(value(action, context)))
    if taken != [True]:
        raise ValueError("an `if` has no `end`")
    return "".join(pieces)


def parts(template: str) -> Iterator[tuple[str, str]]:
    """Each text, and the action after it; `{{-` takes away the white space before it."""
    position = 0
    for tag in TAG.finditer(template):
        text = template[position : tag.start()]
        yield text, tag[3] if tag[2] is None else tag[2]
        position = tag.end()
    yield template[position:], ""


def value(expression: str, context: Mapping[str, Any]) -> Any:
    """What an expression gives: a path or a call, and functions after `|`."""
    first, *functions = PIPE.split(expression)
    name, _, argument = first.partition(" ")
    result = to_yaml(path(argument, context)) if name == "toYaml" else path(first, context)
    for function in functions:
        name, _, argument = function.partition(" ")
        if name == "quote":
            result = json.dumps(str(result))
        elif name == "nindent":
            result = "\n" + re.sub(r"(?m)^", " " * int(argument), result)
        elif name == "default":
            result = result or path(argument, context)
        else:
            raise ValueError(f"the function {name} is not known here")
    return result


def path(expression: str, context: Mapping[str, Any]) -> Any:
    """The value at a path such as `.Values.image.tag`."""
    if not re.fullmatch(r"(\.\w+)+", expression):
        raise ValueError(f"{expression!r} is no path")
    result: Any = context
    for name in expression[1:].split("."):
        result = result[name]
    return result


def to_yaml(found: Any) -> str:
    return str(yaml.safe_dump(found)).rstrip()


def shown(result: Any) -> str:
    return json.dumps(result) if isinstance(result, bool) else str(result)
