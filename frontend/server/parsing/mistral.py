"""Parser for calls of Mistral's models: a mark and a list of JSON objects, or (since tokenizer v11) a mark, a name
and arguments for each call.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}

Between a mark and its list, there may be other text, which is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pagewire.frontend.server.parsing.call_formats import (
    CallKeys,
    Format,
    Functions,
    arguments_format,
    call_objects,
    tag,
    tags,
)
from pagewire.frontend.server.parsing.deltas import short_call_id
from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import Reading

MARK, ID_MARK, ARGUMENTS_MARK = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
BRACKET = re.compile(r"\[")


class Mistral(JSONCalls):
    """Parser for text and calls of either form."""

    call_marks = (MARK,)

    def __init__(self, new_id: Callable[[], str] = short_call_id, parallel: bool = True) -> None:
        self._before_list = 0  # characters of the pending text before a list: the mark, and text behind it
        super().__init__(new_id, parallel)

    def read(self) -> Reading[None]:
        while (yield from self.text_until(MARK)):
            first = self._num_calls
            yield from self.accept(MARK)
            yield from self.space()
            listed = yield from self.comes("[")
            if (yield from (self.call_list() if listed else self.named_call())):
                continue
            if self._num_calls == first and (yield from self.list_comes()):
                self._before_list = len(self.pending)
                yield from self.call_list()
                self._before_list = 0
            self.emit_content()

    def list_comes(self) -> Reading[bool]:
        """Read up to the next list of objects or the next mark; return whether it is a list."""
        while (yield from self.through(BRACKET)):
            self._at -= 1
            if (yield from self.comes(MARK)):
                return False
            begin = len(self.pending)
            yield from self.accept("[")
            yield from self.space()
            is_list = yield from self.comes("{")
            if is_list:
                self._at = self._from + begin
                return True
        return False

    def start_call(self, name: str, given_id: str | None = None) -> None:
        """Emit the start of a call, after the text between the mark and the list of calls."""
        if self._before_list:
            at = self._at
            self._from, self._at = self._from + len(MARK), self._from + self._before_list
            self.emit_content()
            self._at, self._before_list = at, 0
        super().start_call(name, given_id)

    def named_call(self) -> Reading[bool]:
        """Read and emit `f{...}` or `f[CALL_ID]123456789[ARGS]{...}`. Returns False at other text."""
        name = yield from self.name()
        if not name:
            return False
        if (yield from self.accept(ID_MARK)):
            yield from self.name()
        yield from self.accept(ARGUMENTS_MARK)
        if not (yield from self.object_begins()):
            return False
        self.start_call(name)
        yield from self.streamed_arguments()
        return True


def call_tags(functions: Functions, parallel: bool) -> list[Format]:
    """Return the formats of a list of objects after a mark, and of names and arguments after a mark."""
    listed = [tag("", form, "") for form in call_objects(functions, CallKeys())]
    named = [
        tag(MARK + function["name"] + mark, arguments_format(function), "")
        for function in functions
        for mark in ("", ARGUMENTS_MARK)
    ]
    return [tag(f"{MARK}[", tags(listed, ", ", parallel), "]"), *named]
