"""The tools of a response: the functions that the model gets for them, and how its calls come back.

type of tool                   function                          item of a call
function                       itself                            function_call
a function of a namespace      namespace.function                function_call with a namespace
custom                         with a text `input`               custom_tool_call
local_shell, shell             with the fields of its action     local_shell_call, shell_call
tool_search, by the client     with its own parameters           tool_search_call
hosted                         none: warned of, or refused       (none)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.frontend.server.openai.custom_tools import text_parameter
from pagewire.ipc.quoting import quoted

JSON = dict[str, Any]
ToolKind = Literal["function", "custom", "local_shell", "shell", "tool_search"]

HOSTED = frozenset(
    {
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "mcp",
        "programmatic_tool_calling",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
WITH_TOOLS = ("additional_tools", "tool_search_output")  # types of items that bring tools
CHOICES = (None, "none", "auto", "required")
NUMBER = {"type": "integer", "minimum": 1}
TEXTS = {"type": "array", "items": {"type": "string"}}
ACTIONS: dict[str, JSON] = {
    "local_shell": {
        "description": "Runs a command on the user's machine and returns its output.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": TEXTS | {"minItems": 1, "description": "The program and its arguments."},
                "working_directory": {"type": "string"},
                "timeout_ms": NUMBER,
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    "shell": {
        "description": "Runs shell commands on the user's machine and returns their output.",
        "parameters": {
            "type": "object",
            "properties": {
                "commands": TEXTS | {"minItems": 1},
                "timeout_ms": NUMBER,
                "max_output_length": NUMBER,
            },
            "required": ["commands"],
            "additionalProperties": False,
        },
    },
}


class ServedTool(msgspec.Struct, frozen=True):
    """A tool that the model can call. name: without its namespace."""

    kind: ToolKind
    name: str
    namespace: str | None = None

    @property
    def function(self) -> str:
        """The name of its function."""
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"


class ResponseTools:
    """The tools of one response.

    listed: of the request. items: the conversation, which may bring more. strict: refuse hosted tools.

    Raises:
        APIError: a tool is malformed, not known, one of two of a name, or hosted and refused.
    """

    def __init__(
        self, listed: Iterable[JSON] | None, items: Iterable[JSON] = (), *, strict: bool = False
    ) -> None:
        self._served: dict[str, tuple[ServedTool, JSON]] = {}
        self._plain: dict[str, ServedTool | None] = {}  # by name without namespace; None: there are several
        self._hosted: dict[str, None] = {}
        for tool, function in list_served_tools(listed or (), "tools", self._hosted):
            if tool.function in self._served:
                raise bad_tool(f"tools: there are two functions named {quoted(tool.function)}")
            self._add(tool, function)
        for number, item in enumerate(items):
            if item["type"] in WITH_TOOLS:
                for tool, function in list_served_tools(
                    item["tools"], f"input[{number}].tools", self._hosted
                ):
                    self._add(tool, function)  # it takes the place of an earlier one of its name
        if self._hosted:
            names = ", ".join(self._hosted)
            if strict:
                raise bad_tool(f"tools: {not_here(names)} (--strict-tools)")
            warn_client(f"tools of type {names} are left out: {not_here(names)}")

    @property
    def functions(self) -> list[JSON]:
        """The functions for the model, as tools of chat completions."""
        return [
            {"type": "function", "function": {"name": name, **function}}
            for name, (_, function) in self._served.items()
        ]

    def _add(self, tool: ServedTool, function: JSON) -> None:
        earlier = self._plain.get(tool.name, tool)
        is_alone = earlier is not None and earlier.function == tool.function
        self._plain[tool.name] = tool if is_alone else None
        self._served[tool.function] = tool, function

    def called(self, function: str) -> ServedTool:
        """Return the tool whose function a model has called; models may leave out the namespace."""
        if function in self._served:
            return self._served[function][0]
        return self._plain.get(function) or ServedTool("function", function)

    def choice(self, choice: Any) -> Any:
        """Return a `tool_choice` as one of chat completions.

        Raises:
            APIError: it is malformed, names a hosted tool, or nothing else than hosted tools are allowed.
        """
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            listed = choice.get("tools")
            allowed = [
                self._chosen(tool)
                for tool in (listed if isinstance(listed, list) else ())
                if not (isinstance(tool, dict) and tool.get("type") in self._hosted)
            ]
            if listed and not allowed:
                raise APIError(400, f"tool_choice: {not_here(', '.join(self._hosted))}", param="tool_choice")
            mode = choice.get("mode", "auto")
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        if isinstance(choice, dict):
            return self._chosen(choice)
        if choice == "required" and not self._served and self._hosted:
            raise APIError(400, f"tool_choice: {not_here(', '.join(self._hosted))}", param="tool_choice")
        if choice not in CHOICES:
            raise no_choice(choice)
        return None if choice == "auto" and not self._served else choice

    def _chosen(self, choice: Any) -> Any:
        """Return the choice of one tool.

        Raises:
            APIError: it is malformed, or hosted.
        """
        if not isinstance(choice, dict):
            raise no_choice(choice)
        kind, name = choice.get("type"), choice.get("name")
        if isinstance(kind, str) and (kind in HOSTED or kind in self._hosted):
            raise APIError(400, f"tool_choice: {not_here(kind)}", param="tool_choice")
        if kind in ("local_shell", "shell", "tool_search"):
            name = kind
        elif kind not in ("function", "custom") or not isinstance(name, str):
            raise no_choice(choice)
        namespace = choice.get("namespace")
        name = self.called(f"{namespace}.{name}" if isinstance(namespace, str) else name).function
        return {"type": "function", "function": {"name": name}}


def no_choice(given: Any) -> APIError:
    """Return the error for a malformed `tool_choice`."""
    message = "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'name': ...}, got "
    return APIError(400, message + quoted(given), param="tool_choice")


def not_here(names: str) -> str:
    """Return why hosted tools cannot be called, and what to do instead."""
    return f"the server has no {names}: give a function that does it, which the client runs"


def list_served_tools(
    tools: Iterable[Any], place: str, hosted: dict[str, None]
) -> Iterator[tuple[ServedTool, JSON]]:
    """Yield the tools with the fields of their functions. place: of `tools`. hosted: gets the types of the others.

    Raises:
        APIError: a tool is malformed or not known.
    """
    for number, tool in enumerate(tools):
        where = f"{place}[{number}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in ("function", "custom"):
            yield tool_of(tool, where)
        elif kind == "namespace":
            yield from of_namespace(tool, where)
        elif is_hosted(tool, kind):
            hosted[str(kind)] = None
        elif kind in ACTIONS:
            yield ServedTool(kind, kind), ACTIONS[kind]
        elif kind == "tool_search":
            yield ServedTool("tool_search", "tool_search"), without_nulls(tool, ("description", "parameters"))
        else:
            known = ", ".join(("function", "custom", "namespace", *ACTIONS, "tool_search"))
            raise bad_tool(f"{where}.type must be one of {known}, got {quoted(kind)}")


def is_hosted(tool: Any, kind: Any) -> bool:
    """Return True for a tool that OpenAI's servers run."""
    if kind == "shell":
        environment = tool.get("environment")
        return isinstance(environment, dict) and environment.get("type") != "local"
    return kind in HOSTED if kind != "tool_search" else tool.get("execution") != "client"


def of_namespace(tool: JSON, where: str) -> Iterator[tuple[ServedTool, JSON]]:
    """Yield the functions and custom tools of a namespace.

    Raises:
        APIError: one is malformed, or something else.
    """
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(inner, list):
        raise bad_tool(f"{where} must have a name and a list of tools")
    for number, each in enumerate(inner):
        place = f"{where}.tools[{number}]"
        if not isinstance(each, dict) or each.get("type") not in ("function", "custom"):
            raise bad_tool(f"{place}.type must be function or custom")
        yield tool_of(each, place, name)


def tool_of(tool: JSON, where: str, namespace: str | None = None) -> tuple[ServedTool, JSON]:
    """Return a function or custom tool with the fields of its function.

    Raises:
        APIError: it is malformed.
    """
    name, kind = tool.get("name"), tool["type"]
    if not isinstance(name, str):
        raise bad_tool(f"{where}.name must be a string, got {quoted(name)}")
    if kind == "function":
        fields = {
            key: value for key, value in tool.items() if key not in ("type", "name") and value is not None
        }
    else:
        fields = {"parameters": text_parameter(tool.get("format"), where)} | without_nulls(
            tool, ("description",)
        )
    return ServedTool(kind, name, namespace), fields


def without_nulls(tool: JSON, names: Iterable[str]) -> JSON:
    """Return those of a tool's fields that are given."""
    return {name: tool[name] for name in names if tool.get(name) is not None}


def bad_tool(message: str) -> APIError:
    """Return the error for a malformed tool."""
    return APIError(400, message, param="tools")
