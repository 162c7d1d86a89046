"""Structural tags: every format, alone and in others, for tokenizers with special tokens and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

import pagewire.demo
from pagewire.engine_core.grammar.compile import compile_grammar, load_tokenizer
from pagewire.engine_core.grammar.structural_tag import regex_literal
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.wire.params import StructuredOutputsParams

EOS, VOCAB = 2, 4096
A: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
B: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"b": {"$ref": "#/$defs/x"}},
        "required": ["b"],
        "additionalProperties": False,
        "$defs": {"x": {"enum": ["y"]}},
    },
}
ANY: dict[str, Any] = {"type": "any_text"}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(kind: str, *elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "elements": list(elements)}


CALLS: dict[str, Any] = {
    "type": "tags_with_separator",
    "tags": [tag("<f>", A, "</f>"), tag("<g>", B, "</g>")],
    "separator": "\n",
}
TEXT: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f>", A, "</f>")]}
THOUGHT = of("or", tag("<think>", ANY, "</think>"), const(""))


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(Path(pagewire.demo.__path__[0]), [EOS])


@pytest.fixture
def accepts(tokenizer: LLTokenizer) -> Callable[..., bool]:
    """Whether a text, as a whole, has a format."""

    def accepted(form: dict[str, Any], text: str, **options: Any) -> bool:
        structure = StructuredOutputsParams(structural_tag={"format": form}, **options)
        grammar = compile_grammar(structure, tokenizer, VOCAB)
        try:
            matcher = grammar.matcher(tokenizer.tokenize_str(text, parse_special=True))
        except GrammarError:
            return False
        return matcher.complete or bool(matcher.mask()[EOS // 8] >> EOS % 8 & 1)

    return accepted


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (const('a"\\\n'), ['a"\\\n'], ["a", ""]),
        (A, ['{"a": 1}'], ['{"b": "y"}', "{}"]),
        ({"type": "json_schema", "json_schema": True}, ["[1]", "{}"], ["x"]),
        ({"type": "regex", "pattern": r"a/\/[/b]+"}, ["a//b/"], ["a/b"]),
        ({"type": "grammar", "grammar": 'start: "a" B\nB: /b+/'}, ["abb"], ["a"]),
        ({"type": "grammar", "grammar": 'root ::= "a" rest\nrest ::= "b" [c-d]*'}, ["abcd"], ["abe"]),
        (of("sequence", const("a"), const("b")), ["ab"], ["a", "ba"]),
        (of("sequence", const("a:"), A, const("."), ANY), ['a:{"a":1}.', 'a:{"a":1}. And so'], ['a:{"a":1}']),
        (of("sequence"), [""], ["a"]),
        (of("or", const("a"), A, B), ["a", '{"a":1}', '{"b":"y"}'], ["b", '{"b":1}']),
        (of("or", B, const("")), ["", '{"b":"y"}'], ["b"]),
        (tag("<", ANY, ">"), ["<>", "<a\nb>"], ["<a", "<a>b>", "a>"]),
        (tag("", ANY, ["!", "?"]), ["a!", "?"], ["a", "a!b", "a!?"]),
        (tag("<", A, [">", "/>"]), ['<{"a":1}>', '<{"a":1}/>'], ['<{"a":1}', '{"a":1}>']),
        (CALLS, ["", '<f>{"a":1}</f>', '<g>{"b":"y"}</g>\n<f>{"a":1}</f>'], ['<f>{"b":"y"}</f>', "x"]),
        (
            CALLS | {"at_least_one": True, "stop_after_first": True},
            ['<f>{"a":1}</f>'],
            ["", '<g>{"b":"y"}</g>\n<f>{"a":1}</f>'],
        ),
        (TEXT, ["", "text < more", 'a<f>{"a":1}</f>b<f>{"a":2}</f>'], ["<f", "<fx", '<f>{"b":1}</f>']),
        (TEXT | {"at_least_one": True}, ['<f>{"a":1}</f>', '<f>{"a":1}</f> x'], ["", 'x<f>{"a":1}</f>']),
        (TEXT | {"stop_after_first": True}, ["", "x", 'x<f>{"a":1}</f>'], ['x<f>{"a":1}</f>x']),
    ],
)
def test_every_format(
    accepts: Callable[..., bool], form: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(form, text)] == []
    assert [text for text in bad if accepts(form, text)] == []


@pytest.mark.parametrize(
    ("body", "good"),
    [(A, '{"a": 1}'), (of("or", CALLS | {"at_least_one": True}, B), '{"b": "y"}'), (const("yes"), "yes")]
    + [({"type": "grammar", "grammar": 'start: "x" W\nW: /[a-z]+/'}, "xyz")]
    + [({"type": "regex", "pattern": "[0-9]+"}, "12")],
)
def test_an_answer_after_a_thought(accepts: Callable[..., bool], body: dict[str, Any], good: str) -> None:
    form = of("sequence", THOUGHT, {"type": "regex", "pattern": r"\s{0,4}"}, body)
    for thought in ("", "<think></think>", f"<think>\nHm, {good}? é </thin\n</think>\n\n"):
        assert accepts(form, thought + good), thought
        assert not accepts(form, thought + good + "</think>")
    for text in (f"<think>{good}", "<think></think>", f"Hm</think>{good}", f"<think></think>Hm {good}"):
        assert not accepts(form, text), text


def test_special_tokens(accepts: Callable[..., bool], tokenizer: LLTokenizer) -> None:
    mark = "<|im_start|>"
    assert accepts(tag(mark + "f", A, mark), f'{mark}f{{"a":1}}{mark}')
    assert accepts(tag("", ANY, mark), f"any text{mark}")
    structure = StructuredOutputsParams(structural_tag={"format": const(mark)})
    mask = compile_grammar(structure, tokenizer, VOCAB).matcher().mask()
    allowed = [i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1]
    assert allowed == tokenizer.tokenize_str(mark, parse_special=True)  # the token alone, not its characters


def test_options_hold_for_every_schema(accepts: Callable[..., bool]) -> None:
    form = of("sequence", const("a: "), A)
    assert accepts(form, 'a: {"a": 1}') and not accepts(form, 'a: {"a": 1}', disable_any_whitespace=True)
    assert accepts(form, 'a: {"a":   1}', whitespace_pattern=" *")


def test_a_list_of_grammars(accepts: Callable[..., bool]) -> None:
    """As guidance writes them."""
    grammars = {"grammars": [{"lark_grammar": 'start: "n=" @n'}, {"name": "n", "json_schema": {"const": 1}}]}
    form = of("sequence", THOUGHT, {"type": "grammar", "grammar": json.dumps(grammars)})
    assert accepts(form, "n=1") and accepts(form, "<think>?</think>n=1") and not accepts(form, "n=2")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "verse"}, "verse"),
        (const("a") | {"style": "x"}, "unknown field `style`"),
        (of("or"), "must not be empty"),
        (CALLS | {"tags": []}, "must not be empty"),
        (TEXT | {"tags": []}, "must not be empty"),
        (TEXT | {"triggers": ["<g"]}, "'<f>' does not start with any of the triggers"),
        (of("sequence", ANY, const("a")), "any_text must be in a tag"),
        ({"type": "json_schema", "json_schema": False}, "no JSON follows"),
        ({"type": "grammar", "grammar": '{"grammars": []}'}, "a list `grammars`"),
        ({"type": "grammar", "grammar": "{}"}, "a list `grammars`"),
        ({"type": "grammar", "grammar": "start: x"}, 'unknown name: "x"'),
        ({"type": "regex", "pattern": "("}, "unclosed group"),
    ],
)
def test_malformed_formats(accepts: Callable[..., bool], form: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        accepts(form, "a")


def test_regex_literals() -> None:
    for pattern, literal in (("a/b", r"/a\/b/"), (r"a\/b", r"/a\/b/"), (r"\\/", r"/\\\//"), ("", "//")):
        assert regex_literal(pattern) == literal
