"""The tools of a request to /v1/messages as functions of chat completions.

Clients run their own tools, and the shell and the editor, whose schemas only their types say. What Anthropic's
servers run is left out with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pagewire.frontend.server.anthropic.protocol import MessageToolChoice
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.ipc.quoting import quoted

JSON = dict[str, Any]

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TOOL_FIELDS = ("name", "description", "strict")  # as they are in chat completions
SILENT_TOOL_FIELDS = {
    "type",
    "input_schema",
    "cache_control",
    "defer_loading",  # all tools are shown at once
    "eager_input_streaming",
    *TOOL_FIELDS,
}
HOSTED = re.compile(
    r"(advisor|code_execution|computer|memory|tool_search_tool(?:_bm25|_regex)?|web_fetch|web_search)(_\d{8})?|mcp_toolset"
)
DATED = re.compile(r"(bash|text_editor)_\d{8}")
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
ANTHROPICS: dict[str, JSON] = {  # descriptions and properties of tools that clients run, by type
    "bash": {
        "description": "Runs a command in a shell of the user's machine, which goes on; restart begins a new one.",
        "properties": {"command": TEXT, "restart": {"type": "boolean"}},
        "required": [],
    },
    "text_editor": {
        "description": "Views, creates and edits text files of the user's machine.",
        "properties": {
            "command": {"enum": ["view", "create", "str_replace", "insert"]},
            "path": TEXT,
            "file_text": TEXT | {"description": "create: the whole text."},
            "old_str": TEXT | {"description": "str_replace: what is there once, and goes."},
            "new_str": TEXT | {"description": "str_replace: what takes its place."},
            "insert_line": NUMBER | {"description": "insert: after this line; 0: at the beginning."},
            "insert_text": TEXT | {"description": "insert: the text."},
            "view_range": {"type": "array", "items": NUMBER, "description": "view: first and last line."},
        },
        "required": ["command", "path"],
    },
}


def anthropic_tools(
    tools: Iterable[JSON], choice: MessageToolChoice, strict: bool = False
) -> tuple[list[JSON], Any]:
    """Return tools and the choice of these in the format of chat completions. strict: refuse hosted tools.

    Raises:
        APIError: a tool is malformed or not known, or the choice is a hosted one.
    """
    functions: list[JSON] = []
    hosted: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and HOSTED.fullmatch(kind):
            hosted[kind] = tool.get("name")
        else:
            functions.append(anthropic_tool(tool, f"tools[{index}]"))
    names = ", ".join(hosted)
    why = f"the server has no {names}: give a tool with input_schema that does it, which the client runs"
    if hosted and strict:
        raise bad_anthropic_tool(f"tools: {why} (--strict-tools)")
    if (choice.type == "tool" and choice.name in hosted.values()) or (
        choice.type == "any" and hosted and not functions
    ):
        raise APIError(400, f"tool_choice: {why}", param="tool_choice")
    if hosted:
        warn_client(f"tools of type {names} are left out: {why}")
    return functions, choice_of(choice) if functions or choice.type in ("any", "tool") else None


def anthropic_tool(tool: JSON, place: str) -> JSON:
    """Return a tool in the format of chat completions.

    Raises:
        APIError: its type is not known, or it has no schema.
    """
    kind = tool.get("type")
    if isinstance(kind, str) and (dated := DATED.fullmatch(kind)):
        known = ANTHROPICS[dated[1]]
        schema = {"type": "object", "properties": known["properties"], "required": known["required"]}
        function = {"name": tool.get("name"), "description": known["description"], "parameters": schema}
        return {"type": "function", "function": function}
    if kind not in (None, "custom"):
        raise bad_anthropic_tool(
            f"{place}: the server has no tool of type {quoted(kind)}: give a tool with input_schema"
        )
    if not isinstance(tool.get("input_schema"), dict):
        raise bad_anthropic_tool(f"{place}.input_schema must be the JSON schema of an object")
    if without_effect := sorted(tool.keys() - SILENT_TOOL_FIELDS):
        warn_client(f"tools have fields without effect: {quoted(without_effect)[1:-1]}")
    function = {name: tool[name] for name in TOOL_FIELDS if tool.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def choice_of(choice: MessageToolChoice) -> Any:
    """Return a choice of tools in the format of chat completions."""
    return CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}})


def bad_anthropic_tool(message: str) -> APIError:
    """Return the error for a malformed or unsupported tool."""
    return APIError(400, message, param="tools")
