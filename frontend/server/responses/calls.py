"""Calls that the model is writing: the item of each, and its events, by the kind of its tool. No IO."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from pagewire.frontend.server.openai.custom_input import CustomInput
from pagewire.frontend.server.openai.reply import call_arguments
from pagewire.frontend.server.responses.items import new_id
from pagewire.frontend.server.responses.protocol import (
    CallItem,
    CustomCallItem,
    ExecAction,
    ItemStatus,
    LocalShellCallItem,
    ShellAction,
    ShellCallItem,
    ToolCallItem,
    ToolSearchCallItem,
)
from pagewire.frontend.server.responses.tools import ServedTool


class CallWriter:
    """A call that is being written.

    Attributes:
        item: it grows with the arguments, or is complete at their end.
    """

    def __init__(self, tool: ServedTool, call_id: str) -> None:
        self._arguments = ""
        self._input = CustomInput()
        namespace = UNSET if tool.namespace is None else tool.namespace
        self.item: ToolCallItem
        match tool.kind:
            case "custom":
                self.item = CustomCallItem(
                    id=new_id("ctc"), call_id=call_id, name=tool.name, namespace=namespace
                )
            case "local_shell":
                self.item = LocalShellCallItem(id=new_id("lsh"), call_id=call_id)
            case "shell":
                self.item = ShellCallItem(id=new_id("sh"), call_id=call_id)
            case "tool_search":
                self.item = ToolSearchCallItem(id=new_id("tsc"), call_id=call_id)
            case _:
                self.item = CallItem(id=new_id("fc"), call_id=call_id, name=tool.name, namespace=namespace)

    def add(self, arguments: str) -> tuple[str, str] | None:
        """Add to the arguments; return the type and the delta of an event, if there is one."""
        if isinstance(self.item, CallItem):
            self.item.arguments += arguments
            return "response.function_call_arguments.delta", arguments
        if isinstance(self.item, CustomCallItem):
            return self._grow(self._input.add(arguments))
        self._arguments += arguments
        return None

    def last(self) -> tuple[str, str] | None:
        """Return the type and the delta of the last event at the end of the arguments, if there is one."""
        return self._grow(self._input.end()) if isinstance(self.item, CustomCallItem) else None

    def _grow(self, text: str) -> tuple[str, str] | None:
        assert isinstance(self.item, CustomCallItem)
        self.item.input += text
        return ("response.custom_tool_call_input.delta", text) if text else None

    def end(self, status: ItemStatus) -> tuple[str, dict[str, Any]] | None:
        """Complete the item; return the type and the fields of the event, if there is one."""
        item = self.item
        item.status = status
        match item:
            case CallItem():
                return (
                    "response.function_call_arguments.done",
                    {"name": item.name, "arguments": item.arguments},
                )
            case CustomCallItem():
                return "response.custom_tool_call_input.done", {"input": item.input}
            case LocalShellCallItem():
                item.action = exec_action(call_arguments(self._arguments))
            case ShellCallItem():
                item.action = shell_action(call_arguments(self._arguments))
            case ToolSearchCallItem():
                item.arguments = call_arguments(self._arguments)
        return None


def exec_action(arguments: dict[str, Any]) -> ExecAction:
    """Return the action of a call of the local shell, without what its arguments have of another type."""
    return ExecAction(
        command=texts(arguments.get("command")),
        timeout_ms=as_whole_number(arguments.get("timeout_ms")),
        working_directory=folder if isinstance(folder := arguments.get("working_directory"), str) else None,
    )


def shell_action(arguments: dict[str, Any]) -> ShellAction:
    """Return the action of a call of the shell, without what its arguments have of another type."""
    return ShellAction(
        commands=texts(arguments.get("commands")),
        timeout_ms=as_whole_number(arguments.get("timeout_ms")),
        max_output_length=as_whole_number(arguments.get("max_output_length")),
    )


def texts(value: Any) -> list[str]:
    """Return the strings of a list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def as_whole_number(value: Any) -> int | None:
    """Return a whole number; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
