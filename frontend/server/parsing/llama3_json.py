"""Parser for calls of Llama 3.1 and 3.2: bare JSON objects, optionally after a mark, or several with semicolons.

<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

from pagewire.frontend.server.parsing.call_formats import (
    Format,
    Functions,
    call_object,
    const,
    json_schema,
    optional,
    sequence,
    tag,
    tags,
    triggered,
)
from pagewire.frontend.server.parsing.constrained import arguments_schema
from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import Reading

MARK = "<|python_tag|>"


class Llama3JSON(JSONCalls):
    """Parser for calls anywhere in the text, with or without the mark.

    An object without arguments is not a call, since ordinary answers may be JSON with a "name".
    """

    needs_arguments = True
    call_marks = (MARK,)

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(MARK, "{")):
            if mark == MARK:
                yield from self.accept(MARK)
                yield from self.space()
            while (yield from self.call_object()):
                yield from self.space()
                yield from self.accept(";")
                yield from self.space()
            self.emit_content()


def whole_calls(functions: Functions, parallel: bool) -> Format:
    """Return the format of bare objects, with the mark before them or not."""
    calls = [tag("", call_object(function, "parameters"), "") for function in functions]
    return sequence(optional(const(MARK)), tags(calls, "; ", parallel))


def text_with_calls(functions: Functions, parallel: bool) -> Format:
    """Return the format of text with objects after the mark, or that begin as a call of a function does."""
    marked = [tag(MARK, call_object(function, "parameters"), "") for function in functions]
    bare = [
        tag(f'{{"name": "{function["name"]}", "{name}": ', json_schema(arguments_schema(function)), "}")
        for function in functions
        for name in ("parameters", "arguments")
    ]
    return triggered([*marked, *bare], [MARK, *(form["begin"] for form in bare)], parallel)
