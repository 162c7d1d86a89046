"""Parser and format of replies that a checkpoint describes (`response_template.py`).

The text of reasoning and content is emitted while it is read, a call when its region is closed. A region of calls
whose text is none is content, with its marks. Unlike transformers, several regions of content are all kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.frontend.server.parsing.argument_types import ParameterTypes
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
from pagewire.frontend.server.parsing.constrained import arguments_schema
from pagewire.frontend.server.parsing.deltas import ContentDelta, Reasoning, call_id
from pagewire.frontend.server.parsing.gemma import EscapeMarks
from pagewire.frontend.server.parsing.parameter_calls import ParameterMarks
from pagewire.frontend.server.parsing.parser import NAME, Parser, Reading
from pagewire.frontend.server.parsing.response_template import (
    CALLS,
    CONTENT,
    Mark,
    ReplyRegion,
    ResponseTemplate,
)
from pagewire.ipc.errors import FieldValueError

SIMPLE = re.compile(r"\(\?P<(\w+)>((?:[^()\\]|\\.)*)\)|\\s[*+]|\\([^\w\s])|([^\\()\[\]{}.*+?|^$])", re.DOTALL)
SPACES = {"type": "regex", "pattern": r"\s{0,8}"}


class TemplateParser(Parser):
    """Parser of whole replies. functions: those that may be called. prompt: it may have the reply's beginning."""

    def __init__(
        self,
        template: ResponseTemplate,
        functions: Functions = (),
        new_id: Callable[[], str] = call_id,
        parallel: bool = True,
        prompt: str = "",
    ) -> None:
        self.template, self.functions = template, functions
        self._types = {function["name"]: ParameterTypes(arguments_schema(function)) for function in functions}
        self._region = template.implicit
        self._captures: dict[str, str] = {}
        self._body = 0  # characters of the pending text before the body of a call
        self._begun = False  # the region has text
        self._written: set[type] = set()  # kinds of text that the reply has
        super().__init__(new_id, parallel)
        self.feed(template.reply_in(prompt))

    def after(self, prompt: str) -> TemplateParser:
        """Return a new parser of the same replies, to this prompt."""
        return TemplateParser(self.template, self.functions, self._new_id, self._parallel, prompt)

    def read(self) -> Reading[None]:
        while True:
            found, held = self.next_mark()
            if found is not None:
                self.take(*found)
            elif self._ended:
                self._at = len(self._text)
                self.leave(self._at)
                return
            else:
                self._at = max(self._at, held)
                self.flush()
                yield from self.more()

    def next_mark(self) -> tuple[tuple[ReplyRegion, bool, Any] | None, int]:
        """Return the first mark that is certain: its region, whether it opens this, and the match.

        And where text begins that may be a mark, or the beginning of one.
        """
        marks = [(region, True, region.open) for region in self.template.regions if region.open is not None]
        current = self._region
        if current is not None and current.close is not None:
            marks.append((current, False, current.close))
        if current is not None and current.open is not None:
            marks = [each for each in marks if not each[1]]
        found, held = [], len(self._text)
        for region, opens, mark in marks:
            match = mark.search(self._text, self._at, self._ended)
            if match is None or (match.start() == match.end() and not self._begun):
                continue
            if not self._ended and not mark.is_certain(match, self._text):
                held = min(held, match.start())
            else:
                found.append((match.start(), -len(match[0]), not opens, region.name, region, opens, match))
        first = min(found, key=lambda each: each[:4], default=None)
        if first is None or (not self._ended and first[0] >= held):
            return None, held
        return first[4:], held

    def take(self, region: ReplyRegion, opens: bool, match: Any) -> None:
        """Read up to and through a mark, and enter or leave its region."""
        self._at = match.start()
        self.flush()
        if not opens:
            self._at = match.end()
            self.leave(match.start())
            return
        self.leave(match.start())
        self._region, self._begun = region, False
        self._captures = {name: text for name, text in match.groupdict().items() if text is not None}
        self._at = match.end()
        self._body = self._at - self._from
        if region.name != CALLS:
            self._prose = ContentDelta if region.name == CONTENT else Reasoning
            self.drop()
        else:
            self._begun = True

    def flush(self) -> None:
        """Emit the pending text of reasoning or content, without white space before it."""
        region = self._region
        if region is None:
            self.drop()
        elif region.name != CALLS:
            if not self._begun:
                pending = self.pending
                self._from += len(pending) - len(pending.lstrip()) if region.args.get("strip", True) else 0
                self._begun = bool(self.pending)
                if self._begun and self._prose in self._written:
                    self._emit(self._prose("\n" if region.join is None else region.join))
            if self._begun:
                self._written.add(self._prose)
                self.emit_content()

    def leave(self, body_end: int) -> None:
        """Leave a region: emit its calls, or drop the white space and the mark at its end."""
        region = self._region
        if region is not None and region.name == CALLS:
            if not self.emit_calls(region, self._text[self._from + self._body : body_end]):
                self._prose = ContentDelta
                self.emit_content()
        elif region is not None:
            mark_end, self._at = self._at, body_end
            self.flush()
            self._at = mark_end
            if self._blank and not region.args.get("strip", True):
                self._emit(self._prose("".join(self._blank)))
        self._blank = []
        self.drop()
        self._region, self._begun = self.template.implicit, False
        self._prose = ContentDelta

    def emit_calls(self, region: ReplyRegion, body: str) -> bool:
        """Emit the calls in the body of a region; return False, and emit nothing, if it has none."""
        try:
            calls = region.calls(body, self._captures, self._types)
        except ValueError:
            return False
        if not calls or not all(NAME.fullmatch(name) for name, _ in calls):
            return False
        for name, arguments in calls:
            self.start_call(name)
            self.emit_arguments(arguments)
        return True


# ---------------------------------------------------------------- the format of calls


@dataclass(frozen=True)
class TemplateFormat:
    """The format of the calls that a region describes, as far as a grammar can say it.

    Raises:
        ValueError: a mark is an expression that is more than texts, spaces and named groups.
    """

    region: ReplyRegion

    @property
    def trigger(self) -> str:
        """The text that every call begins with."""
        first = next((part for part in template_parts(self.region.open) if part != " "), "")
        if not first or first.startswith("?"):
            raise FieldValueError(
                "tools", ": the calls that the response_template describes begin with no text"
            )
        return first

    def tags(self, functions: Functions, parallel: bool) -> list[Format]:
        """Return the formats of one region, for each function.

        Raises:
            ValueError: the calls have no such format.
        """
        if self.region.each:
            objects = [tag("", form, "") for form in call_objects(functions, self._keys())]
            return [self._tag("", tag("[", tags(objects, ", ", parallel), "]"))]
        bodies = self._bodies(functions)
        return [self._tag(function["name"], body) for function, body in zip(functions, bodies, strict=True)]

    def _tag(self, name: str, body: Format) -> Format:
        opens = template_parts(self.region.open)
        opens = opens[1:] if opens[0] == " " else opens
        closes = template_parts(self.region.close) if self.region.close is not None else []
        end = closes.pop() if closes and closes[-1] != " " else ""
        content = [*(part_format(part, name) for part in opens[1:]), body]
        return tag(self.trigger, sequence(*content, *(part_format(part, name) for part in closes)), end)

    def _bodies(self, functions: Functions) -> list[Format]:
        region, args = self.region, self.region.args
        if region.content == "xml-inline" and args.get("value_parser") is None:
            marks = parameter_marks(args.get("tag_pattern") or "")
            return [marks.parameters(function) for function in functions]
        if region.content != "json":
            raise FieldValueError("tools", f": calls written as {region.content} have no grammar")
        described = region.transform.get("function") if isinstance(region.transform, dict) else None
        is_named = isinstance(described, dict) and "content" not in str(described.get("name"))
        if not is_named:
            return call_objects(functions, self._keys())
        if not isinstance(described, dict) or described.get("arguments") != "{content}":
            raise FieldValueError(
                "tools", ": the response_template composes calls in a way that has no grammar"
            )
        delims = args.get("string_delims") or []
        if not delims:
            return list(map(arguments_format, functions))
        if len(delims) != 1 or delims[0][0] != delims[0][1] or not args.get("unquoted_keys"):
            raise FieldValueError("tools", ": strings between such marks have no grammar")
        escaped = EscapeMarks("", "", delims[0][0])
        return [tag("{", escaped.arguments(function), "}") for function in functions]

    def _keys(self) -> CallKeys:
        """Return the keys of a call that is an object with its name and its arguments.

        Raises:
            ValueError: the calls have no such format.
        """
        transform = self.region.transform
        described: Any = transform.get("function", transform) if isinstance(transform, dict) else "{content}"
        if self.region.args.get("string_delims"):
            raise FieldValueError("tools", ": strings between such marks have no grammar")
        if described == "{content}":
            return CallKeys()
        prefix = "{" if self.region.each else "{content."
        named, arguments = str(described.get("name")), str(described.get("arguments"))
        if named != f"{prefix}name}}" or not arguments.startswith(prefix):
            raise FieldValueError(
                "tools", ": the response_template composes calls in a way that has no grammar"
            )
        return CallKeys(arguments.removeprefix(prefix).removesuffix("}"))


def parameter_marks(pattern: str) -> ParameterMarks:
    """Return the marks of parameters from the expression of a tag.

    Raises:
        ValueError: it is more than texts around a group `key` and a group `value`.
    """
    parts = [part for part in template_parts(Mark(pattern)) if part != " "]
    if len(parts) != 5 or parts[1] != "?key" or parts[3] != "?value":
        raise FieldValueError("tools", ": parameters in such tags have no grammar")
    return ParameterMarks("", "", parts[0], parts[2], parts[4], "")


def template_parts(mark: Mark | None) -> list[str]:
    """Return a mark's parts: a text, " " for any white space, "?name" for a group.

    Raises:
        ValueError: the mark is an expression with other parts.
    """
    if mark is None:
        return []
    if mark.literals:
        return [mark.literals[-1]]
    parts: list[str] = []
    at, in_text = 0, False
    while at < len(mark.source):
        if (match := SIMPLE.match(mark.source, at)) is None:
            raise FieldValueError(
                "tools", ": the checkpoint's response_template has marks that no grammar can follow"
            )
        at, text = match.end(), match[3] or match[4]
        if text and in_text:
            parts[-1] += text
        else:
            parts.append(f"?{match[1]}" if match[1] else text or " ")
        in_text = bool(text)
    return parts


def part_format(part: str, name: str) -> Format:
    """Return the format of a part of a mark. name: what stands for the group `name`.

    Raises:
        ValueError: it is another group.
    """
    if part == " ":
        return SPACES
    if part.startswith("?") and part != "?name":
        raise FieldValueError(
            "tools", ": the marks of the response_template have groups that no grammar can follow"
        )
    return const(name if part == "?name" else part)
