"""The page about HTTP: every operation of /openapi.json and every struct of its bodies, as Markdown.

It is made of the same routes as the document of a server, without an engine.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import MagicMock

from pagewire.frontend.server.http import openapi
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.wiring import MODULES

INTRODUCTION = """\
# HTTP operations

Every operation of a server with `--enable-admin`, and the fields of its bodies with types, bounds and defaults. The
page is made from `/openapi.json`, which a running server answers for tools. What the operations do together is in
[Over HTTP](../guide/http.md) and [Operating a server](../guide/operating.md).
"""
GROUPS = {
    "/v1/completions": "Generate",
    "/v1/messages": "Anthropic's API",
    "/api/chat": "Ollama's API",
    "/v1/embeddings": "Models that pool",
    "/v1/audio/transcriptions": "Speech to text",
    "/v1/models": "Models and tokens",
    "/health": "State",
    "/pause": "Operators (`--enable-admin`)",
}  # by the first path of each

Schema = Mapping[str, Any]


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a server that offers everything."""
    service = MagicMock()  # routes read its options only; the rest is for requests
    service.options = ServerOptions(api_key=["key"], enable_admin=True)
    routes = [route for module in MODULES for route in module.routes(service)]
    return openapi.openapi_document(routes, service.options)


def markdown() -> str:
    """Return the page."""
    whole = document()
    parts = [INTRODUCTION]
    for path, methods in whole["paths"].items():
        if path in GROUPS:
            parts.append(f"## {GROUPS[path]}\n")
        parts += [operation(method, path, what) for method, what in methods.items()]
    parts.append("## Structs\n")
    parts += [struct(name, schema) for name, schema in sorted(whole["components"]["schemas"].items())]
    return "\n".join(parts)


def operation(method: str, path: str, what: Schema) -> str:
    """Return the section of an operation."""
    lines = [f"### {method.upper()} `{path}`\n", what["summary"] + "\n"]
    if parameters := what["parameters"]:
        lines.append("| parameter | in | type | |\n|---|---|---|---|")
        lines += [
            f"| `{each['name']}` | {each['in']} | {kind(each['schema'])} | {cell(each.get('description', ''))} |"
            for each in parameters
        ]
        lines.append("")
    if body := what.get("requestBody"):
        for media, content in body["content"].items():
            form = "" if media == "application/json" else f" (`{media}`)"
            lines.append(f"Body{form}: {kind(content['schema'])}\n")
    for media, content in what["responses"]["200"].get("content", {}).items():
        event = content.get("x-event")
        answer = f"events `{media}` of {kind(event)}" if event else f"`{media}`: {kind(content['schema'])}"
        lines.append(f"Answer: {answer}\n")
    statuses = [code for code in what["responses"] if code != "200"]
    lines.append(f"Errors: {', '.join(statuses)}\n")
    return "\n".join(lines)


def struct(name: str, schema: Schema) -> str:
    """Return the section of a struct: its description, and a table of its fields."""
    text = inspect.cleandoc(schema.get("description", ""))
    lines = [f"### {name}\n", paragraphs(text) + "\n"]
    if fields := schema.get("properties"):
        required = set(schema.get("required", ()))
        lines.append("| field | type | default |\n|---|---|---|")
        lines += [
            f"| `{field}` | {kind(of)} | {default(field, of, required)} |" for field, of in fields.items()
        ]
        lines.append("")
    return "\n".join(lines)


def paragraphs(text: str) -> str:
    """Return a docstring whose lines `name: what it is` are items of a list."""
    return re.sub(r"(?m)^(?=[a-z_][\w, ]*: )", "\n- ", text).replace("<", "&lt;")


def default(field: str, schema: Schema, required: set[str]) -> str:
    """Return the default of a field, as in JSON."""
    if field in required:
        return "required"
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def kind(schema: Schema) -> str:
    """Return the type of a value and its bounds, with links to structs."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return cell(", ".join(f"`{json.dumps(value)}`" for value in schema["enum"]))
    name = schema.get("type", "anything")
    if name == "array":
        items = schema.get("items")
        name = f"array of {kind(items)}" if isinstance(items, dict) and items else "array"
    return name + "".join(bounds(schema))


def bounds(schema: Schema) -> Iterator[str]:
    """Yield what limits a value."""
    for key, text in {
        "minimum": "at least",
        "exclusiveMinimum": "over",
        "maximum": "at most",
        "exclusiveMaximum": "below",
        "maxLength": "length at most",
        "maxItems": "length at most",
    }.items():
        if key in schema:
            value = schema[key]
            yield f", {text} {value:,}" if isinstance(value, int) else f", {text} {value:g}"


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
