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

from pagewire.frontend.server.parsing.call_formats import (
    GRAMMAR,
    CallKeys,
    Format,
    arguments_format,
    call_objects,
    input_of,
    tag,
    tags,
)
from pagewire.frontend.server.parsing.constrained import (
    NamedCall,
    RequiredCalls,
    arguments_schema,
    calls_schema,
)
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.dialects import Dialect, dialect_named
from pagewire.frontend.server.parsing.parser import NAME, Parser
from pagewire.frontend.server.parsing.reasoning_marks import ReasoningMarks
from pagewire.ipc.errors import Field, FieldValueError
from pagewire.ipc.quoting import quoted

NO_AUTO = (
    ": calls at the model's own choice ('auto') need a chat template, and a server without --tool-call-parser none "
    "and --no-enable-auto-tool-choice; give "
)
NOT_AUTO = Field("'none', 'required' or a function")  # where a choice can be given


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools.

    Attributes:
        prompted: tools passed to the chat template; None: none.
        schema: JSON schema that constrains the output; None: the output is free.
        form: format that constrains it in place of `schema`, if a tool has a grammar, which no schema can say.
        new_parser: creates the parser of an output; None: the output has no calls.
        marks_are_special: calls are marked by special tokens, which must be kept in the text.
        reasoning: marks of the reasoning before the answer; None: the output has none.
        call_format: returns the format of calls in the model's own form, if it may choose to make calls; else None.
            It raises ValueError if a tool has no such form.
        text_format: the same for free text with calls; None: what is not constrained otherwise is free.
        strict: a tool demands that its calls are valid.
    """

    prompted: list[dict[str, Any]] | None = None
    schema: dict[str, Any] | None = None
    form: Format | None = None
    new_parser: Callable[[], Parser] | None = None
    marks_are_special: bool = False
    reasoning: ReasoningMarks | None = None
    call_format: Callable[[], Format] | None = None
    text_format: Callable[[], Format] | None = None
    strict: bool = False


def tool_use(
    tools: Sequence[Any] | None,
    choice: Any = None,
    *,
    parallel: bool = True,
    parser: str | Dialect | None = None,
    auto: bool = True,
    constrained: bool = False,
    prompt_unused: bool = False,
    counts: bool = False,
) -> ToolUse:
    """Check a request's `tools` and `tool_choice`, and return how it uses tools.

    Args:
        parallel: allow several calls.
        parser: the dialect in which the model writes calls, or its name; None: unknown.
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
        raise FieldValueError("tools", f": there are two functions named {name!r}")
    if choice is None:
        choice = "auto" if functions else "none"
    prompted = describe_tools(tools or ()) or None
    has_grammars = any(map(input_of, functions))
    if choice == "none":
        return ToolUse(prompted if prompt_unused else None)
    if not functions:
        raise FieldValueError("tool_choice", "needs tools to choose from")
    dialect = dialect_named(parser) if isinstance(parser, str) else parser
    new_id = call_id if dialect is None else dialect.new_id
    if choice == "auto" and counts:
        return ToolUse(prompted)
    if choice == "auto":
        if dialect is None or not auto:
            raise FieldValueError("tool_choice", NO_AUTO, NOT_AUTO)
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
        listed = [tag("", form, "") for form in call_objects(functions, CallKeys("parameters"))]
        form = tag("[", tags(listed, ", ", parallel), "]") if has_grammars else None
        return ToolUse(prompted, calls_schema(functions, parallel), form, partial(RequiredCalls, new_id))
    name = chosen_name(choice)
    if name not in names:
        raise FieldValueError("tool_choice", f": there is no tool {quoted(name)}, only {', '.join(names)}")
    function = functions[names.index(name)]
    form = arguments_format(function) if input_of(function) else None
    return ToolUse(prompted, arguments_schema(function), form, partial(NamedCall, name, new_id))


def describe_tools(tools: Sequence[Any]) -> list[Any]:
    """Return tools as the chat template gets them: a grammar is in the description of its text alone."""
    result = []
    for tool in tools:
        if (part := input_of(tool["function"])) is not None:
            plain = {name: value for name, value in part.items() if name != GRAMMAR}
            parameters = {**tool["function"]["parameters"], "properties": {"input": plain}}
            tool = {**tool, "function": {**tool["function"], "parameters": parameters}}
        result.append(tool)
    return result


def allowed_tools(tools: Sequence[Any], allowed: Any) -> tuple[list[Any], str]:
    """Return the tools that a `tool_choice` of type "allowed_tools" allows, and its mode ("auto" or "required").

    Raises:
        ValueError: the choice is malformed, or names a tool that does not exist.
    """
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise FieldValueError(
            "tool_choice.allowed_tools", "needs a mode, 'auto' or 'required', and a list of tools"
        )
    listed = allowed.get("tools")
    names = [chosen_name(tool) for tool in (listed if isinstance(listed, list) else ())]
    by_name = {function_of(tool, f"tools[{index}]")["name"]: tool for index, tool in enumerate(tools)}
    if missing := [name for name in names if name not in by_name]:
        raise FieldValueError(
            "tool_choice", f": there is no tool {quoted(missing[0])}, only {', '.join(by_name)}"
        )
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
        raise FieldValueError(
            "tool_choice",
            "must be 'none', 'auto', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, got {quoted(choice)}",
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
        raise FieldValueError(
            place, f"must be {{'type': 'function', 'function': {{...}}}}, got {quoted(tool)}"
        )
    function: dict[str, Any] = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise FieldValueError(
            f"{place}.function.name",
            f"must be at most 256 letters, digits, '_', '-' and '.', got {quoted(name)}",
        )
    if not isinstance(function.get("description"), (str, type(None))):
        raise FieldValueError(f"{place}.function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
    ):
        raise FieldValueError(
            f"{place}.function.parameters", f"must be the JSON schema of an object, got {quoted(parameters)}"
        )
    return function
