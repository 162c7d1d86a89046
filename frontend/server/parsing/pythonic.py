"""Parser for calls in Python syntax: a list of them, or (OLMo 3) a line for each.

Llama 4     [f(a=1, b="x"), g()]
LFM 2       <|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>
OLMo 3      <function_calls>
            f(a=1, b="x")
            g()
            </function_calls>
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.frontend.server.parsing.call_formats import (
    Format,
    Functions,
    const,
    json_value,
    listed_arguments,
    optional,
    sequence,
    tag,
    tags,
)
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.parser import NAME, Parser, Reading
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted

SIGN = re.compile(r"""['"()\[\]{}]""")
STRING_END = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}
CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's names: models mix the two syntaxes


@dataclass(frozen=True)
class PythonicMarks:
    """The texts around calls.

    begins: marks before a list; `bare`: it may also begin at the start of a line. opening: begins the list.
    separator: stands between calls; white space may always. closing: ends the list. end: mark after the list.
    """

    begins: tuple[str, ...]
    end: str
    opening: str = "["
    separator: str = ", "
    closing: str = "]"
    bare: bool = False

    def whole_calls(self, functions: Functions, parallel: bool) -> Format:
        """Return the format of calls without marks."""
        calls = [tag(f"{function['name']}(", keyword_arguments(function), ")") for function in functions]
        return tag(self.opening, tags(calls, self.separator, parallel), self.closing)

    def tags(self, functions: Functions, parallel: bool) -> list[Format]:
        """Return the format of calls as tags that begin with a mark, or with the name of the first function."""
        calls = self.whole_calls(functions, parallel)
        marked = [tag(begin, calls, self.end if not self.bare else "") for begin in self.begins]
        if not self.bare:
            return marked
        others = calls["content"]["tags"]
        more = optional(sequence(const(self.separator), tags(others, self.separator, True)))
        bare = [
            tag(
                self.opening + call["begin"],
                sequence(call["content"], const(call["end"]), *([more] if parallel else [])),
                self.closing,
            )
            for call in others
        ]
        return [*marked, *bare]


BARE = PythonicMarks(("<|python_start|>", "<|python_tag|>"), "<|python_end|>", bare=True)


def keyword_arguments(function: dict[str, Any]) -> Format:
    """Return the format of a function's arguments as Python's keyword arguments; see `listed_arguments`."""

    def keyword(name: str) -> str:
        if not name.isidentifier():
            raise FieldValueError(
                "tools", f": the pythonic format of calls has no way to write the parameter {quoted(name)}"
            )
        return f"{name}="

    return listed_arguments(function, keyword, json_value)


class Pythonic(Parser):
    """Parser for lists of calls, which begin at a mark or, if the dialect allows it, at the start of a line.

    A call is emitted when it is complete and followed by "," or "]" (or the end). Anything else is content: also a
    call with other arguments than keyword literals, between calls that are emitted.
    """

    def __init__(
        self,
        marks: PythonicMarks = BARE,
        new_id: Callable[[], str] = call_id,
        parallel: bool = True,
    ) -> None:
        self.marks, self.call_marks = marks, tuple(begin.strip() for begin in marks.begins)
        super().__init__(new_id, parallel)

    def read(self) -> Reading[None]:
        line_start = self.marks.opening if self.marks.bare else ""
        while mark := (yield from self.text_until(*self.call_marks, line_start=line_start)):
            if mark in self.call_marks:
                yield from self.accept(mark)
                yield from self.space()
            if (yield from self.accept(self.marks.opening)) and (yield from self.calls()):
                yield from self.space()
                if (yield from self.accept(self.marks.end)):
                    self.drop()
            else:
                self.emit_content()

    def calls(self) -> Reading[bool]:
        """Read `f(...), g(...)]` and emit the calls.

        Returns True at the end of a list with calls. Otherwise the pending text is content.
        """
        first = self._num_calls
        separator, closing = self.marks.separator.strip(), self.marks.closing.strip()
        another = True
        while another:
            yield from self.space()
            if (yield from self.accept(closing)):  # after a comma
                break
            text = yield from self.call()
            if not text:
                return False
            call = parse_call(text)
            if call is None:
                self.emit_content()
            yield from self.space()
            another = yield from self.accept(separator)
            if not another and not (yield from self.accept(closing)) and not (yield from self.at_end()):
                return False
            if call is not None:
                name, arguments = call
                self.start_call(name)
                self.emit_arguments(arguments)
        if self._num_calls == first:
            return False
        self.drop()
        return True

    def call(self) -> Reading[str]:
        """Read a name and its parentheses, and return their text; "" if the text is not a call."""
        begin = len(self.pending)
        if not (yield from self.name()) or not (yield from self.accept("(")):
            return ""
        depth = 1
        while depth > 0 and (sign := (yield from self.through(SIGN))):
            if sign in STRING_END:
                yield from self.string(sign)
            else:
                depth += 1 if sign in "([{" else -1
        return self.pending[begin:]

    def string(self, quote: str) -> Reading[None]:
        """Read the rest of a Python string after its first quote."""
        triple = yield from self.accept(quote * 2)
        yield from self.string_end(STRING_END[quote])
        while triple and not (yield from self.accept(quote * 2)) and not (yield from self.at_end()):
            yield from self.string_end(STRING_END[quote])


def parse_call(text: str) -> tuple[str, str] | None:
    """Return the name and the JSON arguments of a call; None unless its arguments are keyword literals.

    The name need not be one of Python's: functions may have names with "-".
    """
    name, _, rest = text.partition("(")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            call = ast.parse(f"f({rest}", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or call.args
            or any(part.arg is None for part in call.keywords)
        ):
            return None
        keywords = {part.arg: read_literal(part.value) for part in call.keywords}
        arguments = json.dumps(keywords, ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, SystemError):
        # SystemError: CPython 3.11 may miscount its recursion when trees are built in several threads at once.
        return None
    return (name, arguments) if NAME.fullmatch(name) and len(keywords) == len(call.keywords) else None


def read_literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, which may contain JSON's true, false and null.

    A number that is too large for a float is the largest one.

    Raises:
        ValueError: the expression is not a literal.
    """
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [read_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("** is not a literal")
        return {
            read_literal(key): read_literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key
        }
    value = ast.literal_eval(node)
    if isinstance(value, float) and math.isinf(
        value
    ):  # JSON's grammar has such numbers, but no word for infinity
        return math.copysign(sys.float_info.max, value)
    return value
