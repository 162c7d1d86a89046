"""Calls of Gemma's models: names and values without quotes, strings between marks of their own.

FunctionGemma   <start_function_call>call:f{city:<escape>Köln<escape>,days:3}<end_function_call>
Gemma 4         <|tool_call>call:f{city:<|"|>Köln<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.frontend.server.parsing.argument_types import JSON_TYPES, argument_json
from pagewire.frontend.server.parsing.call_formats import (
    Format,
    Functions,
    const,
    either,
    json_value,
    listed_arguments,
    tag,
    text_value,
)
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.parser import Parser, Reading, read_marks
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted

HEAD = "call:"
KEY = re.compile(r"[\w.$-]{1,256}")
BARE_END = re.compile(r"[,\]}]")
CLOSING = {"{": "}", "[": "]"}
PLAIN_TYPES = ("integer", "number", "boolean", "null")  # written as in JSON


@dataclass(frozen=True)
class EscapeMarks:
    """The texts around calls, and the one on both sides of a string."""

    begin: str
    end: str
    quote: str

    def tags(self, functions: Functions, parallel: bool) -> list[Format]:
        """Return the format of calls as tags that begin with the first mark.

        Raises:
            ValueError: a function's parameters cannot be written so.
        """
        del parallel  # each call has marks of its own
        return [
            tag(
                f"{self.begin}{HEAD}{function['name']}{{",
                self.arguments(function),
                f"}}{self.end}",
            )
            for function in functions
        ]

    def arguments(self, function: dict[str, Any]) -> Format:
        """Return the format of a function's arguments between their brackets.

        Raises:
            ValueError: they cannot be written so.
        """
        return listed_arguments(function, self._key, self._value, separator=",")

    def _key(self, name: str) -> str:
        if not KEY.fullmatch(name):
            raise FieldValueError(
                "tools", f": the model's format of calls has no way to write the parameter {quoted(name)}"
            )
        return f"{name}:"

    def _value(self, part: Any, definitions: dict[str, Any]) -> Format:
        """Return the format of a value; see `json_value`. The values of objects and unknown types are not known."""
        if not isinstance(part, dict):
            raise FieldValueError("tools", ": the model's format of calls needs the type of each parameter")
        values = [part["const"]] if "const" in part else part.get("enum")
        if values:
            return either(*(const(self._written(value)) for value in values))
        if part.get("type") == "string":
            return tag(self.quote, text_value(part), self.quote)
        if part.get("type") in PLAIN_TYPES:
            return json_value(part, definitions)
        if part.get("type") == "array" and isinstance(items := part.get("items"), dict):
            item = self._value(items, definitions)
            more = {"type": "tags_with_separator", "tags": [tag("", item, "")], "separator": ","}
            return tag("[", more, "]")
        if part.get("type") == "object" and part.get("properties"):
            return tag(
                "{", listed_arguments({"parameters": part}, self._key, self._value, separator=","), "}"
            )
        raise FieldValueError(
            "tools", ": the model's format of calls has no way to write a parameter of several types"
        )

    def _written(self, value: Any) -> str:
        if isinstance(value, (dict, list)):
            raise FieldValueError(
                "tools", ": the model's format of calls has no way to write an enum of objects"
            )
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)


class EscapedCalls(Parser):
    """Parser for calls with text around them. Arguments are emitted as JSON, each value when it is complete.

    Strings are emitted while they are read. The mark that ends a call may be missing.
    """

    def __init__(
        self, marks: EscapeMarks, new_id: Callable[[], str] = call_id, parallel: bool = True
    ) -> None:
        self.marks, self.call_marks = marks, (marks.begin,)
        super().__init__(new_id, parallel)

    def read(self) -> Reading[None]:
        while (yield from self.text_until(self.marks.begin)):
            yield from self.accept(self.marks.begin)
            name = ""
            if (yield from read_marks(self, HEAD)):
                name = yield from self.name()
            if not name or not (yield from self.accept("{")):
                self.emit_content()
                continue
            self.start_call(name)
            self.emit_arguments("{")
            yield from self.members()
            if (yield from read_marks(self, self.marks.end)):
                self.drop()

    def members(self) -> Reading[None]:
        """Read and emit arguments after the bracket that opens them, through the one that closes them."""
        brackets, in_name = ["{"], True
        while brackets:
            yield from self.space()
            self.drop()
            if (yield from self.at_end()):
                return
            sign = self._text[self._at]
            if sign in "}]":
                self._at += 1
                self.emit_arguments(CLOSING[brackets.pop()])
                in_name = False
            elif sign == ",":
                self._at += 1
                self.emit_arguments(", ")
                in_name = brackets[-1] == "{"
            elif in_name:
                name = (yield from self.text_before(":")).strip()
                self.emit_arguments(
                    json.dumps(name.removeprefix(self.marks.quote).removesuffix(self.marks.quote))
                )
                if (yield from self.accept(":")):
                    self.emit_arguments(": ")
                in_name = False
            elif sign in CLOSING:
                self._at += 1
                brackets.append(sign)
                self.emit_arguments(sign)
                in_name = sign == "{"
            else:
                yield from self.value()
            self.drop()

    def text_before(self, mark: str) -> Reading[str]:
        """Read and return the text before a mark."""
        yield from self.hold_until(mark)
        return self.pending

    def value(self) -> Reading[None]:
        """Read and emit a value that is no object and no list."""
        if not (yield from self.accept(self.marks.quote)):
            while (match := BARE_END.search(self._text, self._at)) is None:
                self._at = len(self._text)
                if not (yield from self.more()):
                    break
            else:
                self._at = match.start()
            self.emit_arguments(argument_json(self.pending.strip(), JSON_TYPES))
            return
        self.drop()
        self.emit_arguments('"')
        yield from self.string_until(self.marks.quote)
