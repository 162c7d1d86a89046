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
    Content,
    ParsedReply,
    Reasoning,
    ToolCall,
    fold,
)
from pagewire.frontend.server.parsing.hermes import Hermes
from pagewire.frontend.server.parsing.parser import Parser
from pagewire.frontend.server.parsing.reasoning import Text, Thinking, parser_for, thinking

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FOUND = [ToolCall("0", "f", '{"a": 1}')]


def reader(begun: bool, with_tools: bool = True) -> Parser:
    ids = map(str, itertools.count())
    return Thinking(Hermes(lambda: next(ids)) if with_tools else Text(), begun)


@pytest.mark.parametrize(
    ("begun", "text", "reply"),
    [
        (False, "", ParsedReply()),
        (False, " Hello. \n", ParsedReply(None, " Hello. \n")),
        (False, "<think>\nHm, <b>\n\nso.\n</think>\n\n Hello. ", ParsedReply("Hm, <b>\n\nso.", "Hello. ")),
        (False, f"\n<think>{CALL}?</think>\n\n{CALL}\n", ParsedReply(f"{CALL}?", None, FOUND)),
        (False, f"<think></think>Well\n{CALL}", ParsedReply(None, "Well", FOUND)),
        (False, "<think> Hm </thin", ParsedReply("Hm </thin")),
        (False, "<think", ParsedReply(None, "<think")),
        (False, "Hello <think>x</think>", ParsedReply(None, "Hello <think>x</think>")),
        (True, "Hm\n</think>\n\nHello", ParsedReply("Hm", "Hello")),
        (True, "<think>\nHm\n</think>Hello", ParsedReply("Hm", "Hello")),
        (True, "Hm, let me ", ParsedReply("Hm, let me")),
        (True, f"Hm</think>{CALL}", ParsedReply("Hm", None, FOUND)),
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
def test_no_cut_changes_a_reply(begun: bool, with_tools: bool, text: str, seed: int) -> None:
    chance = random.Random(seed)
    places = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, len(text) + 2)))
    parser = reader(begun, with_tools)
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    reply = fold([*deltas, *parser.finish()])
    assert reply == reader(begun, with_tools).parse(text)
    if not reply.reasoning and not reply.tool_calls and not begun and "<think>" not in text:
        assert (reply.content or "") == text


def test_thoughts_come_at_once() -> None:
    parser = reader(False)
    assert parser.feed("<think>\nHm <") == [Reasoning("Hm")]
    assert parser.feed("b> </") == [Reasoning(" <b>")]
    assert parser.feed("think>\n\nWell <to") == [Content("Well")]
    assert parser.feed('ol_call>{"name": "f", "arguments": {"') == [
        CallStart(0, "0", "f"),
        Arguments(0, '{"'),
    ]


def test_which_parser() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    hermes = tool_use([tool], "auto", parser="hermes")
    for tools, name, reply in (
        (ToolUse(), "deepseek_r1", ParsedReply("a", "b")),
        (hermes, "qwen3", ParsedReply(None, "a</think>b")),
    ):
        parser = parser_for(thinking(tools, name), "")
        assert parser is not None and parser.parse("a</think>b") == reply
    required = thinking(tool_use([tool], "required"), "deepseek_r1")
    parser = parser_for(required, "")
    assert parser is not None
    reply = parser.parse('Hm</think>\n\n[{"name": "f", "parameters": {}}]')
    assert reply.reasoning == "Hm" and [call.name for call in reply.tool_calls] == ["f"]
    with pytest.raises(ValueError, match="must be one of deepseek_r1, qwen3, got 'x'"):
        thinking(ToolUse(), "x")
    with pytest.raises(ValueError, match="must be one of hermes, mistral, llama3_json, pythonic, got 'x'"):
        tool_use([tool], "auto", parser="x")
