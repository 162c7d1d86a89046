"""What the tools of a request come to: what the prompt tells of them, what the output must look like, and who
reads it.

    tool_choice   prompt        output                       parser
    none          nothing       free                         none
    auto          all tools     free                         of the server's choosing
    required      all tools     a list of calls              RequiredCalls
    a function    all tools     that function's arguments    NamedCall
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagewire.frontend.server.parsing.constrained import (
    NamedCall,
    RequiredCalls,
    arguments_schema,
    calls_schema,
)
from pagewire.frontend.server.parsing.deltas import call_id, short_call_id
from pagewire.frontend.server.parsing.hermes import Hermes
from pagewire.frontend.server.parsing.llama3_json import Llama3JSON
from pagewire.frontend.server.parsing.mistral import Mistral
from pagewire.frontend.server.parsing.parser import NAME, Parser
from pagewire.frontend.server.parsing.pythonic import Pythonic

PARSERS: dict[str, type[Parser]] = {
    "hermes": Hermes,
    "mistral": Mistral,
    "llama3_json": Llama3JSON,
    "pythonic": Pythonic,
}
NO_AUTO = (
    "tool_choice 'auto' needs a server with --enable-auto-tool-choice and --tool-call-parser; "
    "give 'none', 'required' or a function"
)


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools.

    prompted: the tools that the template is given; None: none. schema: the JSON schema of the output; None: it is
    free. new_parser: makes what reads one output; None: there is nothing to look for. marks_are_special: calls are
    marked by special tokens, which must stay in the text.
    """

    prompted: list[dict[str, Any]] | None = None
    schema: dict[str, Any] | None = None
    new_parser: Callable[[], Parser] | None = None
    marks_are_special: bool = False


def parser_named(name: str) -> type[Parser]:
    """The parser of a format.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in PARSERS:
        raise ValueError(f"tool_call_parser must be one of {', '.join(PARSERS)}, got {name!r}")
    return PARSERS[name]


def tool_use(
    tools: Sequence[Any] | None,
    choice: Any = None,
    *,
    parallel: bool = True,
    parser: str | None = None,
    auto: bool = True,
    prompt_unused: bool = False,
) -> ToolUse:
    """What `tools` and `tool_choice` of a request come to.

    parallel: several calls are allowed. parser: of the format that the model writes calls in, if it is known.
    auto: the model may choose freely. prompt_unused: tell the model of tools even with the choice "none".

    Raises:
        ValueError: what is wrong with them.
    """
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = allowed_tools(tools or (), choice.get("allowed_tools"))
    functions = [function_of(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise ValueError(f"tools: two of them are called {next(n for n in names if names.count(n) > 1)!r}")
    if choice is None:
        choice = "auto" if functions else "none"
    prompted = list(tools or ()) or None
    if choice == "none":
        return ToolUse(prompted if prompt_unused else None)
    if not functions:
        raise ValueError("tool_choice needs tools to choose from")
    model_format = parser_named(parser) if parser is not None else None
    new_id = short_call_id if model_format is Mistral else call_id  # the template will get them back
    if choice == "auto":
        if model_format is None or not auto:
            raise ValueError(NO_AUTO)
        new_parser = partial(model_format, new_id, parallel)
        return ToolUse(prompted, None, new_parser, model_format.marks_are_special)
    if choice == "required":
        return ToolUse(prompted, calls_schema(functions, parallel), partial(RequiredCalls, new_id))
    name = chosen_name(choice)
    if name not in names:
        raise ValueError(f"tool_choice: there is no tool {name!r}, only {', '.join(names)}")
    schema = arguments_schema(functions[names.index(name)])
    return ToolUse(prompted, schema, partial(NamedCall, name, new_id))


def allowed_tools(tools: Sequence[Any], allowed: Any) -> tuple[list[Any], str]:
    """The tools that a `tool_choice` of type "allowed_tools" leaves, and how to choose among them.

    Raises:
        ValueError: it is malformed, or names one that is not there.
    """
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise ValueError("tool_choice.allowed_tools needs a mode, 'auto' or 'required', and a list of tools")
    listed = allowed.get("tools")
    names = [chosen_name(tool) for tool in (listed if isinstance(listed, list) else ())]
    found = {function_of(tool, f"tools[{index}]")["name"]: tool for index, tool in enumerate(tools)}
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"tool_choice: there is no tool {missing[0]!r}, only {', '.join(found)}")
    return [found[name] for name in dict.fromkeys(names)], allowed["mode"]


def chosen_name(choice: Any) -> str:
    """The function that `tool_choice` names.

    Raises:
        ValueError: it names none.
    """
    function = (
        choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            "tool_choice must be 'none', 'auto', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, got {choice!r:.100}"
        )
    return name


def function_of(tool: Any, place: str) -> dict[str, Any]:
    """The function that a tool is. `place`: what messages call it.

    Raises:
        ValueError: what is wrong with it.
    """
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(tool.get("function"), dict)
    ):
        raise ValueError(f"{place} must be {{'type': 'function', 'function': {{...}}}}, got {tool!r:.100}")
    function: dict[str, Any] = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{place}.function.name must be letters, digits, '_', '-' and '.', at most 256, got {name!r:.100}"
        )
    if not isinstance(function.get("description"), (str, type(None))):
        raise ValueError(f"{place}.function.description must be a string")
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
    ):
        raise ValueError(
            f"{place}.function.parameters must be the JSON schema of an object, got {parameters!r:.100}"
        )
    return function
