"""How a request uses tools: the tools in the prompt, the form of the output, and the parser that reads it.

tool_choice   prompt        output                       parser
none          no tools      free                         none
auto          all tools     free; a call is valid        of the model's dialect
required      all tools     a list of calls              RequiredCalls
a function    all tools     that function's arguments    NamedCall
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagewire.frontend.server.parsing.call_formats import Format
from pagewire.frontend.server.parsing.constrained import (
    NamedCall,
    RequiredCalls,
    arguments_schema,
    calls_schema,
)
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.dialects import DIALECTS, Dialect
from pagewire.frontend.server.parsing.parser import NAME, Parser
from pagewire.ipc.quoting import quoted

NO_AUTO = (
    "tool_choice 'auto' needs a server that knows how its model writes calls (--tool-call-parser) and allows it "
    "(--enable-auto-tool-choice); give 'none', 'required' or a function"
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
        text_format: the same for free text with calls; None: what is not constrained otherwise is free.
        strict: a tool demands that its calls are valid.
    """

    prompted: list[dict[str, Any]] | None = None
    schema: dict[str, Any] | None = None
    new_parser: Callable[[], Parser] | None = None
    marks_are_special: bool = False
    reasoning: str | None = None
    call_format: Callable[[], Format] | None = None
    text_format: Callable[[], Format] | None = None
    strict: bool = False


def dialect_named(name: str) -> Dialect:
    """Return a dialect.

    Raises:
        ValueError: there is none with that name.
    """
    if name not in DIALECTS:
        raise ValueError(f"tool_call_parser must be one of {', '.join(DIALECTS)}, got {name!r}")
    return DIALECTS[name]


def tool_use(
    tools: Sequence[Any] | None,
    choice: Any = None,
    *,
    parallel: bool = True,
    parser: str | None = None,
    auto: bool = True,
    constrained: bool = False,
    prompt_unused: bool = False,
    counts: bool = False,
) -> ToolUse:
    """Check a request's `tools` and `tool_choice`, and return how it uses tools.

    Args:
        parallel: allow several calls.
        parser: name of the dialect in which the model writes calls; None: unknown.
        auto: allow tool_choice "auto".
        constrained: with "auto", a call that was begun is valid, if its format can be had.
        prompt_unused: pass tools to the template even with tool_choice "none".
        counts: the prompt's tokens are only counted, so how the model writes calls does not matter.

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
    dialect = None if parser is None else dialect_named(parser)
    new_id = call_id if dialect is None else dialect.new_id
    if choice == "auto" and counts:
        return ToolUse(prompted)
    if choice == "auto":
        if dialect is None or not auto:
            raise ValueError(NO_AUTO)
        strict = any(function.get("strict") is True for function in functions)
        text_format = partial(dialect.text_with_calls, functions, parallel)
        return ToolUse(
            prompted,
            new_parser=partial(dialect.new_parser, functions, new_id, parallel),
            marks_are_special=dialect.marks_are_special,
            call_format=partial(dialect.whole_calls, functions, parallel),
            text_format=text_format if constrained or strict else None,
            strict=strict,
        )
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
