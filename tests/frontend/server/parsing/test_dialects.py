"""Dialects of tool calls: found in templates, and what a template writes is read back, however it is cut."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

import pagewire.demo
from pagewire.engine_core.grammar.compile import compile_grammar, load_tokenizer
from pagewire.engine_core.grammar.matcher import GrammarError
from pagewire.frontend.server.parsing.choice import tool_use
from pagewire.frontend.server.parsing.deltas import ParsedReply, fold
from pagewire.frontend.server.parsing.detection import found_dialect, found_reasoning, reply_formats
from pagewire.frontend.server.parsing.dialects import DIALECTS
from pagewire.frontend.server.parsing.parser import Parser
from pagewire.frontend.server.parsing.reasoning import REASONING, parser_for, thinking
from pagewire.frontend.text.conversation import Conversation, render_source
from pagewire.ipc.wire.params import StructuredOutputsParams

TEMPLATES = Path(__file__).parent / "templates"
EACH = (
    "{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content }}BEFORE"
    "{% for c in m.tool_calls %}{% set f = c.function %}{% set a = f.arguments %}EACH{% endfor %}{% endfor %}AFTER"
)
NAME, ARGUMENTS = "{{ f.name }}", "{{ a | tojson }}"
OBJECT = '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}"
COMMA = "{{ ', ' if not loop.last }}"
VALUE = "{{ v if v is string else v | tojson }}"
LOOP = "{% for k, v in a.items() %}"


def own(before: str, each: str, after: str) -> str:
    """A template of our own in a model's format."""
    return EACH.replace("BEFORE", before).replace("EACH", each).replace("AFTER", after)


OWN = {
    "deepseek_v3": own(
        "<｜tool▁calls▁begin｜>",
        "{{ '\\n' if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"{NAME}\n```json\n{ARGUMENTS}\n"
        "```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": own(
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": own(
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "minimax_m2": own(
        "<minimax:tool_call>\n",
        f'<invoke name="{NAME}">\n{LOOP}<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n{{% endfor %}}'
        "</invoke>\n",
        "</minimax:tool_call>",
    ),
    "deepseek_v32": own(
        "<｜DSML｜function_calls>\n",
        f'<｜DSML｜invoke name="{NAME}">\n{LOOP}<｜DSML｜parameter name="{{{{ k }}}}" string="'
        f"{{{{ 'true' if v is string else 'false' }}}}\">{VALUE}</｜DSML｜parameter>\n{{% endfor %}}"
        "</｜DSML｜invoke>\n",
        "</｜DSML｜function_calls>",
    ),
    "seed_oss": own(
        "",
        f"<seed:tool_call>\n<function={NAME}>\n{LOOP}<parameter={{{{ k }}}}>{VALUE}</parameter>\n{{% endfor %}}"
        "</function>\n</seed:tool_call>",
        "",
    ),
    "qwen3_coder": own(
        "",
        f"\n<tool_call>\n<function={NAME}>\n{LOOP}<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n{{% endfor %}}"
        "</function>\n</tool_call>",
        "",
    ),
    "granite": own("<|tool_call|>[", OBJECT + COMMA, "]"),
    "phi4_mini": own("<|tool_call|>[", OBJECT + COMMA, "]<|/tool_call|>"),
    "internlm2": own(
        "",
        "<|action_start|><|plugin|>\n" + OBJECT.replace("arguments", "parameters") + "<|action_end|>\n",
        "",
    ),
    "jamba": own("<tool_calls>[", OBJECT + COMMA, "]</tool_calls>"),
    "hermes": own("", f"\n<tool_call>\n{OBJECT}\n</tool_call>", ""),
    "mistral": own("[TOOL_CALLS][", OBJECT + COMMA, "]"),
    "olmo3": own(
        "<function_calls>\n",
        f"{NAME}({LOOP}{{{{ k }}}}={{{{ v | tojson }}}}{COMMA}{{% endfor %}})\n",
        "</function_calls>",
    ),
    "functiongemma": own(
        "",
        f"<start_function_call>call:{NAME}{{{{ '{{' }}}}{LOOP}{{{{ k }}}}:{{% if v is string %}}<escape>{{{{ v }}}}"
        f"<escape>{{% else %}}{{{{ v | tojson }}}}{{% endif %}}{{{{ ',' if not loop.last }}}}{{% endfor %}}"
        "{{ '}' }}<end_function_call>",
        "",
    ),
    "json": own("", "{% if tools %}{% endif %}" + OBJECT + "\n", ""),
}
REAL = {
    "glm4_moe": "glm4moe",
    "gpt_oss": "gptoss",
    "gemma4": "gemma4_v5",
    "lfm2": "lfm2_2_5",
    "hermes": "qwen3",
    "qwen3_coder": "qwen3_6",
    "llama3_json": "llama3_1",
}
SOURCES = [*OWN.items(), *((name, (TEMPLATES / f"{file}.jinja").read_text()) for name, file in REAL.items())]
IDS = [*(f"{name}-own" for name in OWN), *(f"{name}-{file}" for name, file in REAL.items())]
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "find_book",
        "parameters": {
            "type": "object",
            "properties": {
                "title": {"type": "string"},
                "pages": {"type": "integer", "minimum": 1},
                "kind": {"type": "string", "enum": ["novel", "poem"]},
                "scanned": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["title", "pages"],
            "additionalProperties": False,
        },
    },
    {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
SCHEMAS = {function["name"]: function["parameters"] for function in FUNCTIONS}
WORDS = ["a", " ", "Köln", "🦊", "1", "true", "<", "</", "{", "]", ",", ":", "null", "x=1"]
SINGLE = ("gpt_oss", "llama3_json")  # a template of theirs refuses several calls


def parser_of(dialect: str) -> Parser:
    return DIALECTS[dialect].new_parser(FUNCTIONS, lambda: "0", True)


def random_calls(chance: random.Random, dialect: str) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []
    for _ in range(1 if dialect in SINGLE else chance.randint(1, 3)):
        if chance.random() < 0.2:
            calls.append(("clock", {}))
            continue
        book: dict[str, Any] = {
            "title": "".join(chance.choices(WORDS, k=chance.randint(1, 6))).strip() or "x",
            "pages": chance.randint(1, 99),
        }
        if chance.random() < 0.5:
            book["kind"] = chance.choice(["novel", "poem"])
        if chance.random() < 0.5:
            book["scanned"] = chance.random() < 0.5
        if chance.random() < 0.5 and dialect not in ("functiongemma", "gemma4"):
            book["tags"] = chance.choices(["a", "b c", "é"], k=chance.randint(0, 2))
        calls.append(("find_book", book))
    return calls


def rendered(source: str, calls: list[tuple[str, Any]]) -> str:
    """What the template writes for the calls of an assistant."""
    messages = [
        {"role": "user", "content": "QUESTION!"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": f"functions.{name}:{number}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for number, (name, arguments) in enumerate(calls)
            ],
        },
    ]
    text = render_source(source, {}, Conversation(messages, None, {}, "auto", False, False)).text
    return text.partition("QUESTION!")[2]


def calls_of(reply: ParsedReply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


@pytest.mark.parametrize(("dialect", "source"), SOURCES, ids=IDS)
def test_calls_that_a_template_writes_are_read_back(dialect: str, source: str) -> None:
    assert found_dialect(source) == dialect
    chance = random.Random(dialect)
    for _ in range(20):
        calls = random_calls(chance, dialect)
        text = rendered(source, calls)
        assert calls_of(parser_of(dialect).parse(text)) == calls, text


@pytest.mark.parametrize(("dialect", "source"), SOURCES, ids=IDS)
def test_the_result_does_not_depend_on_how_the_text_is_cut(dialect: str, source: str) -> None:
    """Also of texts that end too early, or have something strange in them."""
    chance = random.Random(dialect)
    text = "Well. " + rendered(source, random_calls(chance, dialect))
    place = chance.randrange(len(text))
    for written in (text, text[:place], text[:place] + chance.choice(WORDS) + text[place:]):
        whole = parser_of(dialect).parse(written)
        single = parser_of(dialect)
        deltas = [delta for character in written for delta in single.feed(character)]
        assert fold([*deltas, *single.finish()]) == whole, written
        for cut in range(0, len(written), 3):
            parser = parser_of(dialect)
            assert fold([*parser.feed(written[:cut]), *parser.feed(written[cut:]), *parser.finish()]) == whole


@lru_cache(maxsize=1)
def demo_tokenizer() -> LLTokenizer:
    return load_tokenizer(Path(pagewire.demo.__path__[0]), [2])


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_a_call_once_begun_is_valid(dialect: str) -> None:
    """Any text may come before; after the mark, any allowed token comes next, and what results is a valid call."""
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    form = tool_use(tools, "auto", parser=dialect, constrained=True).text_format
    assert form is not None
    tokenizer = demo_tokenizer()
    structure = StructuredOutputsParams(structural_tag={"format": form()})
    grammar = compile_grammar(structure, tokenizer, 4096)
    begin = BEGINS.get(dialect) or DIALECTS[dialect].signs[0]
    for seed in range(3):
        chance = random.Random(seed)
        matcher = grammar.matcher(tokenizer.tokenize_str(begin))
        token_ids: list[int] = tokenizer.tokenize_str(begin)
        reply = ParsedReply()
        while not matcher.complete and len(token_ids) < 600:
            mask = matcher.mask()
            allowed = [i for i in range(4096) if mask[i // 8] >> i % 8 & 1]
            if 2 in allowed:  # the call may be over
                break
            token_ids.append(chance.choice(allowed))
            matcher.accept(token_ids[-1])
        else:
            continue
        reply = parser_of(dialect).parse(tokenizer.decode_str(token_ids))
        assert reply.tool_calls, tokenizer.decode_str(token_ids)
        for call in reply.tool_calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    if dialect != "gpt_oss":  # its replies begin with a channel
        grammar.matcher(tokenizer.tokenize_str("Just an answer, { and [ and <b>."))
    with pytest.raises(GrammarError):
        grammar.matcher(tokenizer.tokenize_str(begin + "?!"))


BEGINS = {
    "gpt_oss": "<|channel|>commentary to=functions.",
    "minimax_m2": "<minimax:tool_call>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "seed_oss": "<seed:tool_call>",
    "glm4_moe": "<tool_call>",
    "pythonic": "[clock(",
    "llama3_json": '{"name": "find_book", "parameters": ',
    "json": "<|python_tag|>",
}


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
            "Hm.",
            "Hi.",
            [],
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"a": 1}<|call|>',
            "a\nb",
            "Let me see.",
            [("clock", {"a": 1})],
        ),
        (
            ' to=functions.clock<|channel|>commentary json<|message|>{"a": 1}',
            None,
            None,
            [("clock", {"a": 1})],
        ),
        ("Hello <b>.", None, "Hello <b>.", []),
        ("<|channel|>analysis to", None, None, []),
    ],
)
def test_channels(text: str, reasoning: str | None, content: str | None, calls: list[Any]) -> None:
    for pieces in ([text], list(text)):
        parser = parser_of("gpt_oss")
        reply = fold([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])
        assert (reply.reasoning, reply.content, calls_of(reply)) == (reasoning, content, calls)


@pytest.mark.parametrize("name", sorted(set(REASONING) - {"gpt_oss"}))
def test_every_format_of_reasoning(name: str) -> None:
    marks = REASONING[name]
    tool = {"type": "function", "function": {"name": "f"}}
    tools = thinking(tool_use([tool], "auto", parser="hermes"), name)
    assert tools.marks_are_special == marks.special
    text = f'{marks.open}\nHm.\n{marks.close}\n\nHi.\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>'
    for given, prompt in ((text, "Hello"), (text.removeprefix(marks.open), f"Hello{marks.open}\n")):
        parser = parser_for(tools, prompt)
        assert parser is not None
        reply = parser.parse(given)
        assert (reply.reasoning, reply.content, len(reply.tool_calls)) == ("Hm.", "Hi.", 1)


def test_an_answer_between_tags() -> None:
    """Granite 3.3's, which it leaves out where it does not reason or calls a function."""
    tools = thinking(
        tool_use([{"type": "function", "function": {"name": "f"}}], "auto", parser="granite"), "granite_3_3"
    )
    call = '<|tool_call|>[{"name": "f", "arguments": {}}]'
    for text, reasoning, content, calls in (
        ("<think>Hm.</think>\n<response>Hi <b>.</response>", "Hm.", "Hi <b>.", 0),
        ("<think>Hm.</think><response>\nHi.</resp", "Hm.", "Hi.</resp", 0),
        ("<response>Hi.</response>\n", None, "Hi.", 0),
        ("Hi.", None, "Hi.", 0),
        (f"<think>Hm.</think>{call}", "Hm.", None, 1),
    ):
        for pieces in ([text], list(text)):
            parser = parser_for(tools, "Hello")
            assert parser is not None
            reply = fold([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])
            assert (reply.reasoning, reply.content, len(reply.tool_calls)) == (reasoning, content, calls)
    template = "<think></think> tags. Write your response between <response></response>"
    assert found_reasoning(template) == "granite_3_3"


@pytest.mark.parametrize(
    ("file", "reasoning"),
    [
        ("qwen3", "qwen3"),
        ("qwen3_6", "qwen3"),
        ("glm4moe", "glm4"),
        ("gptoss", "gpt_oss"),
        ("gemma4_v5", "gemma4"),
        ("lfm2_2_5", "qwen3"),
        ("llama3_1", None),
    ],
)
def test_reasoning_is_found(file: str, reasoning: str | None) -> None:
    assert found_reasoning((TEMPLATES / f"{file}.jinja").read_text()) == reasoning


def test_the_operator_decides(caplog: pytest.LogCaptureFixture) -> None:
    qwen = (TEMPLATES / "qwen3.jinja").read_text()
    with caplog.at_level("INFO"):
        formats = reply_formats(qwen, "Qwen3ForCausalLM")
    assert (formats.tools, formats.reasoning, formats.auto) == ("hermes", "qwen3", True)
    assert "tool_call_parser: hermes, found" in caplog.text and "reasoning_parser: qwen3" in caplog.text
    formats = reply_formats(qwen, "", tools="mistral", reasoning="none", auto=False)
    assert (formats.tools, formats.reasoning, formats.auto) == ("mistral", None, False)
    assert reply_formats(qwen, "", tools="none").auto is False
    assert reply_formats("", "GptOssForCausalLM").reasoning == "gpt_oss"
    assert reply_formats("{{ messages }}", "X") == reply_formats("", "X")
    with pytest.raises(ValueError, match="needs tool_call_parser"):
        reply_formats("{{ messages }}", "X", auto=True)
