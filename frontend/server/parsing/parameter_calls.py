"""Calls whose parameters stand between tags, each by itself: the parser and the format of every such dialect.

Strings stand there without quotes, so the schema of a function says what a text means (`argument_types.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pagewire.frontend.server.parsing.argument_types import ONLY_TEXT, ParameterTypes, argument_json
from pagewire.frontend.server.parsing.call_formats import (
    Format,
    Functions,
    check_required,
    const,
    either,
    json_value,
    keywords,
    optional,
    sequence,
    tag,
    tags,
    text_value,
)
from pagewire.frontend.server.parsing.constrained import arguments_schema
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.parser import Parser, Reading, read_marks
from pagewire.ipc.errors import FieldValueError

LENGTHS = ("minLength", "maxLength")


@dataclass(frozen=True)
class ParameterMarks:
    """The texts around calls and parameters, in their order. White space in them may be missing when read.

    opening: comes before the first call. call: comes before each name. name_end: ends it.
    key: comes before a parameter's name. key_end: ends it. value_end: comes after its value.
    call_end: ends the call. closing: comes after the last one. separator: stands between calls.
    pad: white space on both sides of a value that does not belong to it.
    text_key_end: comes in the place of `key_end` before a string, where a mark says that it is one.
    index_end: comes after `name_end` and the number of the call. type_end: the same after `key_end` and a type.
    escape: stands on both sides of a string that the model protects, where it does.
    """

    call: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    call_end: str
    _: KW_ONLY
    opening: str = ""
    closing: str = ""
    separator: str = "\n"
    pad: str = ""
    text_key_end: str = ""
    index_end: str = ""
    type_end: str = ""
    escape: tuple[str, str] = ("", "")

    def tags(self, functions: Functions, parallel: bool) -> list[Format]:
        """Return the format of calls as tags that begin with the first mark.

        Raises:
            ValueError: a function's parameters cannot be written so.
        """
        calls = [self._call(function) for function in functions]
        return (
            [tag(self.opening, tags(calls, self.separator, parallel), self.closing)]
            if self.opening
            else calls
        )

    def _call(self, function: dict[str, Any]) -> Format:
        parameters = self.parameters(function)
        if self.index_end:
            number = {"type": "regex", "pattern": "[0-9]{1,4}"}
            parameters = sequence(number, const(self.index_end), parameters)
        return tag(self.call + function["name"] + self.name_end, parameters, self.call_end)

    def parameters(self, function: dict[str, Any]) -> Format:
        """Return the format of a function's parameters, in the order of their declaration.

        Raises:
            ValueError: they cannot be written so.
        """
        schema = arguments_schema(function)
        properties, required, definitions = keywords(schema)
        check_required(properties, required)
        types = ParameterTypes(schema)
        forms = []
        for name, part in properties.items():
            if self.key_end.strip()[0] in name:
                raise FieldValueError(
                    "tools", f": {name[:100]!r} cannot be written as the name of a parameter"
                )
            kinds = types.types(part)
            form = self._parameter(name, text_form(part, kinds, definitions, self.value_end[0]), kinds)
            forms.append(form if name in required else optional(form))
        return sequence(*forms)

    def _parameter(self, name: str, value: Format, types: frozenset[str]) -> Format:
        key_end = self.text_key_end if "string" in types and self.text_key_end else self.key_end
        if self.type_end:
            key_end += type_name(types) + self.type_end
        begin = self.key + name + key_end + self.pad
        return tag(begin, value, self.pad + self.value_end)


def text_form(part: Any, types: frozenset[str], definitions: dict[str, Any], end: str) -> Format:
    """Return the format of a value: JSON, or text without quotes where the schema allows a string.

    end: the character that begins what comes after it.
    """
    if "string" not in types:
        return json_value(part, definitions)
    if types == ONLY_TEXT and isinstance(part, dict):
        values = [part["const"]] if "const" in part else part.get("enum")
        if values:
            return either(*map(const, values))
        if isinstance(pattern := part.get("pattern"), str):
            return {"type": "regex", "pattern": search_expression(pattern)}
        if any(name in part for name in LENGTHS):
            least, most = (part.get(name, "") for name in LENGTHS)
            return {"type": "regex", "pattern": f"[^{end}]{{{least or 0},{most}}}"}
    return text_value(part)


def type_name(types: frozenset[str]) -> str:
    """Return the one name for the types of a value that stands beside it."""
    if "string" in types:
        return "string"
    names = sorted({"number" if name == "integer" else name for name in types})
    return next((name for name in names if name != "null"), "null")


def search_expression(pattern: str) -> str:
    """Return the regular expression of whole texts in which a schema's pattern is found."""
    begin = "" if pattern.startswith("^") else "[^<]*"
    end = "" if pattern.endswith("$") else "[^<]*"
    return f"{begin}({pattern.removeprefix('^').removesuffix('$')}){end}"


class ParameterCalls(Parser):
    """Parser for calls with parameters between tags, and text around them. functions: those that may be called.

    A call begins once its name and a parameter, or the call's end, have come. Strings are emitted while they are
    read, other values when they are complete. Text between parameters is dropped. What is cut short is incomplete.
    """

    def __init__(
        self,
        marks: ParameterMarks,
        functions: Functions = (),
        new_id: Callable[[], str] = call_id,
        parallel: bool = True,
    ) -> None:
        self.marks = marks
        self._types = {function["name"]: ParameterTypes(arguments_schema(function)) for function in functions}
        self._call, self._opening = marks.call.strip(), marks.opening.strip()
        self._key = marks.key.strip()
        self._ends = tuple(filter(None, (marks.call_end.strip(), marks.closing.strip())))
        self.call_marks = tuple(filter(None, (self._opening, self._call)))
        self._next = [self._key, *self._ends]
        self._is_text = False  # the mark of the parameter says that it is a string
        self._escape_end = ""  # what ends the string before its mark
        super().__init__(new_id, parallel)

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(*self.call_marks)):
            yield from self.accept(mark)
            begun = mark == self._call or (yield from read_marks(self, self._call))
            if not begun or not (yield from self.call()):
                self.emit_content()
                continue
            while self._opening and (yield from read_marks(self, self._call)) and (yield from self.call()):
                pass
            if (yield from read_marks(self, self.marks.closing)):
                self.drop()

    def call(self) -> Reading[bool]:
        """Read and emit a call after its mark. Returns False, and emits nothing, if it is none."""
        yield from self.space()
        name = yield from self.name()
        if not name or not (yield from read_marks(self, self.marks.name_end)):
            return False
        if self.marks.index_end:
            yield from self.name()
            if not (yield from read_marks(self, self.marks.index_end)):
                return False
        yield from self.space()
        has_parameter = yield from self.comes(self._key)
        if not has_parameter and not (yield from self.comes(self._ends[0])):
            return False
        self.start_call(name)
        types = self._types.get(name) or ParameterTypes({})
        written = "{"
        while (mark := (yield from self.next_mark())) == self._key:
            self.drop()
            key = yield from self.key()
            if key is None:
                return True
            self.emit_arguments(f"{written}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from self.value(ONLY_TEXT if self._is_text else types.of(key))):
                return True
            written = ", "
        if mark:
            self.emit_arguments("{}" if written == "{" else "}")
        self.drop()
        return True

    def next_mark(self) -> Reading[str]:
        """Read through the next parameter's mark or the call's end, and return it; "" at the end of the reply."""
        pattern = re.compile("|".join(map(re.escape, self._next)))
        while (match := pattern.search(self._text, self._at)) is None:
            self._at = len(self._text) - self._held(self._next)
            if not (yield from self.more()):
                self._at = len(self._text)
                return ""
        self._at = match.end()
        return match[0]

    def key(self) -> Reading[str | None]:
        """Read a parameter's name, and what ends it; None if the reply ends before."""
        first, *others = self.marks.key_end.replace("><", "> <").split()
        if not (yield from self.hold_until(first)):
            self.drop()
            return None
        key = self.pending.strip()
        yield from self.accept(first)
        text_end = " ".join(self.marks.text_key_end.split()[1:])
        self._is_text = bool(text_end) and (yield from read_marks(self, text_end))
        for mark in () if self._is_text else others:
            yield from read_marks(self, mark)
        if self.marks.type_end:
            self._is_text = (yield from self.name()) == "string"
            yield from read_marks(self, self.marks.type_end)
        yield from self.accept(self.marks.pad)
        begin, end = self.marks.escape
        self._escape_end = end if begin and (yield from self.accept(begin)) else ""
        self.drop()
        return key

    def value(self, types: frozenset[str]) -> Reading[bool]:
        """Read and emit a value; return whether its end has come."""
        end = self._escape_end + self.marks.value_end.strip()
        if self._escape_end and "string" in types:
            types = ONLY_TEXT
        if types == ONLY_TEXT:
            self.emit_arguments('"')
            return (yield from self.string_until(self.marks.pad + end, end))
        if not (yield from self.hold_until(end)):
            self.emit_pending_arguments()
            return False
        text = self.pending.removesuffix(self.marks.pad)
        self.emit_arguments(argument_json(text, types))
        yield from self.accept(end)
        self.drop()
        return True
