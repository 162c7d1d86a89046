"""Reasoning between tags, before an answer with calls or without."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.frontend.server.parsing.choice import ToolUse, tool_use
from pagewire.frontend.server.parsing.deltas import (
    Arguments,
    CallStart,
    ContentDelta,
    ParsedCall,
    ParsedReply,
    Reasoning,
    fold,
)
from pagewire.frontend.server.parsing.dialects import HERMES
from pagewire.frontend.server.parsing.llama3_json import Llama3JSON
from pagewire.frontend.server.parsing.marked_calls import MarkedCalls
from pagewire.frontend.server.parsing.mistral import Mistral
from pagewire.frontend.server.parsing.parser import Parser, PlainText
from pagewire.frontend.server.parsing.pythonic import Pythonic
from pagewire.frontend.server.parsing.reasoning import (
    Thinking,
    begins_within,
    parser_for,
    thinking,
)
from pagewire.frontend.server.parsing.reasoning_marks import REASONING

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLS = [ParsedCall("0", "f", '{"a": 1}')]


def reader(begun: bool, with_tools: bool = True) -> Parser:
    ids = map(str, itertools.count())
    return Thinking(MarkedCalls(HERMES, lambda: next(ids)) if with_tools else PlainText(), begun)


@pytest.mark.parametrize(
    ("begun", "text", "reply"),
    [
        (False, "", ParsedReply()),
        (False, " Hello. \n", ParsedReply(None, " Hello. \n")),
        (False, "<think>\nHm, <b>\n\nso.\n</think>\n\n Hello. ", ParsedReply("Hm, <b>\n\nso.", "Hello. ")),
        (False, f"\n<think>{CALL}?</think>\n\n{CALL}\n", ParsedReply(f"{CALL}?", None, CALLS)),
        (False, f"<think></think>Well\n{CALL}", ParsedReply(None, "Well", CALLS)),
        (False, "<think> Hm </thin", ParsedReply("Hm </thin")),
        (False, "<think", ParsedReply(None, "<think")),
        (False, "Hello <think>x</think>", ParsedReply(None, "Hello <think>x</think>")),
        (True, "Hm\n</think>\n\nHello", ParsedReply("Hm", "Hello")),
        (True, "<think>\nHm\n</think>Hello", ParsedReply("Hm", "Hello")),
        (True, "Hm, let me ", ParsedReply("Hm, let me")),
        (True, f"Hm</think>{CALL}", ParsedReply("Hm", None, CALLS)),
        # Reasoning that never ends: a call in it is a call, a mark without a call is a part of it.
        (True, f"Hm\n{CALL}", ParsedReply("Hm", None, CALLS)),
        (False, f"<think>Hm, <b>\n{CALL}\nok", ParsedReply("Hm, <b>", "\nok", CALLS)),
        (True, "Hm <tool_call> is a mark", ParsedReply("Hm <tool_call> is a mark")),
        (
            True,
            '<tool_call>{"name": "f", "arguments": {"a',
            ParsedReply(None, None, [ParsedCall("0", "f", '{"a')]),
        ),
        (True, f"Hm {CALL} or {CALL}</think> Hello", ParsedReply(f"Hm {CALL} or {CALL}", "Hello")),
    ],
)
def test_examples(begun: bool, text: str, reply: ParsedReply) -> None:
    assert reader(begun).parse(text) == reply
    parser = reader(begun)
    deltas = [delta for character in text for delta in parser.feed(character)]
    assert fold([*deltas, *parser.finish(), *parser.finish()]) == reply


WORDS = st.sampled_from(
    ["<think>", "</think>", "<thi", "</", CALL, "<tool_call>", "\n", " ", "Hm", "é", "<", "> "]
)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("with_tools", [False, True])
@settings(deadline=None)
@given(text=st.lists(WORDS, max_size=12).map("".join), seed=st.integers())
def test_the_reply_does_not_depend_on_how_the_text_is_split(
    begun: bool, with_tools: bool, text: str, seed: int
) -> None:
    chance = random.Random(seed)
    places = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, len(text) + 2)))
    parser = reader(begun, with_tools)
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    reply = fold([*deltas, *parser.finish()])
    assert reply == reader(begun, with_tools).parse(text)
    if not reply.reasoning and not reply.tool_calls and not begun and "<think>" not in text:
        assert (reply.content or "") == text


def test_reasoning_is_emitted_at_once() -> None:
    parser = reader(False)
    assert parser.feed("<think>\nHm <") == [Reasoning("Hm")]
    assert parser.feed("b> </") == [Reasoning(" <b>")]
    assert parser.feed("think>\n\nWell <to") == [ContentDelta("Well")]
    assert parser.feed('ol_call>{"name": "f", "arguments": {"') == [
        CallStart(0, "0", "f"),
        Arguments(0, '{"'),
    ]


def test_which_parser() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert parser_for(ToolUse(), "Hello") is None
    hermes = tool_use([tool], "auto", parser="hermes")
    assert isinstance(parser_for(hermes, "Hello"), MarkedCalls)
    for tools, name, reply in (
        (ToolUse(), "deepseek_r1", ParsedReply("a", "b")),
        (hermes, "qwen3", ParsedReply(None, "a</think>b")),
    ):
        parser = parser_for(thinking(tools, name), "Hello")
        assert parser is not None and parser.parse("a</think>b") == reply
    required = thinking(tool_use([tool], "required"), "deepseek_r1")
    parser = parser_for(required, "Hello")
    assert parser is not None
    reply = parser.parse('Hm</think>\n\n[{"name": "f", "parameters": {}}]')
    assert reply.reasoning == "Hm" and [call.name for call in reply.tool_calls] == ["f"]
    with pytest.raises(ValueError, match=r"must be one of gpt_oss, .*qwen3, got 'x'"):
        thinking(ToolUse(), "x")
    with pytest.raises(ValueError, match=r"must be one of gpt_oss, .*hermes, .*got 'x'"):
        tool_use([tool], "auto", parser="x")


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(
    ("prompt", "continued", "begun"),
    [
        ("<user>Hello<assistant><think>\n", None, True),
        ("<user>Hello<assistant><think>\n\n</think>\n\n", None, False),
        ("<user>What does <think> do?<assistant>", None, None),
        ("<user>Hello<assistant><think>x</think>Hi<user>And?<assistant>", None, None),
        ("<user>Hello<assistant><think>\nHm, ", "<think>\nHm, ", True),
        ("<user>Hello<assistant><think>x</think>The ", "<think>x</think>The ", False),
        ("<user>Hello<assistant>The ", "The ", False),
    ],
)
def test_the_prompt_says_where_a_reply_begins(
    parser: str, prompt: str, continued: str | None, begun: bool | None
) -> None:
    """Else the format does: deepseek_r1 begins within the reasoning, qwen3 before it."""
    expected = parser == "deepseek_r1" if begun is None else begun
    assert begins_within(REASONING[parser], prompt, continued) is expected


def test_calls_of_every_format_in_reasoning_that_never_ends() -> None:
    for answer, text in (
        (Mistral(lambda: "0"), '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        (Llama3JSON(lambda: "0"), '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
        (Pythonic(new_id=lambda: "0"), "<|python_start|>[f(a=1)]<|python_end|>"),
    ):
        assert Thinking(answer, True).parse(f"Hm\n{text}") == ParsedReply("Hm", None, CALLS)
