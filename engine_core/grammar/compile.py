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

from pagewire.engine_core.grammar.matcher import Grammar, GrammarError, failure_reason
from pagewire.engine_core.grammar.schema import json_schema
from pagewire.engine_core.grammar.structural_tag import structural_tag_grammar
from pagewire.ipc.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger("pagewire.core")

MAX_LEXER_STATES = 25_000  # 1 to 2 kB each: bounds the memory of one grammar


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

    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.grammar is not None:
        return LLMatcher.grammar_from_lark(lark_text(structure.grammar))
    if structure.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(literal, structure.choice)))
    if structure.structural_tag is not None:
        return structural_tag_grammar(structure, tokenizer, lark_text)
    schema = {"type": "object"} if structure.json is None else as_object(structure.json)
    return LLMatcher.grammar_from_json_schema(json_schema(schema, structure))


def lark_text(grammar: str) -> str:
    """The text of a grammar in Lark's notation, converted if it is in GBNF."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return gbnf_to_lark(grammar) if "::=" in grammar else grammar


def literal(text: str) -> str:
    """`text` as a string literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def as_object(text: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object that may be given as text."""
    value: dict[str, Any] = json.loads(text) if isinstance(text, str) else text
    return value
