"""Calls written as JSON objects: `{"name": "f", "arguments": {...}}`.

An object is a call once its head says so: its name is known, and an object of arguments begins. Until then
nothing is passed on, and what turns out otherwise is content. From there on arguments are passed on as the model
writes them, valid or not and complete or not, as OpenAI's API does: whoever gets them parses them. They end
where their brackets are balanced.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from pagewire.frontend.server.parsing.parser import NAME, Parser, Reading

ARGUMENTS = ("arguments", "parameters")
LABELS = ("id", "type")  # members that say nothing new
MAX_STRING = 512  # characters of a key, a name or a label
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
STRING_END = re.compile(r'["\\]')
SIGN = re.compile(r'["{}\[\]<]')


class JSONCalls(Parser):
    """What the formats with JSON objects share.

    Attributes:
        needs_arguments: an object with only a name is no call.
        close: what ends a call, even within arguments whose brackets are not balanced.
    """

    needs_arguments: ClassVar[bool] = False
    close: ClassVar[str] = ""

    def call_list(self) -> Reading[bool]:
        """Read `[{...}, {...}]`, passing calls on. False: something stands there that is none."""
        if not (yield from self.accept("[")):
            return False
        while True:
            yield from self.space()
            if not (yield from self.call_object()):
                return False
            yield from self.space()
            if (yield from self.accept("]")):
                self.drop()
                return True
            if not (yield from self.accept(",")):
                return False
            self.drop()

    def call_object(self) -> Reading[bool]:
        """Read one object and pass it on as a call. False: it is none, and nothing is passed on."""
        name, arguments = "", ""
        more = yield from self.accept("{")
        while more:
            key = yield from self.key()
            if key == "name":
                name = (yield from self.string()) or ""
                if not NAME.fullmatch(name):
                    return False
            elif key in ARGUMENTS and name and (yield from self.object_begins()):
                self.start_call(name)
                yield from self.streamed_arguments()
                yield from self.end_object()
                return True
            elif key in ARGUMENTS:
                arguments = yield from self.whole_arguments()
                if not arguments:
                    return False
            elif key not in LABELS or (yield from self.string()) is None:
                return False
            yield from self.space()
            more = not (name and arguments) and (yield from self.accept(","))
        if not arguments and not self.needs_arguments and (yield from self.comes("}")):
            arguments = "{}"
        if not (name and arguments):
            return False
        self.start_call(name)
        self.say_arguments(arguments)
        yield from self.end_object()
        return True

    def key(self) -> Reading[str | None]:
        """Read `"key":` and white space around it; None: something else stands there."""
        yield from self.space()
        key = yield from self.string()
        yield from self.space()
        if not (yield from self.accept(":")):
            return None
        yield from self.space()
        return key

    def string(self) -> Reading[str | None]:
        """Read a short string; None: something else stands there."""
        while (match := STRING.match(self._text, self._at)) is None:
            begin = self._text[self._at : self._at + 1]
            if begin not in ("", '"') or len(self._text) - self._at > MAX_STRING:
                return None
            if not (yield from self.more()):
                return None
        self._at = match.end()
        return decoded(match[0]) if len(match[0]) <= MAX_STRING else None

    def object_begins(self) -> Reading[bool]:
        """Whether an object comes next: a bracket, and then a key or its end."""
        begin = len(self.pending)
        found = yield from self.accept("{")
        if found:
            yield from self.space()
            found = (yield from self.comes('"')) or (yield from self.comes("}"))
        self._at = self._from + begin
        return found

    def streamed_arguments(self) -> Reading[None]:
        """Read a value, passing it on as arguments as it comes."""
        self._in_arguments = True
        yield from self.value()
        self._in_arguments = False
        self.pass_arguments()

    def whole_arguments(self) -> Reading[str]:
        """Read the arguments of a call whose name is not known yet, or that are no object: `null`, or JSON in a
        string. Returns their JSON text; "" if they are none.
        """
        begin = len(self.pending)
        if (yield from self.accept("null")):
            return "{}"
        quoted = yield from self.comes('"')
        if not quoted and not (yield from self.comes("{")):
            return ""
        yield from self.value()
        text = self.pending[begin:]
        if quoted:
            text = decoded(text) or ""
        return text if isinstance(loaded(text), dict) else ""

    def end_object(self) -> Reading[None]:
        """Read the rest of the object of a call. It may be missing."""
        yield from self.space()
        if (yield from self.accept(",")):
            yield from self.value(depth=1)
            self.drop()
        elif (yield from self.accept("}")):
            self.drop()

    def value(self, depth: int = 0) -> Reading[None]:
        """Read a string or an object to its end, or to `close`, or to the end of all. `depth`: of open brackets."""
        while sign := (yield from self.through(SIGN)):
            if sign == '"':
                yield from self.string_end(STRING_END)
            elif sign == "<" and self.close:
                self._at -= 1
                if (yield from self.comes(self.close)):
                    return
                self._at += 1
            depth += (sign in "{[") - (sign in "}]")
            if depth <= 0:
                return


def loaded(text: str) -> Any:
    """The value of JSON text; None if it has none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def decoded(text: str) -> str | None:
    """The string that JSON text is; None if it is none, or one that UTF-8 cannot write."""
    value = loaded(text)
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value
