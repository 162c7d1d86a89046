"""Custom tools of chat completions: the model gets functions with a text `input`, whose grammar is enforced.

{"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {...}}}}
    --> a function `patch` --> its calls --> {"type": "custom", "custom": {"name": "patch", "input": "..."}}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.custom_input import CustomInput
from pagewire.frontend.server.openai.protocol import ChatRequest, ChatToolCall, CustomCall, ToolCall
from pagewire.frontend.server.parsing.call_formats import GRAMMAR
from pagewire.ipc.quoting import quoted

JSON = dict[str, Any]
CUSTOM = "custom"


def text_parameter(form: Any, where: str) -> JSON:
    """Return the schema of the arguments of a custom tool's function.

    Raises:
        APIError: its format is malformed.
    """
    text: JSON = {"type": "string", "description": "Any text."}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise APIError(
                400, f"{where}.format must have the syntax lark or regex, and a definition", param="tools"
            )
        if syntax == "regex":
            text = {"type": "string", "pattern": f"^(?:{definition})$"}
        else:
            described = f"Text that follows this grammar in Lark's notation:\n{definition}"
            text = {"type": "string", "description": described, GRAMMAR: definition}
    elif form is not None and kind != "text":
        raise APIError(400, f"{where}.format.type must be text or grammar, got {quoted(kind)}", param="tools")
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def in_functions(request: ChatRequest) -> tuple[ChatRequest, frozenset[str]]:
    """Return a request in which functions stand for its custom tools, and the names of these.

    Raises:
        APIError: a custom tool, or an earlier call of one, is malformed.
    """
    given = request.tools or ()
    tools = [function_for(tool, f"tools[{number}]") for number, tool in enumerate(given)]
    names = frozenset(str(tool[CUSTOM]["name"]) for tool in given if is_custom(tool))
    messages = [in_function_calls(each, f"messages[{n}]") for n, each in enumerate(request.messages)]
    changed = msgspec.structs.replace(
        request,
        tools=tools if request.tools is not None else None,
        tool_choice=choose_function(request.tool_choice),
        messages=messages,
    )
    return changed, names


def is_custom(value: Any) -> bool:
    """True for a tool, a choice or a call of the type "custom"."""
    return isinstance(value, dict) and value.get("type") == CUSTOM


def custom_of(value: JSON, where: str) -> JSON:
    """The field `custom` of a tool, a choice or a call, which has a name.

    Raises:
        APIError: it is malformed.
    """
    custom = value.get(CUSTOM)
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
        param = where.partition("[")[0]
        message = f"{where} must be {{'type': 'custom', 'custom': {{'name': ..., ...}}}}, got {quoted(value)}"
        raise APIError(400, message, param=param)
    return custom


def function_for(tool: Any, where: str) -> Any:
    """Return the function that stands for a custom tool; another tool as it is. Raises as `custom_of`."""
    if not is_custom(tool):
        return tool
    custom = custom_of(tool, where)
    form = custom.get("format")
    if isinstance(form, dict) and isinstance(form.get("grammar"), dict):
        form = {"type": form.get("type"), **form["grammar"]}
    function = {"name": custom["name"], "parameters": text_parameter(form, f"{where}.custom")}
    if custom.get("description") is not None:
        function["description"] = custom["description"]
    return {"type": "function", "function": function}


def choose_function(choice: Any) -> Any:
    """Return a `tool_choice` with functions in place of custom tools. Raises as `custom_of`."""
    if is_custom(choice):
        name = custom_of(choice, "tool_choice")["name"]
        return {"type": "function", "function": {"name": name}}
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        return {
            **choice,
            "allowed_tools": {**allowed, "tools": [choose_function(tool) for tool in allowed["tools"]]},
        }
    return choice


def in_function_calls(message: Any, where: str) -> Any:
    """Return a message in which calls of functions stand for those of custom tools. Raises as `custom_of`."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list) or not any(map(is_custom, calls)):
        return message
    return {**message, "tool_calls": [function_call(call, where) for call in calls]}


def function_call(call: Any, where: str) -> Any:
    """Return the call of a function that stands for that of a custom tool. Raises as `custom_of`."""
    if not is_custom(call):
        return call
    custom = custom_of(call, f"{where}.tool_calls")
    if not isinstance(custom.get("input"), str):
        raise APIError(400, f"{where}.tool_calls: input must be a string", param="messages")
    arguments = json.dumps({"input": custom["input"]}, ensure_ascii=False)
    return {
        **{name: value for name, value in call.items() if name != CUSTOM},
        "type": "function",
        "function": {"name": custom["name"], "arguments": arguments},
    }


class CustomCalls:
    """Turns the calls of one output into those of custom tools, where they are. names: of these tools."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._inputs: dict[int, CustomInput] = {}

    def read(self, calls: Sequence[ToolCall], ended: bool) -> list[ChatToolCall]:
        """Return calls, or increments of calls, as answers have them. ended: there are no more."""
        given = [each for call in calls if (each := self._call(call)) is not None]
        if ended:
            tails = ((index, text) for index, each in self._inputs.items() if (text := each.end()))
            given += [ChatToolCall(custom=CustomCall(input=text), index=index) for index, text in tails]
            self._inputs.clear()
        return given

    def _call(self, call: ToolCall) -> ChatToolCall | None:
        index = 0 if call.index is UNSET else call.index
        name, arguments = call.function.name, call.function.arguments
        if name is not UNSET and name in self._names:
            self._inputs[index] = CustomInput()
        if index not in self._inputs:
            return ChatToolCall(call.function, UNSET, call.index, call.id, call.type)
        text = "" if arguments is UNSET else self._inputs[index].add(arguments)
        if call.type is UNSET:  # an increment
            return ChatToolCall(custom=CustomCall(input=text), index=call.index) if text else None
        return ChatToolCall(UNSET, CustomCall(name, text), call.index, call.id, "custom")


def merge_calls(calls: Sequence[ChatToolCall]) -> list[ChatToolCall]:
    """Return the calls of a whole output, given each once, and then the ends of the texts of custom tools."""
    result: dict[Any, ChatToolCall] = {}
    for call in calls:
        first = result.setdefault(call.index, call)
        if first is not call and first.custom is not UNSET and call.custom is not UNSET:
            first.custom.input = f"{first.custom.input or ''}{call.custom.input}"
    return list(result.values())
