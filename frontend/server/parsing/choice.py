"""How a request uses tools: the tools in the prompt, the form of the output, and the parser that reads it.

tool_choice   prompt        output                       parser
none          no tools      free                         none
auto          all tools     free                         the one set by --tool-call-parser
required      all tools     a list of calls              RequiredCalls
a function    all tools     that function's arguments    NamedCall
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagewire.frontend.server.parsing.call_formats import CALL_FORMATS, Format
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
from pagewire.ipc.quoting import quoted

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

    Attributes:
        prompted: tools passed to the chat template; None: none.
        schema: JSON schema that constrains the output; None: the output is free.
        new_parser: creates the parser of an output; None: the output has no calls.
        marks_are_special: calls are marked by special tokens, which must be kept in the text.
        reasoning: format of the reasoning before the answer; None: the output has none.
        call_format: returns the format of calls in the model's own form, if it may choose to make calls; else None.
            It raises ValueError if a tool has no such form.
    """

    prompted: list[dict[str, Any]] | None = None
    schema: dict[str, Any] | None = None
    new_parser: Callable[[], Parser] | None = None
    marks_are_special: bool = False
    reasoning: str | None = None
    call_format: Callable[[], Format] | None = None


def parser_named(name: str) -> type[Parser]:
    """Return the parser class of a format.

    Raises:
        ValueError: there is no format with that name.
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
    """Check a request's `tools` and `tool_choice`, and return how it uses tools.

    Args:
        parallel: allow several calls.
        parser: name of the format in which the model writes calls; None: unknown.
        auto: allow tool_choice "auto".
        prompt_unused: pass tools to the template even with tool_choice "none".

    Raises:
        ValueError: the tools or the choice are malformed or contradictory.
    """
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = allowed_tools(tools or (), choice.get("allowed_tools"))
    functions = [function_of(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise ValueError(f"tools: there are two functions named {name!r}")
    if choice is None:
        choice = "auto" if functions else "none"
    prompted = list(tools or ()) or None
    if choice == "none":
        return ToolUse(prompted if prompt_unused else None)
    if not functions:
        raise ValueError("tool_choice needs tools to choose from")
    model_format = parser_named(parser) if parser is not None else None
    new_id = (
        short_call_id if model_format is Mistral else call_id
    )  # later requests pass these ids to the template
    if choice == "auto":
        if model_format is None or not auto:
            raise ValueError(NO_AUTO)
        new_parser = partial(model_format, new_id, parallel)
        call_format = partial(CALL_FORMATS[parser or ""], functions, parallel)
        return ToolUse(prompted, None, new_parser, model_format.marks_are_special, call_format=call_format)
    if choice == "required":
        return ToolUse(prompted, calls_schema(functions, parallel), partial(RequiredCalls, new_id))
    name = chosen_name(choice)
    if name not in names:
        raise ValueError(f"tool_choice: there is no tool {quoted(name)}, only {', '.join(names)}")
    schema = arguments_schema(functions[names.index(name)])
    return ToolUse(prompted, schema, partial(NamedCall, name, new_id))


def allowed_tools(tools: Sequence[Any], allowed: Any) -> tuple[list[Any], str]:
    """Return the tools that a `tool_choice` of type "allowed_tools" allows, and its mode ("auto" or "required").

    Raises:
        ValueError: the choice is malformed, or names a tool that does not exist.
    """
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise ValueError("tool_choice.allowed_tools needs a mode, 'auto' or 'required', and a list of tools")
    listed = allowed.get("tools")
    names = [chosen_name(tool) for tool in (listed if isinstance(listed, list) else ())]
    by_name = {function_of(tool, f"tools[{index}]")["name"]: tool for index, tool in enumerate(tools)}
    if missing := [name for name in names if name not in by_name]:
        raise ValueError(f"tool_choice: there is no tool {quoted(missing[0])}, only {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)], allowed["mode"]


def chosen_name(choice: Any) -> str:
    """Return the name of the function that `tool_choice` selects.

    Raises:
        ValueError: the choice is malformed.
    """
    function = (
        choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            "tool_choice must be 'none', 'auto', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, got {quoted(choice)}"
        )
    return name


def function_of(tool: Any, place: str) -> dict[str, Any]:
    """Check a tool and return its function. place: path of the tool in the request, for error messages.

    Raises:
        ValueError: the tool is malformed.
    """
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(tool.get("function"), dict)
    ):
        raise ValueError(f"{place} must be {{'type': 'function', 'function': {{...}}}}, got {quoted(tool)}")
    function: dict[str, Any] = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{place}.function.name must be at most 256 letters, digits, '_', '-' and '.', got {quoted(name)}"
        )
    if not isinstance(function.get("description"), (str, type(None))):
        raise ValueError(f"{place}.function.description must be a string")
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
    ):
        raise ValueError(
            f"{place}.function.parameters must be the JSON schema of an object, got {quoted(parameters)}"
        )
    return function
