"""Compiles the structured output parameters of a request with llguidance.

https://github.com/guidance-ai/llguidance. Schemas are untrusted input: references are never fetched, and sizes
and steps are limited.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagewire.engine_core.grammar.matcher import Grammar, GrammarError, failure_reason
from pagewire.engine_core.grammar.schema import json_schema
from pagewire.ipc.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger("pagewire.core")

MAX_LEXER_STATES = 25_000  # 1 to 2 kB each: bounds the memory of one grammar


class Tag(msgspec.Struct):
    """A tag of a structural tag: JSON that follows `schema`, between the strings `begin` and `end`."""

    begin: str
    end: str
    schema: dict[str, Any] = {}


class StructuralTag(msgspec.Struct):
    """Free text in which every trigger starts one of the tags."""

    structures: list[Tag]
    triggers: list[str]


def load_tokenizer(folder: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's form of the tokenizer in a folder. Holds the GIL for about 4 us per token of the vocabulary.

    Raises:
        GrammarError: the folder has no tokenizer.json that llguidance can read.
    """
    from llguidance import LLTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise GrammarError(f"structured outputs need a tokenizer.json, but {folder} has none")
    begin = time.monotonic()
    try:
        tokenizer = LLTokenizer(path.read_text(encoding="utf-8"), eos_token=list(eos_token_ids) or None)
    except (ValueError, OSError) as error:
        raise GrammarError(f"structured outputs cannot use {path}: {error}") from error
    logger.info("loaded the tokenizer for grammars in %.2f s", time.monotonic() - begin)
    return tokenizer


def compile_grammar(structure: StructuredOutputsParams, tokenizer: LLTokenizer, vocab_size: int) -> Grammar:
    """The compiled grammar of `structure`, which allows at least one first token.

    Raises:
        GrammarError: the grammar is invalid, not supported, or allows no output.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    state = LLMatcher(tokenizer, grammar_text(structure, tokenizer), log_level=0, limits=limits)
    if state.is_error():
        raise GrammarError(f"{structure.kind}: {failure_reason(state)}")
    grammar = Grammar(state, vocab_size, tuple(i for i in tokenizer.eos_tokens if i < vocab_size))
    try:
        if any(grammar.matcher().mask()):
            return grammar
    except GrammarError as error:
        if "NoExtension" not in str(error):
            raise GrammarError(f"{structure.kind}: {error}") from None
    raise GrammarError(f"{structure.kind}: no output can satisfy it")


def grammar_text(structure: StructuredOutputsParams, tokenizer: LLTokenizer) -> str:
    """The grammar of `structure` in llguidance's notation.

    Raises:
        GrammarError: it is invalid or not supported. ValueError: the same, raised by llguidance.
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
    """`text` as a string literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def as_object(text: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object that may be given as text."""
    value: dict[str, Any] = json.loads(text) if isinstance(text, str) else text
    return value


def tagged_text(structure: StructuredOutputsParams, tokenizer: LLTokenizer) -> str:
    """The Lark grammar of a structural tag: after a trigger, one of the tags that begin with it must follow.

    Raises:
        GrammarError: the structural tag is malformed.
    """
    try:
        tags = msgspec.convert(as_object(structure.structural_tag or "{}"), StructuralTag)
    except msgspec.ValidationError as error:
        raise GrammarError(f"structural_tag: {error}") from None
    if not tags.structures:
        raise GrammarError("structural_tag: structures must not be empty")
    names = [f"tag_{i}" for i in range(len(tags.structures))]
    lines = ["%llguidance {}", f"start: ({' | '.join(names)})* end", "end: TEXT", r"TEXT: /(.|\n)*/"]
    for name, tag in zip(names, tags.structures, strict=True):
        trigger = max((t for t in tags.triggers if tag.begin.startswith(t)), key=len, default="")
        if not trigger:
            raise GrammarError(f"structural_tag: {tag.begin!r} does not start with any of the triggers")
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
