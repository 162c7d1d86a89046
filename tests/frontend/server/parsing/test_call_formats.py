"""Formats of calls: all that they allow, the parser of the same name reads as calls that follow the schemas."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

import pagewire.demo
from pagewire.engine_core.grammar.compile import compile_grammar, load_tokenizer
from pagewire.engine_core.grammar.matcher import Grammar
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.frontend.server.parsing.call_formats import Format
from pagewire.frontend.server.parsing.choice import tool_use
from pagewire.frontend.server.parsing.deltas import ParsedReply, call_id
from pagewire.frontend.server.parsing.dialects import DIALECTS
from pagewire.ipc.wire.params import StructuredOutputsParams

EOS, VOCAB = 2, 4096
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 3},
        "pages": {"$ref": "#/$defs/count"},
        "kind": {"enum": ["novel", None, True]},
        "tags": {"type": "array", "items": {"enum": [1, -2.5]}, "maxItems": 2},
    },
    "required": ["pages", "kind"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 900}},
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "find_book", "parameters": BOOK},
    {"name": "clock"},
    {"name": "room.free", "parameters": {"properties": {"n": {"const": 3}}, "additionalProperties": False}},
]
SCHEMAS = {function["name"]: function.get("parameters", {}) for function in FUNCTIONS}
CLOSED = [FUNCTIONS[0], FUNCTIONS[2], {"name": "clock", "parameters": {"additionalProperties": False}}]


TEXTS = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "room.free", "arguments": {"n": 3}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "clock", "parameters": {}}; '
    '{"name": "room.free", "parameters": {"n": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "room.free", "arguments": {"n": 3}}]',
    "pythonic": "[clock(), room.free(n=3)]",
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(Path(pagewire.demo.__path__[0]), [EOS])


def compiled(tokenizer: LLTokenizer, form: Format) -> Grammar:
    return compile_grammar(StructuredOutputsParams(structural_tag={"format": form}), tokenizer, VOCAB)


def written(tokenizer: LLTokenizer, grammar: Grammar, chance: random.Random) -> str:
    """A text that a model might write under a grammar: any allowed token comes next, and the end where it may."""
    token_ids: list[int] = []
    matcher = grammar.matcher()
    while not matcher.complete:
        mask = matcher.mask()
        allowed = [i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1]
        if EOS in allowed:
            break
        token_ids.append(chance.choice(allowed))
        matcher.accept(token_ids[-1])
    return tokenizer.decode_str(token_ids)


def parsed(dialect: str, text: str) -> ParsedReply:
    return DIALECTS[dialect].new_parser(FUNCTIONS, call_id, True).parse(text)


def check(reply: ParsedReply) -> None:
    assert reply.content is None and reply.tool_calls
    for call in reply.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("parser", sorted(TEXTS))
@pytest.mark.parametrize("parallel", [True, False])
def test_what_a_format_allows_its_parser_reads(tokenizer: LLTokenizer, parser: str, parallel: bool) -> None:
    grammar = compiled(tokenizer, DIALECTS[parser].whole_calls(CLOSED, parallel))
    names: set[str] = set()
    for seed in range(15):
        text = written(tokenizer, grammar, random.Random(seed))
        reply = parsed(parser, text)
        check(reply)
        names |= {call.name for call in reply.tool_calls}
        assert parallel or len(reply.tool_calls) == 1
    assert len(names) > 1


@pytest.mark.parametrize("parser", sorted(TEXTS))
def test_what_models_write(tokenizer: LLTokenizer, parser: str) -> None:
    text = TEXTS[parser]
    several, single = (
        compiled(tokenizer, DIALECTS[parser].whole_calls(FUNCTIONS, many)) for many in (True, False)
    )
    several.matcher(tokenizer.tokenize_str(text))
    assert [call.name for call in parsed(parser, text).tool_calls] == ["clock", "room.free"]
    with pytest.raises(GrammarError, match="does not fit"):
        single.matcher(tokenizer.tokenize_str(text))
    with pytest.raises(GrammarError, match="does not fit"):
        several.matcher(tokenizer.tokenize_str(text.replace("3", "4")))


def test_both_forms_of_mistral(tokenizer: LLTokenizer) -> None:
    grammar = compiled(tokenizer, DIALECTS["mistral"].whole_calls(FUNCTIONS, True))
    for text in ('[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]room.free[ARGS]{"n": 3}', "[TOOL_CALLS]clock{}"):
        grammar.matcher(tokenizer.tokenize_str(text))


@pytest.mark.timeout(20)
def test_what_grows_with_the_square_of_the_parameters_is_refused_before_it_is_made() -> None:
    """Any optional argument may come first, and each value has all definitions with it."""
    properties = {f"p{number}": {"type": "string"} for number in range(1000)}
    definitions = {f"d{number}": {"type": "string"} for number in range(3000)}

    def form(**parameters: Any) -> Format:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        call_format = tool_use([tool], "auto", parser="pythonic").call_format
        assert call_format is not None
        return call_format()

    with pytest.raises(
        ValueError, match=r"tools: the format of their calls would have over .* require the first"
    ):
        form(properties=properties)
    with pytest.raises(ValueError, match="have fewer parameters or definitions"):
        form(properties=dict(list(properties.items())[:30]), **{"$defs": definitions})
    StructuredOutputsParams(structural_tag={"format": form(properties=properties, required=["p0"])})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a-b": {}}}, "no way to write the parameter 'a-b'"),
        ({"properties": {}, "required": ["x"]}, "the required parameter 'x' is not among the properties"),
    ],
)
def test_what_python_cannot_say(parameters: dict[str, Any], message: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    tools = tool_use([tool], "auto", parser="pythonic")  # without another demand, nothing is constrained
    assert tools.call_format is not None
    with pytest.raises(ValueError, match=f"tools: .*{message}"):
        tools.call_format()
