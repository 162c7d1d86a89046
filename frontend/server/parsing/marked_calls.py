"""Calls with JSON arguments between marks: the parser and the format of all dialects of `CallMarks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pagewire.frontend.server.parsing.call_formats import (
    CallKeys,
    Format,
    Functions,
    arguments_format,
    call_objects,
    const,
    sequence,
    tag,
    tags,
)
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.json_calls import JSONCalls
from pagewire.frontend.server.parsing.parser import NAME, Reading, read_marks


@dataclass(frozen=True)
class CallMarks:
    """The texts around calls, in their order. White space in them is written, and may be missing or more when read.

    Attributes:
        opening: comes before the first call. begin: comes before each.
        prefix: stands before the name. numbered: ":" and the call's number stand after it.
        middle: stands between name and arguments; "": a JSON object has both.
        lists: a JSON list of such objects stands between `begin` and `end`.
        end: comes after each call. closing: comes after the last one. separator: stands between calls.
        arguments, name: keys of the arguments and the function in a JSON object. labels: keys before, of numbers.
        keyed: the function is the only key of the object, and its value has the arguments.
        others: marks that models write in the place of `begin`, too.
    """

    begin: str
    end: str = ""
    _: KW_ONLY
    opening: str = ""
    prefix: str = ""
    numbered: bool = False
    middle: str = ""
    lists: bool = False
    closing: str = ""
    separator: str = ""
    arguments: str = "arguments"
    name: str = "name"
    labels: tuple[str, ...] = ()
    keyed: bool = False
    others: tuple[str, ...] = ()

    def tags(self, functions: Functions, parallel: bool) -> list[Format]:
        """Return the format of calls as tags that begin with the first mark."""
        if self.lists:
            objects = [tag("", form, "") for form in call_objects(functions, self.keys)]
            return [tag(f"{self.begin}[", tags(objects, ", ", parallel), f"]{self.end}")]
        if self.middle:
            calls = [self._call(function) for function in functions]
        else:
            calls = [tag(self.begin, form, self.end) for form in call_objects(functions, self.keys)]
        if not self.opening:
            return calls
        return [tag(self.opening, tags(calls, self.separator, parallel), self.closing)]

    @property
    def keys(self) -> CallKeys:
        """The keys of a call that is an object."""
        return CallKeys(self.arguments, "" if self.keyed else self.name, self.labels)

    def _call(self, function: dict[str, Any]) -> Format:
        arguments = arguments_format(function)
        begin = self.begin + self.prefix + function["name"]
        if not self.numbered:
            return tag(begin + self.middle, arguments, self.end)
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        return tag(f"{begin}:", sequence(number, const(self.middle), arguments), self.end)


class MarkedCalls(JSONCalls):
    """Parser for calls between marks, with text around them. All marks but the first may be missing."""

    def __init__(self, marks: CallMarks, new_id: Callable[[], str] = call_id, parallel: bool = True) -> None:
        self.marks = marks
        self._begin = marks.begin.strip()
        others = tuple(mark.strip() for mark in marks.others)
        self._begins = (self._begin, *others)
        self.call_marks = tuple(filter(None, (marks.opening.strip(), *self._begins)))
        end = marks.end.split()[-1:]
        self.close = end[0] if end and end[0].startswith("<") else ""
        super().__init__(new_id, parallel)

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(*self.call_marks)):
            yield from self.accept(mark)
            begun = mark in self._begins or (yield from read_marks(self, self._begin))
            yield from self.space()
            if not begun or not (yield from self.body()):
                self.emit_content()
                continue
            for text in (self.marks.end, self.marks.closing):
                if (yield from read_marks(self, text)):
                    self.drop()

    def body(self) -> Reading[bool]:
        """Read and emit what stands between the marks of a call. Returns False at other text."""
        if self.marks.lists and (yield from self.comes("[")):
            return (yield from self.call_list())
        return (yield from (self.named_call() if self.marks.middle else self.call_object()))

    def call_object(self) -> Reading[bool]:
        """Read an object and emit it as a call. Returns False, and emits nothing, if it is not a call."""
        if not self.marks.keyed:
            return (yield from super().call_object())
        if not (yield from self.accept("{")):
            return False
        name = (yield from self.key()) or ""
        if not NAME.fullmatch(name) or not (yield from self.object_begins()):
            return False
        self.start_call(name)
        yield from self.streamed_arguments()
        yield from self.end_object()
        return True

    def named_call(self) -> Reading[bool]:
        """Read and emit a name, the mark behind it, and arguments. Returns False at other text."""
        begin = len(self.pending)
        if not (yield from read_marks(self, self.marks.prefix)):
            return False
        name = yield from self.name()
        number = ""
        if name and self.marks.numbered and (yield from self.accept(":")):
            number = yield from self.name()
        given_id = self.pending[begin:] if number else None
        if not name or not (yield from read_marks(self, self.marks.middle)):
            return False
        yield from self.space()
        if not (yield from self.object_begins()):
            return False
        self.start_call(name, given_id)
        yield from self.streamed_arguments()
        return True
