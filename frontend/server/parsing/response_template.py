"""The description of replies in a checkpoint: `response_template` of transformers, read without transformers.

A reply has regions: reasoning, content and calls, each between marks that are texts or regular expressions. What a
region's text means is said by its content ("json", "xml-inline", ...), its form by a transform.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from pagewire.frontend.server.parsing.argument_types import JSON_TYPES, ParameterTypes, argument_json

NAME = "hf"  # as vLLM calls it
CALLS, CONTENT = "tool_calls", "content"
REASONING_NAMES = ("thinking", "reasoning_content", "reasoning")
TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}
CONTENTS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
TYPED_BY_SCHEMA = ("xml-inline", "kv-lines")  # their values are texts, whose types the function's schema says
PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
BARE_KEY = re.compile(r'("(?:[^"\\]|\\.)*")|(?<=[{,])(\s*)(\w+)(\s*:)', re.DOTALL)
SEARCH_SECONDS = 1.0  # for one search with an expression of the checkpoint


@dataclass(frozen=True)
class Mark:
    """A mark that opens or closes a region: literal texts, the longest first, or else a regular expression.

    extends: a literal begins with another, so that more text may make a longer one of it.
    """

    source: str
    literals: tuple[str, ...] = ()
    extends: bool = False

    def search(self, text: str, at: int, ended: bool) -> Any:
        """Return the next match; unless the text has `ended`, also one that more text may complete.

        Raises:
            ValueError: the expression takes too long on this text.
        """
        try:
            pattern = regex.compile(self.source, regex.DOTALL)  # cached by the library
            return pattern.search(text, at, partial=not ended, timeout=SEARCH_SECONDS)
        except TimeoutError:
            raise ValueError("an expression of the checkpoint's response_template takes too long") from None

    def is_certain(self, match: Any, text: str) -> bool:
        """Return True if no more text can change a match."""
        if match.partial:
            return False
        return match.end() < len(text) or (bool(self.literals) and not self.extends)


@dataclass(frozen=True)
class ReplyRegion:
    """A region of replies. open: None: text that is in no other region. close: None: the end of the reply."""

    name: str
    open: Mark | None
    close: Mark | None
    content: str
    args: Mapping[str, Any]
    join: str | None
    transform: Any
    each: bool

    def calls(self, body: str, captures: Mapping[str, str], types: Mapping[str, ParameterTypes]) -> list[Any]:
        """Return the names and the JSON arguments of the calls in a body. types: of each function's parameters.

        Raises:
            ValueError: the body is not what the region describes.
        """
        value = parse_region(body, self.content, self.args)
        scopes = [{**captures, "content": value}]
        if self.each:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ValueError("a list of objects is expected")
            scopes = [{**captures, **item} for item in value]
        values = [
            scope["content"] if self.transform is None else fill_transform(self.transform, scope)
            for scope in scopes
        ]
        flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
        return [self._call(item, types) for item in flat]

    def _call(self, value: Any, types: Mapping[str, ParameterTypes]) -> tuple[str, str]:
        function = value.get("function", value) if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise ValueError("a call needs a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return name.strip(), arguments
        if not isinstance(arguments, dict):
            raise ValueError("arguments are an object")
        if self.content not in TYPED_BY_SCHEMA:
            return name.strip(), json.dumps(arguments, ensure_ascii=False)
        known = types.get(name.strip()) or ParameterTypes({})
        members = (
            f"{json.dumps(key, ensure_ascii=False)}: {write_typed(item, known.of(key))}"
            for key, item in arguments.items()
        )
        return name.strip(), "{" + ", ".join(members) + "}"


@dataclass(frozen=True)
class ResponseTemplate:
    """The regions of a checkpoint's replies. anchor: the reply begins after its last match in the prompt."""

    regions: tuple[ReplyRegion, ...]
    anchor: Mark

    @property
    def implicit(self) -> ReplyRegion | None:
        """The region of text that is in no other."""
        return next((region for region in self.regions if region.open is None), None)

    def named(self, *names: str) -> ReplyRegion | None:
        """Return the region with one of these names; None if there is none."""
        return next((region for region in self.regions if region.name in names), None)

    def reply_in(self, prompt: str) -> str:
        """Return the text of a prompt that belongs to the reply already."""
        ends = [match.end() for match in regex.finditer(self.anchor.source, prompt, regex.DOTALL)]
        return prompt[ends[-1] :] if ends else ""


def load_response_template(given: Any) -> ResponseTemplate:
    """Read a description.

    Raises:
        ValueError: it is malformed, or has what no reply of a server can have.
    """
    check_description(
        isinstance(given, dict) and not set(given) - TEMPLATE_KEYS, "it must be an object with known keys"
    )
    check_description(given.get("version", 1) == 1, "its version is unknown")
    fields = given.get("fields")
    check_description(isinstance(fields, dict) and bool(fields), "it needs fields")
    regions = [load_region(name, field) for name, field in fields.items()]
    unknown = [each.name for each in regions if each.name not in (CALLS, CONTENT, *REASONING_NAMES)]
    check_description(not unknown, f"a field {unknown[:1]} is unknown")
    check_description(
        sum(each.open is None for each in regions) <= 1, "two fields have no mark that opens them"
    )
    if CONTENT not in fields and all(each.open is not None for each in regions):
        regions.append(load_region(CONTENT, {}))
    anchor = load_mark(given, "start_anchor", "start_anchor_pattern")
    check_description(anchor is not None, "it needs a start_anchor")
    assert anchor is not None
    return ResponseTemplate(tuple(regions), anchor)


def load_region(name: str, field: Any) -> ReplyRegion:
    """Read the description of a region.

    Raises:
        ValueError: it is malformed, or cannot be served.
    """
    check_description(
        isinstance(field, dict) and not set(field) - FIELD_KEYS, f"{name} must be an object with known keys"
    )
    content, args, join = field.get("content", "text"), field.get("content_args", {}), field.get("join")
    check_description(content in CONTENTS and isinstance(args, dict), f"the content of {name} is unknown")
    check_description(isinstance(join, (str, type(None))), f"join of {name} must be a text")
    transform = field.get("transform")
    check_description(name == CALLS or (content == "text" and transform is None), f"{name} must be text")
    return ReplyRegion(
        name,
        load_mark(field, "open", "open_pattern"),
        load_mark(field, "close", "close_pattern"),
        content,
        args,
        join,
        transform,
        bool(field.get("transform_each")),
    )


def load_mark(field: dict[str, Any], literal: str, pattern: str) -> Mark | None:
    """Read a mark under one of two keys; None if there is none.

    Raises:
        ValueError: it is malformed.
    """
    if pattern in field:
        check_description(
            literal not in field and isinstance(field[pattern], str), f"{pattern} must be a text, and alone"
        )
        try:
            regex.compile(field[pattern], regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"response_template: {pattern} is no regular expression: {error}") from None
        return Mark(field[pattern])
    if literal not in field:
        return None
    given = [field[literal]] if isinstance(field[literal], str) else field[literal]
    check_description(isinstance(given, list) and bool(given), f"{literal} must be a text or a list of texts")
    check_description(
        all(isinstance(text, str) and text for text in given), f"{literal} must be a text or a list of texts"
    )
    texts = tuple(sorted(dict.fromkeys(given), key=len, reverse=True))
    extends = any(a != b and a.startswith(b) for a in texts for b in texts)
    return Mark("|".join(map(re.escape, texts)), texts, extends)


def check_description(condition: bool, message: str) -> None:
    """Raise ValueError with a message about the description unless a condition holds."""
    if not condition:
        raise ValueError(f"response_template: {message}")


# ---------------------------------------------------------------- values


def parse_region(text: str, content: str, args: Mapping[str, Any]) -> Any:
    """Return the value of a region's text.

    Raises:
        ValueError: the text is not of this content.
    """
    stripped = text.strip() if args.get("strip", True) else text
    match content:
        case "int":
            return int(stripped)
        case "float":
            return float(stripped)
        case "bool":
            return stripped.lower() in ("true", "1")
        case "json":
            return json_of(text, args)
        case "xml-inline":
            return tagged_values(text, args)
        case "kv-lines":
            return line_values(text, args)
    return stripped


def json_of(text: str, args: Mapping[str, Any]) -> Any:
    """Return the value of JSON that may have names without quotes, and strings between other marks.

    Raises:
        ValueError: the text is not such JSON, and nothing else is allowed.
    """
    pairs = [(re.escape(opens), re.escape(closes)) for opens, closes in args.get("string_delims", [])]
    strings = re.compile("|".join(f"{opens}(.*?){closes}" for opens, closes in pairs) or r"(?!)", re.DOTALL)
    written, at = "", 0
    for match in strings.finditer(text):
        inner = next((group for group in match.groups() if group is not None), "")
        written += bare_names(text[at : match.start()], args) + json.dumps(inner)
        at = match.end()
    written += bare_names(text[at:], args)
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        if args.get("allow_non_json"):
            return text.strip()
        raise ValueError("JSON is expected") from None


def bare_names(text: str, args: Mapping[str, Any]) -> str:
    """Return JSON with quotes around the names of its members, if they may have none."""
    if not args.get("unquoted_keys"):
        return text
    return BARE_KEY.sub(lambda m: m[1] if m[1] is not None else f'{m[2]}"{m[3]}"{m[4]}', text)


def tagged_values(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values between tags, by their keys.

    Raises:
        ValueError: there is no expression for them, or a value is not as described.
    """
    values: dict[str, Any] = {}
    try:
        for match in regex.finditer(
            args.get("tag_pattern") or "", text, regex.DOTALL, timeout=SEARCH_SECONDS
        ):
            groups = match.groupdict()
            if (key := groups.get("key")) is None:
                raise ValueError("tag_pattern needs a group `key`")
            value = inner_value(groups.get("value") or "", args)
            if key in values and args.get("merge_duplicates"):
                before = values[key]
                values[key] = [*(before if isinstance(before, list) else [before]), value]
            else:
                values[key] = value
    except TimeoutError:
        raise ValueError("tag_pattern takes too long") from None
    return values


def line_values(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that stand in lines after their keys."""
    values = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, found, value = line.partition(args.get("kv_sep", ":"))
        if found:
            values[key.strip()] = inner_value(value.strip(), args)
    return values


def inner_value(text: str, args: Mapping[str, Any]) -> Any:
    """Return a value within a region, which may have a content of its own."""
    inner = args.get("value_parser")
    return text if inner is None else parse_region(text, inner.get("name", "text"), inner.get("args", {}))


def fill_transform(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return a transform in which `{a.b}` stands for a member of a value in the scope.

    Raises:
        ValueError: there is no such member.
    """
    if isinstance(transform, dict):
        return {key: fill_transform(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [fill_transform(value, scope) for value in transform]
    whole = PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if whole is None:
        return transform
    value: Any = scope
    for key in whole[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"there is no {key}")
        value = value[key]
    return value


def write_typed(value: Any, types: frozenset[str]) -> str:
    """Return the JSON of a value that is text, or several texts."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "[" + ", ".join(argument_json(item, JSON_TYPES) for item in value) + "]"
    return argument_json(value, types) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
