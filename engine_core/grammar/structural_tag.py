"""Structural tags: outputs composed of texts, schemas and grammars, as one grammar of llguidance.

A tag has one of two forms: `{"structures": [...], "triggers": [...]}`, which is free text with tags in it, or
`{"format": {"type": ..., ...}}`, where formats contain others. The names are those of XGrammar's structural tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pagewire.engine_core.grammar.chains import check_references, check_rules
from pagewire.engine_core.grammar.json_text import json_text_grammar
from pagewire.engine_core.grammar.schema import json_schema
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.wire.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TagPart(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the parts of a structural tag."""


class ConstString(TagPart, tag="const_string"):
    """This text."""

    value: str


class JsonFormat(TagPart, tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: dict[str, Any] | bool


class Regex(TagPart, tag="regex"):
    """Text that matches a regular expression."""

    pattern: str


class GrammarText(TagPart, tag="grammar"):
    """Text that follows a grammar, in Lark's notation or GBNF. json_string: as it stands between quotes in JSON."""

    grammar: str
    json_string: bool = False


class AnyText(TagPart, tag="any_text"):
    """Any text: up to the end of the tag around it, or the rest of the output."""


class SequenceFormat(TagPart, tag="sequence"):
    """Formats one after the other."""

    elements: list[Format]


class Or(TagPart, tag="or"):
    """One of several formats."""

    elements: list[Format]


class Tag(TagPart, tag="tag"):
    """A format between two texts. end: a list: one of these."""

    begin: str
    content: Format
    end: str | list[str]

    @property
    def ends(self) -> list[str]:
        """The possible ends."""
        return [self.end] if isinstance(self.end, str) else self.end


class TriggeredTags(TagPart, tag="triggered_tags"):
    """Free text in which every trigger begins one of the tags.

    at_least_one: some tag must occur, before any other text. stop_after_first: the output ends with the first tag.
    """

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(TagPart, tag="tags_with_separator"):
    """Tags with a text between each two. at_least_one: there must be one. stop_after_first: and no more."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format: TypeAlias = (
    ConstString
    | JsonFormat
    | Regex
    | GrammarText
    | AnyText
    | SequenceFormat
    | Or
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class StructureTag(TagPart):
    """A tag of the older form: JSON that follows `schema`, between the strings `begin` and `end`."""

    begin: str
    end: str
    schema: dict[str, Any] = {}


class StructuralTag(TagPart):
    """A structural tag in either form."""

    type: str = "structural_tag"
    format: Format | None = None
    structures: list[StructureTag] | None = None
    triggers: list[str] | None = None


def structural_tag_grammar(
    structure: StructuredOutputsParams, tokenizer: LLTokenizer, lark_text: Callable[[str], str]
) -> str:
    """Return the grammar of a structural tag, as llguidance's list of grammars.

    lark_text: converts the text of a user's grammar to Lark's notation.

    Raises:
        GrammarError: the structural tag is malformed.
    """
    try:
        tag = msgspec.json.decode(str(structure.structural_tag), type=StructuralTag)
    except msgspec.ValidationError as error:
        raise GrammarError(f"structural_tag: {error}") from None
    return FormatWriter(structure, tokenizer, lark_text).grammar(format_of(tag))


def format_of(tag: StructuralTag) -> Format:
    """Return the format of a structural tag of either form.

    Raises:
        GrammarError: it has none.
    """
    if tag.format is not None:
        return tag.format
    if not tag.structures or tag.triggers is None:
        raise GrammarError(
            "structural_tag: it needs a format, or triggers and structures, which must not be empty"
        )
    tags = [Tag(each.begin, JsonFormat(each.schema), each.end) for each in tag.structures]
    return TriggeredTags(tag.triggers, tags)


class FormatWriter:
    """Writes a format as rules of a Lark grammar, and the grammars that it embeds beside it."""

    def __init__(
        self, structure: StructuredOutputsParams, tokenizer: LLTokenizer, lark_text: Callable[[str], str]
    ) -> None:
        self._structure, self._tokenizer, self._lark_text = structure, tokenizer, lark_text
        self._rules = ["%llguidance {}", r"TEXT: /(.|\n)*/"]
        self._embedded: list[dict[str, Any]] = []

    def grammar(self, form: Format) -> str:
        """Return the whole grammar."""
        self._rules.append(f"start: {self.expression(form)}")
        top = {"name": "structural_tag", "lark_grammar": "\n".join(self._rules)}
        return json.dumps({"grammars": [top, *self._embedded]})

    def expression(self, form: Format) -> str:
        """Return the expression of a format, and add the rules that it needs.

        Raises:
            GrammarError: the format is malformed.
        """
        match form:
            case ConstString():
                return self.text(form.value)
            case JsonFormat():
                return self.schema(form.json_schema)
            case Regex():
                return self.embed(lark_grammar="start: " + regex_literal(form.pattern))
            case GrammarText():
                return self.user_grammar(form)
            case AnyText():
                return "TEXT"
            case SequenceFormat():
                return self.sequence(form.elements)
            case Or():
                return self.rule(self.alternatives(form.elements))
            case Tag():
                return self.tag(form)
            case TriggeredTags():
                return self.triggered_tags(form)
            case TagsWithSeparator():
                return self.tags_with_separator(form)

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Return the expression of a text, in which the names of special tokens stand for these tokens."""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        expression = []
        for token_id in filter(self._tokenizer.is_special_token, tokens):
            before, name, after = text.partition(self._tokenizer.decode_str([token_id]))
            if name:
                expression += [literal(before), f"<[{token_id}]>"]
                text = after
        return " ".join(filter(None, (*expression, literal(text)))) or self.rule("")

    def schema(self, schema: dict[str, Any] | bool) -> str:
        """Return the expression of JSON that follows a schema."""
        if schema is False:
            raise GrammarError("structural_tag: no JSON follows the schema false")
        check_references(schema)
        prepared = json_schema({} if schema is True else schema, self._structure)
        return self.rule(f"%json {json.dumps(prepared, ensure_ascii=False)}")

    def embed(self, **grammar: Any) -> str:
        """Add a grammar with terminals of its own, and return the reference to it."""
        name = f"grammar_{len(self._embedded)}"
        self._embedded.append({"name": name, **grammar})
        return self.rule(f"@{name}")

    def user_grammar(self, form: GrammarText) -> str:
        """Return the expression of a user's grammar, which may be a list whose first grammar is the main one."""
        lark = self._lark_text(form.grammar)
        if form.json_string:
            lark = json_text_grammar(lark)
        if not lark.lstrip().startswith("{"):
            check_rules(lark)
            return self.embed(lark_grammar=lark)
        try:
            main, *others = json.loads(lark)["grammars"]
            expression = self.embed(**{key: value for key, value in main.items() if key != "name"})
        except (ValueError, LookupError, TypeError, AttributeError):
            raise GrammarError("grammar: as JSON, it must be an object with a list `grammars`") from None
        self._embedded += others
        return expression

    def alternatives(self, forms: list[Any]) -> str:
        """Return the expressions of alternatives, of which there must be one."""
        if not forms:
            raise GrammarError("structural_tag: a list of elements or tags must not be empty")
        return " | ".join(self.expression(form) for form in forms)

    def sequence(self, elements: list[Format]) -> str:
        """Return the expression of formats one after the other."""
        if any(isinstance(form, AnyText) for form in elements[:-1]):
            raise GrammarError(
                "structural_tag: any_text must be in a tag, whose end it ends at, or come last"
            )
        return " ".join(map(self.expression, elements)) or self.rule("")

    def tag(self, form: Tag) -> str:
        """Return the expression of a tag."""
        if isinstance(form.content, AnyText):
            inner = self.rule(" | ".join(self.text_until(end) for end in form.ends))
        else:
            ends = " | ".join(self.text(end) for end in form.ends)
            inner = f"{self.expression(form.content)} {self.rule(ends)}"
        return self.rule(f"{self.text(form.begin)} {inner}" if form.begin else inner)

    def text_until(self, end: str) -> str:
        """Return the expression of any text up to the first occurrence of `end`, which is included."""
        if not end:
            return "TEXT"
        special = self._tokenizer.tokenize_str(end, parse_special=True)
        if len(special) == 1 and self._tokenizer.is_special_token(special[0]):
            return f"TEXT <[{special[0]}]>"
        return self.rule(f"TEXT {literal(end)}", "[lazy]")

    def triggered_tags(self, form: TriggeredTags) -> str:
        """Return the expression of free text with tags."""
        tags = []
        for tag in form.tags:
            trigger = max((t for t in form.triggers if tag.begin.startswith(t)), key=len, default="")
            if not trigger:
                raise GrammarError(f"structural_tag: {tag.begin!r} does not start with any of the triggers")
            rest = msgspec.structs.replace(tag, begin=tag.begin[len(trigger) :])
            tags.append(f"{self.text_until(trigger)} {self.tag(rest)}")
        if not tags:
            raise GrammarError("structural_tag: a list of elements or tags must not be empty")
        some = self.rule(" | ".join(tags))
        first = self.rule(self.alternatives(form.tags)) if form.at_least_one else ""
        if form.stop_after_first:
            return first or self.rule(f"{some} | TEXT")
        return f"{first} ({some})* {self.rule('TEXT')}"

    def tags_with_separator(self, form: TagsWithSeparator) -> str:
        """Return the expression of tags with a text between them."""
        tag = self.rule(self.alternatives(form.tags))
        more = "" if form.stop_after_first else f"({self.text(form.separator)} {tag})*"
        return self.rule(f"{tag} {more}" if form.at_least_one else f"({tag} {more})?")


def literal(text: str) -> str:
    """Return a text as a string literal in Lark's notation; "" for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def regex_literal(pattern: str) -> str:
    """Return a regular expression as a literal in Lark's notation."""
    escaped, backslash = "", False
    for character in pattern:
        escaped += "\\/" if character == "/" and not backslash else character
        backslash = character == "\\" and not backslash
    return f"/{escaped}/"
