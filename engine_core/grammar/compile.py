"""Structured output: which tokens may come next, by llguidance (https://github.com/guidance-ai/llguidance).

    StructuredOutputsParams --Grammars.submit--> Compilation ...poll--> Grammar --matcher--> Matcher

Grammars are compiled in threads of low priority, for schemas come from strangers: nothing here is fetched,
sizes and steps are limited, and who waits for a compilation waits for a limited time. A matcher is the state
of one sequence: it takes tokens and gives masks, in microseconds, and can be rebuilt from the tokens alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("pagewire.core")

CACHED = 128
MAX_PENDING = 1024
NUM_THREADS = 2
NICENESS = 10
MAX_LEXER_STATES = 25_000  # of 1 to 2 kB each
MAX_MULTIPLE = 100_000  # an automaton with so many states takes a third of a second
WHITESPACE = r" |\n[ \t]{0,20}"  # between two tokens of JSON, where any is allowed

SCHEMAS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS_OF_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


# Formats that llguidance does not know, and one that it does whose every string has them.
NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
}
# Those that JSON Schema defines; others are mere annotations.
FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "regex"),
    *("relative-json-pointer", "time", "uri", "uri-template", "uuid"),
}
IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf")


class Tag(msgspec.Struct):
    """A part of tagged text: JSON by `schema` between two strings."""

    begin: str
    end: str
    schema: dict[str, Any] = {}


class StructuralTag(msgspec.Struct):
    """Free text with tags, each begun by one of the triggers."""

    structures: list[Tag]
    triggers: list[str]


class GrammarError(ValueError):
    """A grammar that cannot be served, and why."""


class Matcher:
    """The state of one sequence under a grammar.

    eos_token_ids: tokens that end it, allowed where the grammar is complete (unless `ignore_eos`).
    """

    def __init__(self, state: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int], ignore_eos: bool):
        self._state = state
        self._mask_bytes = -(-vocab_size // 32) * 4
        self.eos_token_ids = tuple(eos_token_ids)
        self._ignore_eos = ignore_eos

    @property
    def complete(self) -> bool:
        """True once nothing more can come."""
        return self._state.is_stopped()

    def accept(self, token_id: int) -> None:
        """Go on with a token.

        Raises:
            GrammarError: it does not fit, or the grammar has become too complex.
        """
        if not self._state.consume_token(token_id):
            raise GrammarError(f"token {token_id} does not fit the grammar: {reason(self._state)}")

    def mask(self) -> bytes:
        """The tokens that may come next: bit i % 8 of byte i // 8 for token i, in whole 32-bit words.

        Raises:
            GrammarError: the grammar has become too complex, or leads nowhere.
        """
        found = self._state.compute_bitmask()
        if self._state.is_error():
            raise GrammarError(f"the grammar cannot go on: {reason(self._state)}")
        mask = bytearray(found[: self._mask_bytes].ljust(self._mask_bytes, b"\0"))
        if self._ignore_eos:
            for token_id in self.eos_token_ids:
                mask[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(mask)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar over a vocabulary."""

    start: LLMatcher
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def matcher(self, token_ids: Sequence[int] = (), ignore_eos: bool = False) -> Matcher:
        """The state of a sequence that has generated `token_ids`.

        Raises:
            GrammarError: they do not fit.
        """
        matcher = Matcher(self.start.deep_copy(), self.vocab_size, self.eos_token_ids, ignore_eos)
        for token_id in token_ids:
            matcher.accept(token_id)
        return matcher


class Compilation:
    """A grammar that is being compiled, or was."""

    def __init__(self, structure: StructuredOutputsParams, begun: float, seconds: float) -> None:
        self.structure = structure
        self.outcome: Grammar | Exception | None = None  # set once, by the thread that compiles
        self._deadline, self._seconds = begun + seconds, seconds

    def expired(self, now: float) -> bool:
        """True if it took too long, or waited too long for its turn."""
        return self.outcome is None and now > self._deadline

    def poll(self, now: float) -> Grammar | None:
        """The grammar; None while it is being compiled.

        Raises:
            GrammarError: what is wrong with it.
        """
        if isinstance(self.outcome, Exception):
            raise GrammarError(*self.outcome.args)
        if self.expired(now):
            raise GrammarError(
                f"{self.structure.kind}: not compiled within {self._seconds:g} s: it is too complex"
            )
        return self.outcome


class Grammars:
    """Compiles grammars in threads, and keeps the last used ones.

    load: makes the tokenizer, when the first grammar comes. vocab_size: of the model.
    seconds: time limit of a compilation. wake: called in a thread whenever one is done.

    num_queries, num_hits: grammars asked for, and those of them that were known.
    """

    def __init__(
        self,
        load: Callable[[], LLTokenizer],
        vocab_size: int,
        *,
        seconds: float,
        wake: Callable[[], None],
        capacity: int = CACHED,
    ) -> None:
        self._load, self._vocab_size = load, vocab_size
        self._seconds, self._wake, self._capacity = seconds, wake, capacity
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._pending: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
        self._tokenizer: LLTokenizer | GrammarError | None = None
        self._loading = threading.Lock()
        self.num_queries = self.num_hits = 0
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._known)

    def submit(self, structure: StructuredOutputsParams, now: float) -> Compilation:
        """Compile a grammar, unless it is known.

        Raises:
            EngineBusyError: too many wait already.
        """
        key = msgspec.msgpack.encode(structure)
        known = self._known.get(key)
        self.num_queries += 1
        if known is not None:
            self.num_hits += 1
            self._known.move_to_end(key)
            return known
        if self._pending.qsize() >= MAX_PENDING:
            raise EngineBusyError(f"{MAX_PENDING} grammars wait to be compiled")
        compilation = self._known[key] = Compilation(structure, now, self._seconds)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
        self._pending.put(compilation)
        if len(self._threads) < NUM_THREADS:
            thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._threads.append(thread)
            thread.start()
        return compilation

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            compilation = self._pending.get()
            if not compilation.expired(time.monotonic()):
                compilation.outcome = self._compile(compilation.structure)
                self._wake()

    def _compile(self, structure: StructuredOutputsParams) -> Grammar | Exception:
        try:
            tokenizer = self._load_tokenizer()
            return compile_grammar(structure, tokenizer, self._vocab_size)
        except Exception as error:  # whatever strangers come up with must not end the thread
            return error if isinstance(error, GrammarError) else GrammarError(f"{structure.kind}: {error}")

    def _load_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._load()
                except GrammarError as error:
                    self._tokenizer = error
        if isinstance(self._tokenizer, GrammarError):
            raise self._tokenizer
        return self._tokenizer


def load_tokenizer(folder: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokenizer of a folder, as grammars need it. Holds the interpreter for 4 us per token.

    Raises:
        GrammarError: there is none that llguidance can read.
    """
    from llguidance import LLTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise GrammarError(f"structured outputs need a tokenizer.json; there is none in {folder}")
    begin = time.monotonic()
    try:
        tokenizer = LLTokenizer(path.read_text(encoding="utf-8"), eos_token=list(eos_token_ids) or None)
    except (ValueError, OSError) as error:
        raise GrammarError(f"structured outputs cannot use {path}: {error}") from error
    logger.info("tokenizer for grammars took %.2f s", time.monotonic() - begin)
    return tokenizer


def compile_grammar(structure: StructuredOutputsParams, tokenizer: LLTokenizer, vocab_size: int) -> Grammar:
    """Compile, and see that something can be generated.

    Raises:
        GrammarError: what is wrong or not supported.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    state = LLMatcher(tokenizer, grammar_text(structure, tokenizer), log_level=0, limits=limits)
    if state.is_error():
        raise GrammarError(f"{structure.kind}: {reason(state)}")
    grammar = Grammar(state, vocab_size, tuple(i for i in tokenizer.eos_tokens if i < vocab_size))
    try:
        if any(grammar.matcher().mask()):
            return grammar
    except GrammarError as error:
        if "NoExtension" not in str(error):
            raise GrammarError(f"{structure.kind}: {error}") from None
    raise GrammarError(f"{structure.kind}: no output can satisfy it")


SAID_BETTER = (
    (r"Unimplemented keys: \[(.*)\]", r"not supported: \1"),
    (r"Unknown format: (.*)", r"format: \1 is not supported"),
    (
        r"Resource '(.*)' is not present in a registry.*",
        r"$ref: \1 is not in the schema, and nothing is fetched",
    ),
    (r"oneOf constraints .*", "oneOf is not supported where schemas of it may overlap: anyOf is"),
    (r"\s*<non-verbose/>.*", ""),
)


def reason(state: LLMatcher) -> str:
    """Why a matcher failed, without what it says of its own state."""
    text = state.get_error()
    for pattern, better in SAID_BETTER:
        text = re.sub(pattern, better, text, flags=re.DOTALL)
    return text.strip()


# ---------------------------------------------------------------- from parameters to llguidance's notation


def grammar_text(structure: StructuredOutputsParams, tokenizer: LLTokenizer) -> str:
    """What llguidance is to compile.

    Raises:
        GrammarError: what is wrong or not supported. ValueError: the same, in llguidance's words.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.grammar is not None:
        is_lark = "::=" not in structure.grammar
        return LLMatcher.grammar_from_lark(structure.grammar if is_lark else gbnf_to_lark(structure.grammar))
    if structure.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(literal, structure.choice)))
    if structure.structural_tag is not None:
        return LLMatcher.grammar_from_lark(tagged_text(structure, tokenizer))
    schema = {"type": "object"} if structure.json is None else as_object(structure.json)
    return LLMatcher.grammar_from_json_schema(json_schema(schema, structure))


def literal(text: str) -> str:
    """A string of the Lark notation."""
    return json.dumps(text, ensure_ascii=False)


def as_object(text: str | dict[str, Any]) -> dict[str, Any]:
    """The JSON object that parameters hold as text."""
    found: dict[str, Any] = json.loads(text) if isinstance(text, str) else text
    return found


def json_schema(schema: dict[str, Any], structure: StructuredOutputsParams) -> dict[str, Any]:
    """A schema as it is to be compiled: with our options (a schema could bring its own), checked.

    Raises:
        GrammarError: what is not supported.
    """
    for part in subschemas(schema):
        check_multiple(part.get("multipleOf"))
        rewrite_bounds(part)
        rewrite_format(part)
        rewrite_names(part)
        rewrite_unevaluated(part)
        check_least_properties(part)
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if structure.disable_additional_properties and "properties" in part:
            part.setdefault("additionalProperties", False)
    flexible = not structure.disable_any_whitespace
    return schema | {
        "x-guidance": {
            "whitespace_flexible": flexible,
            "whitespace_pattern": structure.whitespace_pattern or WHITESPACE if flexible else None,
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "lenient": False,
        }
    }


def check_multiple(multiple: Any) -> None:
    """Refuse a `multipleOf` whose automaton would be too large.

    Raises:
        GrammarError: it is.
    """
    if isinstance(multiple, int) and multiple > MAX_MULTIPLE:
        raise GrammarError(f"json: multipleOf: {multiple} is not supported: at most {MAX_MULTIPLE} is")


def check_least_properties(part: dict[str, Any]) -> None:
    """Refuse a `minProperties` that equal names could seem to reach: they count once.

    Raises:
        GrammarError: it is one.
    """
    least, required = part.get("minProperties"), part.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    named_only = part.get("additionalProperties") is False and "patternProperties" not in part
    if isinstance(least, int) and least > num_required + 1 and not named_only:
        raise GrammarError(f"json: minProperties: {least} is not supported where names are free")


def rewrite_bounds(part: dict[str, Any]) -> None:
    """An exclusive whole bound as one a little further in, where the other bound is less than one away.

    llguidance would include the bound itself there. Nothing is lost but numbers next to it.
    """
    for exclusive, plain, other, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        bound = part.get(exclusive)
        far = next((part[name] for name in other if name in part), None)
        if not isinstance(bound, (int, float)) or not isinstance(far, (int, float)):
            continue
        gap = (far - bound) * sign
        if 0 < gap < 1 and bound == int(bound):
            del part[exclusive]
            inner = bound + sign * 10.0 ** (math.floor(math.log10(gap)) - 6)
            part[plain] = max(inner * sign, part.get(plain, inner) * sign) * sign


def rewrite_format(part: dict[str, Any]) -> None:
    """Formats that llguidance knows, instead of those that it does not; those that mean nothing are left out.

    Dates begin with year 1: llguidance has a year 0, many languages have not.
    """
    name = part.get("format")
    if name in ("date", "date-time"):
        part.setdefault("pattern", "^([1-9]|0[1-9]|00[1-9]|000[1-9])")
    if name in NARROWER:
        part["format"] = NARROWER[name]
    elif isinstance(name, str) and name not in FORMATS:
        del part["format"]


def rewrite_names(part: dict[str, Any]) -> None:
    """`propertyNames` that are a pattern or a list as `patternProperties` or `properties`."""
    names = part.get("propertyNames")
    if not isinstance(names, dict) or "properties" in part or "patternProperties" in part:
        return
    rest = part.get("additionalProperties", True)
    says = {name: value for name, value in names.items() if (name, value) != ("type", "string")}
    if list(says) == ["pattern"]:
        part["patternProperties"] = {says["pattern"]: rest}
    elif list(says) == ["enum"] and isinstance(says["enum"], list):
        part["properties"] = {name: rest for name in says["enum"] if isinstance(name, str)}
    else:
        return
    part["additionalProperties"] = False
    del part["propertyNames"]


def rewrite_unevaluated(part: dict[str, Any]) -> None:
    """`unevaluated...` as the plain keyword, where nothing else in the schema evaluates."""
    for what, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if what in part and not any(name in part for name in IN_PLACE):
            part.setdefault(plain, part.pop(what))


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it, less those that are just true or false."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner = [schema.get(name) for name in SCHEMAS]
    for name in LISTS_OF_SCHEMAS:
        if isinstance(found := schema.get(name), list):
            inner += found
    for name in MAPS_OF_SCHEMAS:
        if isinstance(found := schema.get(name), dict):
            inner += found.values()
    for part in inner:
        yield from subschemas(part)


def tagged_text(structure: StructuredOutputsParams, tokenizer: LLTokenizer) -> str:
    """Lark for free text in which every trigger begins one of the tags that start with it.

    Raises:
        GrammarError: the tags are not as they should be.
    """
    try:
        wanted = msgspec.convert(as_object(structure.structural_tag or "{}"), StructuralTag)
    except msgspec.ValidationError as error:
        raise GrammarError(f"structural_tag: {error}") from None
    if not wanted.structures:
        raise GrammarError("structural_tag: structures must not be empty")
    names = [f"tag_{i}" for i in range(len(wanted.structures))]
    lines = ["%llguidance {}", f"start: ({' | '.join(names)})* end", "end: TEXT", r"TEXT: /(.|\n)*/"]
    for name, tag in zip(names, wanted.structures, strict=True):
        trigger = max((t for t in wanted.triggers if tag.begin.startswith(t)), key=len, default="")
        if not trigger:
            raise GrammarError(f"structural_tag: no trigger begins {tag.begin!r}")
        special = tokenizer.tokenize_str(trigger, parse_special=True)
        if len(special) == 1 and tokenizer.is_special_token(special[0]):
            head = f"TEXT <[{special[0]}]>"
        else:
            lines.append(f"{name}_head[lazy]: TEXT {literal(trigger)}")
            head = f"{name}_head"
        rest, end = (literal(text) if text else "" for text in (tag.begin[len(trigger) :], tag.end))
        body = json.dumps(json_schema(tag.schema, structure), ensure_ascii=False)
        lines.append(f"{name}: {head} {rest} %json {body} {end}")
    return "\n".join(lines)
