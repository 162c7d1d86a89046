"""Replies as a checkpoint describes them: read as transformers does, in any cut, and held to a grammar."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from pagewire.engine_core.grammar.compile import compile_grammar
from pagewire.frontend.server.parsing.choice import ToolUse, tool_use
from pagewire.frontend.server.parsing.deltas import ParsedReply, fold
from pagewire.frontend.server.parsing.detection import reply_formats
from pagewire.frontend.server.parsing.reasoning import parser_for, thinking
from pagewire.frontend.server.parsing.response_template import load_response_template
from pagewire.ipc.wire.params import StructuredOutputsParams
from tests.frontend.server.parsing.test_dialects import FUNCTIONS, SCHEMAS, demo_tokenizer

TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
QWEN, CODER, GEMMA = _RESPONSE_TEMPLATE_FALLBACKS.values()
LISTED = {  # calls as a list, lines, and an answer between marks of its own
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open": ["<think>", "<thinking>"], "close": "</think>"},
        "content": {"open": "<answer>", "close": "</answer>"},
        "tool_calls": {
            "open": "<calls>",
            "close": "</calls>",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{input}"}},
            "transform_each": True,
        },
    },
}
LINES = {
    "start_anchor_pattern": r"<bot>\s*",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<do (?P<name>\w+)>",
            "close": "</do>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
BOOK = {"title": "Köln 🦊", "pages": 3}
CASES: list[tuple[dict[Any, Any], str, str]] = [
    (QWEN, "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\nHi <b>.<|im_end|>"),
    (QWEN, "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nHi."),
    (QWEN, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi."),
    (
        QWEN,
        "<|im_start|>assistant\n",
        f'So.\n<tool_call>\n{{"name": "find_book", "arguments": {json.dumps(BOOK)}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>\n<|endoftext|>',
    ),
    (
        CODER,
        "<|im_start|>assistant\n<think>\n",
        "Hm.</think>\n\n<tool_call>\n<function=find_book>\n<parameter=title>\n3\n</parameter>\n"
        "<parameter=pages>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>\n<|endoftext|>",
    ),
    (
        GEMMA,
        "<|turn>model\n",
        '<|channel>thought\nHm.<channel|><|tool_call>call:find_book{title:<|"|>a, b:{"c<|"|>,pages:3}<tool_call|>'
        "<|tool_call>call:clock{}<tool_call|><turn|>",
    ),
    (GEMMA, "<|turn>model\n", "Just <text>.<turn|>"),
    (
        LISTED,
        "<bot>",
        '<thinking>Hm.</think> lost <answer>Hi.</answer><calls>[{"tool": "clock", "input": {}}]</calls>',
    ),
    (LINES, "<bot> ", "Hi.\n<do find_book>\ntitle = 12\npages = 3\n</do>"),
]


def parser_of(template: dict[Any, Any], prompt: str, **choice: Any) -> Any:
    formats = reply_formats("{{ messages }}", "X", response_template=template)
    assert formats.tools == "hf"
    use = tool_use(TOOLS, choice.get("choice", "auto"), parser=formats.dialect)
    if formats.marks is not None:
        use = thinking(use, formats.marks)
    parser = parser_for(use, f"<|im_start|>user\nQ <bot> <think>{prompt}")
    assert parser is not None
    return parser


def plain(reply: ParsedReply) -> dict[str, Any]:
    calls = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
    return {"reasoning": reply.reasoning, "content": reply.content, "calls": calls}


@pytest.mark.parametrize(("template", "prompt", "text"), CASES)
def test_replies_are_read_as_transformers_reads_them(
    template: dict[Any, Any], prompt: str, text: str
) -> None:
    message = parse_response(text, deepcopy(template), prefix=prompt, tools=TOOLS)
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    reasoning = message.get("reasoning_content") or message.get("thinking")
    expected = {"reasoning": reasoning, "content": message.get("content"), "calls": calls}
    assert plain(parser_of(template, prompt).parse(text)) == expected
    for cut in range(len(text)):
        parser = parser_of(template, prompt)
        deltas = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
        assert plain(fold(deltas)) == expected, cut
    parser = parser_of(template, prompt)
    deltas = [delta for character in text for delta in parser.feed(character)]
    assert plain(fold([*deltas, *parser.finish()])) == expected


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, "<tool_call>nope</tool_call>"),
        (QWEN, 'a <tool_call> {"name": 3, "arguments": {}} </tool_call>'),
        (QWEN, '<tool_call>{"name": "f"'),
        (CODER, "<tool_call> and <function="),
        (GEMMA, "<|tool_call>call:f{a:}<tool_call|>"),
        (LISTED, '<calls>{"tool": "f", "input": {}}</calls>'),
    ],
)
def test_text_that_is_no_call_is_content(template: dict[Any, Any], text: str) -> None:
    for pieces in ([text], list(text)):
        parser = parser_of(template, "<bot>")
        reply = fold([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])
        assert (reply.content, reply.tool_calls) == (text, [])


def test_text_after_a_call_is_kept() -> None:
    text = 'A\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nB '
    assert plain(parser_of(QWEN, "").parse(text)) == {
        "reasoning": None,
        "content": "A\nB",
        "calls": [("f", {})],
    }


@lru_cache
def grammar_of(number: int, whole: bool) -> Any:
    formats = reply_formats("{{ messages }}", "X", response_template=[QWEN, CODER, GEMMA, LISTED][number])
    use = tool_use(TOOLS, "auto", parser=formats.dialect, constrained=True)
    form = use.call_format if whole else use.text_format
    assert form is not None
    return compile_grammar(StructuredOutputsParams(structural_tag={"format": form()}), demo_tokenizer(), 4096)


@pytest.mark.parametrize("number", [0, 1])
def test_what_the_grammar_allows_is_read_back(number: int) -> None:
    template = [QWEN, CODER][number]
    tokenizer, grammar = demo_tokenizer(), grammar_of(number, True)
    read = 0
    for seed in range(12):
        chance, token_ids, matcher = random.Random(seed), [], grammar.matcher([])
        while len(token_ids) < 400 and not matcher.complete:
            mask = matcher.mask()
            allowed = [i for i in range(4096) if mask[i // 8] >> i % 8 & 1]
            if 2 in allowed:
                break
            token_ids.append(chance.choice(allowed))
            matcher.accept(token_ids[-1])
        else:
            continue
        text = tokenizer.decode_str(token_ids)
        reply = parser_of(template, "").parse(text)
        assert reply.tool_calls and reply.content is None, text
        for call in reply.tool_calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        read += len(reply.tool_calls)
    assert read > 1
    grammar_of(number, False).matcher(tokenizer.tokenize_str("Just <an> answer."))


def test_what_has_no_grammar_is_said() -> None:
    strange = deepcopy(QWEN)
    strange["fields"]["tool_calls"]["open_pattern"] = "<(tool|call)>"
    for template in (strange, LINES, LISTED):
        dialect = reply_formats("{{ messages }}", "X", response_template=template).dialect
        use = tool_use(TOOLS, "auto", parser=dialect)
        assert use.call_format is not None
        with pytest.raises(ValueError, match="tools: "):
            use.call_format()


def test_reasoning_and_required_calls() -> None:
    formats = reply_formats("{{ messages }}", "X", response_template=GEMMA)
    assert (formats.reasoning, formats.auto) == ("hf", True) and formats.marks is not None
    assert (formats.marks.open, formats.marks.close) == ("<|channel>thought", "<channel|>")
    required = thinking(tool_use(TOOLS, "required", parser=formats.dialect), formats.marks)
    parser = parser_for(required, "<|turn>model\n")
    assert parser is not None
    text = '<|channel>thought\nHm.<channel|>[{"name": "clock", "parameters": {}}]'
    assert plain(parser.parse(text)) == {"reasoning": "Hm.", "content": None, "calls": [("clock", {})]}
    without = parser_for(thinking(ToolUse(), formats.marks), "<|turn>model\n<|channel>thought\n")
    assert without is not None
    assert plain(without.parse("Hm.<channel|>Hi.<turn|>")) == {
        "reasoning": "Hm.",
        "content": "Hi.",
        "calls": [],
    }


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (3, "must be an object"),
        ({"version": 2, "fields": {"content": {}}, "start_anchor": "x"}, "version"),
        ({"start_anchor": "x"}, "needs fields"),
        ({"fields": {"content": {}}}, "start_anchor"),
        ({"fields": {"content": {}, "thinking": {}}, "start_anchor": "x"}, "no mark that opens"),
        ({"fields": {"mood": {}}, "start_anchor": "x"}, "'mood'"),
        ({"fields": {"content": {"content": "json"}}, "start_anchor": "x"}, "content must be text"),
        ({"fields": {"tool_calls": {"open_pattern": "("}}, "start_anchor": "x"}, "no regular expression"),
        ({"fields": {"tool_calls": {"open": ""}}, "start_anchor": "x"}, "a text or a list"),
        ({"fields": {"tool_calls": {"open": "a", "content": "yaml"}}, "start_anchor": "x"}, "unknown"),
    ],
)
def test_bad_descriptions(template: Any, error: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are an error where the operator wants them; else a warning, and the chat template decides."""
    with pytest.raises(ValueError, match=f"response_template: .*{error}"):
        load_response_template(template)
    with pytest.raises(ValueError, match="response_template"):
        reply_formats("{{ messages }}", "X", tools="hf", response_template=template)
    assert reply_formats("{{ messages }}", "X", response_template=template).tools == "prompted"
    assert "is not used" in caplog.text
    with pytest.raises(ValueError, match="--tool-call-parser hf needs a response_template"):
        reply_formats("{{ messages }}", "X", tools="hf")
    with pytest.raises(ValueError, match=r"--reasoning-parser hf: .* no such field"):
        reply_formats("{{ messages }}", "X", reasoning="hf", response_template=LINES)
