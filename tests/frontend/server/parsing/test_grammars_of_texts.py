"""Functions whose only parameter is a text with a grammar, in every dialect: custom tools of /v1/responses."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLTokenizer

from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.frontend.server.parsing.call_formats import GRAMMAR, text_value
from pagewire.frontend.server.parsing.choice import tool_use
from pagewire.frontend.server.parsing.deltas import call_id
from pagewire.frontend.server.parsing.dialects import DIALECTS
from tests.frontend.server.parsing.test_call_formats import compiled, tokenizer, written

__all__ = ["tokenizer"]  # a fixture

LARK = r"""
start: "add " WORD (LF | QUOTED)
WORD: /[a-c"\\]{1,3}/
QUOTED: "\"" /[x\t]/ "\""
LF: /\n/
"""
FOLLOWS = re.compile(r'add [a-c"\\]{1,3}(\n|"[x\t]")')


def with_grammar(name: str, lark: str = LARK) -> dict[str, Any]:
    text = {"type": "string", "description": "what to add", GRAMMAR: lark}
    return {
        "name": name,
        "parameters": {"type": "object", "properties": {"input": text}, "required": ["input"]},
    }


COUNT = {
    "name": "count",
    "parameters": {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
FUNCTIONS = [with_grammar("edit"), COUNT, with_grammar("tools.edit")]


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_the_text_of_a_call_follows_its_grammar(tokenizer: LLTokenizer, name: str) -> None:
    dialect = DIALECTS[name]
    grammar = compiled(tokenizer, dialect.whole_calls(FUNCTIONS, False))
    names = set()
    for seed in range(16):
        text = written(tokenizer, grammar, random.Random(seed))
        reply = dialect.new_parser(FUNCTIONS, call_id, False).parse(text)
        (call,) = reply.tool_calls
        names.add(call.name)
        arguments = json.loads(call.arguments)
        if call.name == "count":
            assert arguments["n"] in (1, 2)
        else:
            assert list(arguments) == ["input"] and FOLLOWS.fullmatch(arguments["input"]), text
    assert names == {"edit", "count", "tools.edit"}, "one call does not keep another from being written"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "edit"}}])
def test_calls_that_are_required_follow_it(tokenizer: LLTokenizer, choice: Any) -> None:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    use = tool_use(tools, choice)
    assert use.form is not None and use.new_parser is not None
    grammar = compiled(tokenizer, use.form)
    found = 0
    for seed in range(12):
        reply = use.new_parser().parse(written(tokenizer, grammar, random.Random(seed)))
        for call in reply.tool_calls:
            arguments = json.loads(call.arguments)
            assert call.name == "count" or FOLLOWS.fullmatch(arguments["input"])
            found += call.name != "count"
    assert found


def test_what_does_not_follow_it_is_not_allowed(tokenizer: LLTokenizer) -> None:
    grammar = compiled(tokenizer, DIALECTS["hermes"].whole_calls(FUNCTIONS, True))
    call = '<tool_call>\n{"name": "edit", "arguments": {"input": "%s"}}\n</tool_call>'
    grammar.matcher(tokenizer.tokenize_str(call % 'add b\\"\\n'))
    for wrong in ("put b\\n", "add d\\n", "add b"):
        with pytest.raises(GrammarError, match="does not fit"):
            grammar.matcher(tokenizer.tokenize_str(call % wrong))


def test_templates_get_the_description_alone() -> None:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    prompted = tool_use(tools, "required").prompted
    assert prompted is not None and GRAMMAR not in json.dumps(prompted) and GRAMMAR in json.dumps(tools)
    assert prompted[0]["function"]["parameters"]["properties"]["input"]["description"] == "what to add"
    assert prompted[1] == tools[1]


@pytest.mark.parametrize(
    ("expression", "ends"),
    [
        (r"/[\s\S]+/", False),
        (r"/[\S\s]+/", False),
        (r"/(.|\n)*/", False),
        (r"/.+/s", False),
        (r'/[^"]+/', False),
        (r"/[^\r\n]*/", True),
        (r"/(.+)/", True),
        ('"a"', True),
    ],
)
def test_a_grammar_of_any_text_is_none_between_marks(expression: str, ends: bool) -> None:
    form = text_value({"type": "string", GRAMMAR: f"start: {expression}\n"})
    assert form["type"] == ("grammar" if ends else "any_text")
