"""Grammars of texts in JSON strings: they allow the JSON of what the plain grammar allows, and nothing else."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

import pagewire.demo
from pagewire.engine_core.grammar.compile import compile_grammar, load_tokenizer
from pagewire.engine_core.grammar.json_text import json_text_grammar
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.wire.params import StructuredOutputsParams

EOS, VOCAB = 2, 4096
TOKENIZER = load_tokenizer(Path(pagewire.demo.__path__[0]), [EOS])
PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?   // the last line may end here
hunk: add | delete | update
add: "*** Add File: " name LF line+
delete: "*** Delete File: " name LF
update: "*** Update File: " name LF move? change?
name: /(.+)/
line: "+" /(.*)/ LF -> added
move: "*** Move to: " name LF
change: (context | edit)+ eof?
context: ("@@" | "@@ " /(.+)/) LF
edit: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF

%import common.LF
"""


@cache
def compiled(lark: str) -> LLMatcher:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(lark: str, text: str) -> bool:
    """Whether a grammar allows a text and its end there."""
    matcher = compiled(lark).deep_copy()
    token_ids = TOKENIZER.tokenize_str(text)
    return (not token_ids or matcher.consume_tokens(token_ids)) and matcher.is_accepting()


def in_json(text: str) -> str:
    """A text as it stands in JSON, between the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


EXPRESSIONS = [
    r'[^"]*"',
    r"(ab|\n)+x?",
    r"[\s\S]+",
    r"(?:.*)",
    r"\\.",
    r'"[^"\n]*"',
    r"a:[^\r\n]*\r?\n",
    r"[ax]+",
    r"(a|b){2,3}\t",
    r'[\]\\"]+',
    r"\x41\x0a",
    r"-+?&{1,2}]",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@settings(max_examples=40, deadline=None)
@given(text=st.text('ab"\\\n\t\rxA :{}é]-&', max_size=6))
def test_an_expression_allows_the_json_of_its_texts(expression: str, text: str) -> None:
    grammar = json_text_grammar(f"start: /{expression}/")
    assert accepts(grammar, in_json(text)) == (re.fullmatch(expression, text) is not None)


def test_a_grammar_allows_the_json_of_its_texts() -> None:
    text = (
        '*** Begin Patch\n*** Update File: a "x".py\n@@ def\\f\n-\tprint("hi")\n+é"\\\x01\n*** End of File\n'
    )
    text += "*** Delete File: old.py\n*** End Patch"
    grammar = json_text_grammar(PATCH)
    for whole in (text, text + "\n"):
        assert accepts(PATCH, whole) and accepts(grammar, in_json(whole))
    for wrong in (text + "\n\n", text.replace("@@", "##"), text[:-1], text.replace("\n", " ")):
        assert not accepts(PATCH, wrong) and not accepts(grammar, in_json(wrong))
    assert not accepts(grammar, text), "a line break is an escape"


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_sampled_in_a_json_object_follows_the_grammar(seed: int) -> None:
    chance = random.Random(seed)
    form = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": '{"input": "'},
            {"type": "grammar", "grammar": PATCH, "json_string": True},
            {"type": "const_string", "value": '"}'},
        ],
    }
    grammar = compile_grammar(StructuredOutputsParams(structural_tag={"format": form}), TOKENIZER, VOCAB)
    matcher, token_ids = grammar.matcher(), list[int]()
    while not matcher.complete and len(token_ids) < 400:
        mask = matcher.mask()
        allowed = [i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1]
        if EOS in allowed:
            break
        # Line breaks and quotes are likelier than by chance, or the text would have no end.
        ending = [i for i in allowed if TOKENIZER.decode_str([i]) in ("\\", '"', '"}', "n", "***", "*** End")]
        token_ids.append(chance.choice(ending if ending and chance.random() < 0.5 else allowed))
        matcher.accept(token_ids[-1])
    text = TOKENIZER.decode_str(token_ids)
    if matcher.complete or EOS in allowed:
        assert accepts(PATCH, json.loads(text)["input"])
    else:  # it was cut
        cut = text.removeprefix('{"input": "')
        cut = cut[: len(cut) - len(re.search(r"(\\u?[0-9a-f]{0,3})?$", cut)[0])]  # type: ignore[index]
        plain = compiled(PATCH).deep_copy()
        assert plain.consume_tokens(TOKENIZER.tokenize_str(json.loads(f'"{cut}"')))


def test_ranges_cases_imports_and_what_is_ignored() -> None:
    grammar = json_text_grammar(
        'start: NAME ":" value\nNAME.2: "a".."c"+\nvalue: "Yes\\t"i | INT | ESCAPED_STRING\n'
        "%import common (INT, ESCAPED_STRING)\n%ignore /[ \\n]+/\n"
    )
    for right in ("ab:yES\t", "a : 12", 'c:\n"q"', r'a:"\""'):
        assert accepts(grammar, in_json(right)), right
    for wrong in ("d:1", "a:yes", "a:YES\\T", 'a:"'):
        assert not accepts(grammar, in_json(wrong) if "\\" not in wrong else wrong), wrong


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: /a(?=b)/", "group with"),
        ("start: /^a/", "'\\^' where"),
        ("start: /a)/", "unbalanced '\\)'"),
        ("start: /(a/", "unbalanced '\\('"),
        ("start: /[\\p{C}]/", "the class"),
        ("start: /\\b/", "'\\\\\\\\b'"),
        ("start: /a/x", "the flags x"),
        ("start: A & B", "'& B' cannot be"),
        ("start: %json {}", "'%json"),
        ("start: <[3]>", "cannot be"),
        ("start: A\n%import common.NOTHING", "no terminal 'NOTHING'"),
        ("start: A\n%import python.STRING", "'%import python"),
        ("start: A\nA: /a/\n%ignore A", "give its regular expression"),
        ("start: A\nA: /a/\n%ignore /( |\\n)b/", "must repeat one class"),
        ('start: "\\q"', "an escape that JSON has not"),
        ("start: /" + "(" * 60 + "a" + ")" * 60 + "/", "more than 50 groups"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_by_name(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        json_text_grammar(grammar)


def test_a_tag_says_that_its_grammar_cannot_be_rewritten() -> None:
    form = {"type": "grammar", "grammar": "start: /a(?=b)/", "json_string": True}
    with pytest.raises(GrammarError, match="group"):
        compile_grammar(StructuredOutputsParams(structural_tag={"format": form}), TOKENIZER, VOCAB)
