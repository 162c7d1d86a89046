"""Compiles the structured output parameters of a request with llguidance.

https://github.com/guidance-ai/llguidance. Schemas are untrusted input: references are never fetched, and sizes
and steps are limited. What a grammar is to llguidance is worked out, and tried, in a process that may be lost
(`prover.py`); the core itself only compiles texts that were proven there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.engine_core.grammar.chains import check_references, check_rules
from pagewire.engine_core.grammar.matcher import DEAD_END, Grammar, MasksTime, failure_reason
from pagewire.engine_core.grammar.schema import json_schema
from pagewire.engine_core.grammar.structural_tag import structural_tag_grammar
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.gguf.file import is_gguf, read_metadata
from pagewire.ipc.gguf.tokenizer import tokenizer_json
from pagewire.ipc.wire.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger("pagewire.core")

MAX_LEXER_STATES = 25_000  # 1 to 2 kB each: bounds the memory of one grammar


def load_tokenizer(folder: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's form of the tokenizer in a folder, a GGUF file, or a file like tokenizer.json.

    Holds the GIL for about 4 us per token of the vocabulary.

    Raises:
        GrammarError: the folder has no tokenizer.json that llguidance can read.
    """
    from llguidance import LLTokenizer

    path = folder if folder.is_file() else folder / "tokenizer.json"
    if not path.is_file():
        raise GrammarError(f"structured outputs need a tokenizer.json, but {folder} has none")
    begin = time.monotonic()
    try:
        content = tokenizer_json(read_metadata(path)) if is_gguf(path) else path.read_bytes()
        tokenizer = LLTokenizer(content.decode(), eos_token=list(eos_token_ids) or None)
    except (ValueError, OSError) as error:
        raise GrammarError(f"structured outputs cannot use {path}: {error}") from error
    logger.info("loaded the tokenizer for grammars in %.2f s", time.monotonic() - begin)
    return tokenizer


def compile_grammar(structure: StructuredOutputsParams, tokenizer: LLTokenizer, vocab_size: int) -> Grammar:
    """The compiled grammar of `structure`, which allows at least one first token.

    Raises:
        GrammarError: the grammar is invalid, not supported, or allows no output.
    """
    return compile_text(structure.kind, grammar_text(structure, tokenizer), tokenizer, vocab_size)


def compile_text(
    kind: str, text: str, tokenizer: LLTokenizer, vocab_size: int, num_bytes: int = 0
) -> Grammar:
    """The compiled grammar of a text in llguidance's notation, which allows at least one first token.

    kind: of the structured output, for errors. num_bytes: memory that the compiled grammar takes.

    Raises:
        GrammarError: the grammar is invalid, not supported, or allows no output.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    state = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if state.is_error():
        raise GrammarError(f"{kind}: {failure_reason(state)}")
    eos_token_ids = tuple(i for i in tokenizer.eos_tokens if i < vocab_size)
    grammar = Grammar(
        state, vocab_size, eos_token_ids, MasksTime(time.thread_time, time.monotonic), num_bytes
    )
    try:
        if any(grammar.matcher().mask()):
            return grammar
    except GrammarError as error:
        if DEAD_END not in str(error):
            raise GrammarError(f"{kind}: {error}") from None
    raise GrammarError(f"{kind}: no output can satisfy it")


def grammar_text(structure: StructuredOutputsParams, tokenizer: LLTokenizer) -> str:
    """The grammar of `structure` in llguidance's notation.

    Raises:
        GrammarError: it is invalid or not supported. ValueError: the same, raised by llguidance.
    """
    from llguidance import LLMatcher

    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.grammar is not None:
        lark = lark_text(structure.grammar)
        check_rules(lark)
        return LLMatcher.grammar_from_lark(lark)
    if structure.choice is not None:
        choices = " | ".join(map(literal, structure.choice))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")  # a rule of each is slow
    if structure.structural_tag is not None:
        return structural_tag_grammar(structure, tokenizer, lark_text)
    schema = {"type": "object"} if structure.json is None else as_object(structure.json)
    check_references(schema)
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
