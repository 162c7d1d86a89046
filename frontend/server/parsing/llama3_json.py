"""Parsers for calls that are bare JSON: objects, of Llama 3.1 and 3.2, or a list of objects, of xLAM.

<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
"""

from __future__ import annotations

from pagewire.frontend.server.parsing.call_formats import (
    CallKeys,
    Format,
    Functions,
    arguments_format,
    call_objects,
    const,
    optional,
    sequence,
    tag,
    tags,
    trigger_format,
)
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
    calls = [tag("", form, "") for form in call_objects(functions, CallKeys("parameters"))]
    return sequence(optional(const(MARK)), tags(calls, "; ", parallel))


def text_with_calls(functions: Functions, parallel: bool) -> Format:
    """Return the format of text with objects after the mark, or that begin as a call of a function does."""
    marked = [tag(MARK, form, "") for form in call_objects(functions, CallKeys("parameters"))]
    bare = [
        tag(f'{{"name": "{function["name"]}", "{name}": ', arguments_format(function), "}")
        for function in functions
        for name in ("parameters", "arguments")
    ]
    return trigger_format([*marked, *bare], [MARK, *(form["begin"] for form in bare)], parallel)


class ListedJSON(JSONCalls):
    """Parser for lists of calls anywhere in the text; other lists are text."""

    needs_arguments = True
    call_marks = ("[",)

    def read(self) -> Reading[None]:
        while (yield from self.text_until("[")):
            yield from self.call_list()
            self.emit_content()


def whole_list(functions: Functions, parallel: bool) -> Format:
    """Return the format of a list of calls."""
    objects = [tag("", form, "") for form in call_objects(functions, CallKeys("arguments"))]
    return tag("[", tags(objects, ", ", parallel), "]")


def text_with_list(functions: Functions, parallel: bool) -> Format:
    """Return the format of text with lists that begin as a call of a function does."""
    objects = [tag("", form, "") for form in call_objects(functions, CallKeys("arguments"))]
    more = [optional(sequence(const(", "), tags(objects, ", ", True)))] if parallel else []
    lists = [
        tag(
            f'[{{"name": "{function["name"]}", "arguments": ',
            sequence(arguments_format(function), const("}"), *more),
            "]",
        )
        for function in functions
    ]
    return trigger_format(lists, [form["begin"] for form in lists], parallel)
