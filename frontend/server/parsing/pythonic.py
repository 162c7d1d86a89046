"""Parser for calls of Llama 3.2, Llama 4 and others: a list of calls in Python syntax.

[f(a=1, b="x"), g()]
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from pagewire.frontend.server.parsing.parser import NAME, Parser, Reading

MARKS = ("<|python_start|>", "<|python_tag|>")
END_MARK = "<|python_end|>"
SIGN = re.compile(r"""['"()\[\]{}]""")
STRING_END = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}
CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's names: models mix the two syntaxes


class Pythonic(Parser):
    """Parser for lists of calls, which begin at a mark or at the start of a line.

    A call is emitted when it is complete and followed by "," or "]" (or the end). Anything else is content: also a
    call with other arguments than keyword literals, between calls that are emitted.
    """

    call_marks = MARKS

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(*MARKS, line_start="[")):
            if mark in MARKS:
                yield from self.accept(mark)
                yield from self.space()
            if (yield from self.accept("[")) and (yield from self.calls()):
                yield from self.space()
                if (yield from self.accept(END_MARK)):
                    self.drop()
            else:
                self.emit_content()

    def calls(self) -> Reading[bool]:
        """Read `f(...), g(...)]` and emit the calls.

        Returns True at the end of a list with calls. Otherwise the pending text is content.
        """
        first = self._num_calls
        another = True
        while another:
            yield from self.space()
            if (yield from self.accept("]")):  # after a comma
                break
            text = yield from self.call()
            if not text:
                return False
            call = call_of(text)
            if call is None:
                self.emit_content()
            yield from self.space()
            another = yield from self.accept(",")
            if not another and not (yield from self.accept("]")) and not (yield from self.at_end()):
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


def call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the JSON arguments of a Python call; None unless its arguments are keyword literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(part.arg is None for part in call.keywords):
            return None
        name, keywords = ast.unparse(call.func), {part.arg: literal(part.value) for part in call.keywords}
        arguments = json.dumps(keywords, ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, SystemError):
        # SystemError: CPython 3.11 may miscount its recursion when trees are built in several threads at once.
        return None
    return (name, arguments) if NAME.fullmatch(name) and len(keywords) == len(call.keywords) else None


def literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, which may contain JSON's true, false and null.

    Raises:
        ValueError: the expression is not a literal.
    """
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("** is not a literal")
        return {
            literal(key): literal(value) for key, value in zip(node.keys, node.values, strict=True) if key
        }
    return ast.literal_eval(node)
