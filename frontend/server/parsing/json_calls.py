"""Base class of the parsers for calls written as JSON objects: `{"name": "f", "arguments": {...}}`.

An object counts as a call once its name is known and an object of arguments begins. Nothing is emitted before that,
and an object that turns out not to be a call is content. From there on, arguments are emitted as the model writes
them, even if they are invalid or incomplete: OpenAI's API does the same, and the client parses them. They end where
their brackets are balanced. If the tag that ends a call comes before that, the missing brackets are added.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from pagewire.frontend.server.parsing.parser import NAME, Parser, Reading

ARGUMENTS = ("arguments", "parameters", "args")
NAMES = ("name", "tool_name")
LABELS = ("id", "type", "tool_call_id")  # members that are skipped
MAX_STRING = 512  # longest key, name or label in characters; with a longer one, the object is not a call
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
STRING_END = re.compile(r'["\\]')
SIGN = re.compile(r'["{}\[\]<]')
CLOSING = {"{": "}", "[": "]"}


class JSONCalls(Parser):
    """Base class of the parsers for formats with JSON objects.

    Attributes:
        needs_arguments: an object without an object of arguments is not a call.
        close: tag that ends a call, even if the brackets of its arguments are not balanced.
    """

    needs_arguments: ClassVar[bool] = False
    close: str = ""

    def call_list(self) -> Reading[bool]:
        """Read `[{...}, {...}]` and emit the calls. Returns False at text that is not a call."""
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
        """Read an object and emit it as a call. Returns False, and emits nothing, if it is not a call."""
        name, arguments = "", ""
        more = yield from self.accept("{")
        while more:
            key = yield from self.key()
            if key in NAMES:
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
        self.emit_arguments(arguments)
        yield from self.end_object()
        return True

    def key(self) -> Reading[str | None]:
        """Read `"key":` and white space around it, and return the key; None at other text."""
        yield from self.space()
        key = yield from self.string()
        yield from self.space()
        if not (yield from self.accept(":")):
            return None
        yield from self.space()
        return key

    def string(self) -> Reading[str | None]:
        """Read and return a string of at most `MAX_STRING` characters; None at other text."""
        while (match := STRING.match(self._text, self._at)) is None:
            begin = self._text[self._at : self._at + 1]
            if begin not in ("", '"') or len(self._text) - self._at > MAX_STRING:
                return None
            if not (yield from self.more()):
                return None
        self._at = match.end()
        return decode_string(match[0]) if len(match[0]) <= MAX_STRING else None

    def object_begins(self) -> Reading[bool]:
        """Return whether an object comes next ("{" and then a key or "}"), without reading it."""
        begin = len(self.pending)
        is_object = yield from self.accept("{")
        if is_object:
            yield from self.space()
            is_object = (yield from self.comes('"')) or (yield from self.comes("}"))
        self._at = self._from + begin
        return is_object

    def streamed_arguments(self) -> Reading[None]:
        """Read a value, and emit it as arguments while it is read."""
        self._in_arguments = True
        missing = yield from self.value()
        self._in_arguments = False
        self.emit_pending_arguments()
        self.emit_arguments(missing)

    def whole_arguments(self) -> Reading[str]:
        """Read arguments whose call has no name yet, or that are `null` or a string.

        Returns their JSON text, or the text of the string, whatever it is, unless `needs_arguments`; "" if they are
        invalid.
        """
        begin = len(self.pending)
        if (yield from self.accept("null")):
            return "{}"
        quoted = yield from self.comes('"')
        if not quoted and not (yield from self.comes("{")):
            return ""
        yield from self.value()
        text: str | None = self.pending[begin:]
        if quoted:
            text = decode_string(text or "")
            if text is not None and not self.needs_arguments:
                return text if text.strip() else "{}"
        return text if text and isinstance(load_json(text), dict) else ""

    def end_object(self) -> Reading[None]:
        """Read the rest of a call's object, which may be missing."""
        yield from self.space()
        if (yield from self.accept(",")):
            yield from self.value("}")
            self.drop()
        elif (yield from self.accept("}")):
            self.drop()

    def value(self, missing: str = "") -> Reading[str]:
        """Read a string or an object to its end, to `close` or to the end of the reply.

        missing: the closing brackets of what is open. Returns those that are missing before `close`.
        """
        while sign := (yield from self.through(SIGN)):
            if sign == '"':
                yield from self.string_end(STRING_END)
            elif sign == "<" and self.close:
                self._at -= 1
                if (yield from self.comes(self.close)):
                    return missing
                self._at += 1
            elif sign in CLOSING:
                missing = CLOSING[sign] + missing
            elif sign in "}]":
                missing = missing[1:]
            if not missing:
                return ""
        return ""


def load_json(text: str) -> Any:
    """Return the value of JSON text; None if it is invalid."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def decode_string(text: str) -> str | None:
    """Return the string that JSON text encodes; None if it is not a string, or cannot be encoded as UTF-8."""
    value = load_json(text)
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value
