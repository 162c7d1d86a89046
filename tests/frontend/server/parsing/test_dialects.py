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
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.frontend.server.parsing.choice import tool_use
from pagewire.frontend.server.parsing.deltas import ParsedReply, fold
from pagewire.frontend.server.parsing.detection import (
    ReplyFormats,
    found_dialect,
    found_reasoning,
    reply_formats,
)
from pagewire.frontend.server.parsing.dialects import DIALECTS
from pagewire.frontend.server.parsing.element_calls import MARK
from pagewire.frontend.server.parsing.parser import Parser
from pagewire.frontend.server.parsing.reasoning import parser_for, thinking
from pagewire.frontend.server.parsing.reasoning_marks import REASONING
from pagewire.frontend.text.conversation import Conversation, render_source
from pagewire.ipc.wire.params import StructuredOutputsParams

TEMPLATES = Path(__file__).parent / "templates"
EACH = (
    "{{ tools | tojson if tools }}{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content }}BEFORE"
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


def dsml(mark: str, calls: str) -> str:
    """A template of calls with marks such as DeepSeek's, which say of each value whether it is text."""
    return own(
        f"<｜{mark}{calls}>\n",
        f'<｜{mark}invoke name="{NAME}">\n{LOOP}<｜{mark}parameter name="{{{{ k }}}}" string="'
        f"{{{{ 'true' if v is string else 'false' }}}}\">{VALUE}</｜{mark}parameter>\n{{% endfor %}}"
        f"</｜{mark}invoke>\n",
        f"</｜{mark}{calls}>",
    )


def pairs(tag: str, after_name: str) -> str:
    """A call whose arguments are pairs of tags."""
    pair = f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{VALUE}</arg_value>"
    return f"<{tag}>{NAME}{after_name}{LOOP}{pair}{{% endfor %}}</{tag}>"


ELEMENTS = (  # a macro that writes a value of MiniMax M3
    "{% macro elements(v) %}{% if v is mapping %}"
    "{% for k, x in v.items() %}MARK<{{ k }}>{{ elements(x) }}MARK</{{ k }}>{% endfor %}"
    "{% elif v is iterable and v is not string %}{% for x in v %}MARK<item>{{ elements(x) }}MARK</item>"
    "{% endfor %}{% elif v is boolean %}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro %}"
).replace("MARK", MARK)
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
    "kimi_k3": own(
        "<|open|>tools<|sep|>",
        f'<|open|>call tool="{NAME}" index="{{{{ loop.index }}}}"<|sep|>{LOOP}'
        '<|open|>argument key="{{ k }}" type="'
        "{{ 'string' if v is string else 'boolean' if v is boolean else 'number' if v is number else 'array' }}"
        f'"<|sep|>{VALUE}<|close|>argument<|sep|>{{% endfor %}}<|close|>call<|sep|>',
        "<|close|>tools<|sep|>",
    ),
    "deepseek_v4": dsml("DSML｜", "tool_calls"),
    "deepseek_v41": dsml("DSML｜ ", "calls"),
    "gigachat35": dsml("GCML｜", "tool_calls"),
    "gigachat3": own("function call<|role_sep|>\n", "{% if loop.first %}" + OBJECT + "{% endif %}", ""),
    "plamo3": own(
        "<|plamo:begin_tool_requests:plamo|>",
        f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{NAME}<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{ARGUMENTS}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        "<|plamo:end_tool_requests:plamo|>",
    ),
    "step3": own(
        "<｜tool_calls_begin｜>\n",
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{NAME}">\n{LOOP}'
        f'<steptml:parameter name="{{{{ k }}}}">{VALUE}</steptml:parameter>\n{{% endfor %}}'
        "</steptml:invoke><｜tool_call_end｜>\n",
        "<｜tool_calls_end｜>",
    ),
    "cohere_command": own(
        "<|START_ACTION|>[\n",
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "'
        + NAME
        + '", "parameters": '
        + ARGUMENTS
        + "}"
        "{{ ',\n' if not loop.last }}",
        "\n]<|END_ACTION|>",
    ),
    "apertus": own("<|tools_prefix|>[", '{"' + NAME + '": ' + ARGUMENTS + "}" + COMMA, "]<|tools_suffix|>"),
    "longcat": own("", f"<longcat_tool_call>{OBJECT}</longcat_tool_call>\n", ""),
    "dots": own(
        "<dots_function_call>\n",
        f'<invoke name="{NAME}">\n{LOOP}<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n{{% endfor %}}'
        "</invoke>\n",
        "</dots_function_call>",
    ),
    "minicpm5": own(
        "",
        f'<function name="{NAME}">{LOOP}<param name="{{{{ k }}}}">{{% if v is string %}}<![CDATA[{{{{ v }}}}]]>'
        "{% else %}{{ v | tojson }}{% endif %}</param>{% endfor %}</function>\n",
        "",
    ),
    "k2_horizon": own(
        "<ifm|tool_calls>\n",
        f"<ifm|tool_call>{NAME}\n{LOOP}<ifm|arg_key>{{{{ k }}}}</ifm|arg_key>\n<ifm|arg_value>{VALUE}"
        "</ifm|arg_value>\n{% endfor %}</ifm|tool_call>\n",
        "</ifm|tool_calls>",
    ),
    "iquest_q1": own("", pairs("iquest_tool_call", ""), ""),
    "glm47": own("", pairs("tool_call", ""), ""),
    "hy_v3": own("<tool_calls>\n", pairs("tool_call", "<tool_sep>\n") + "\n", "</tool_calls>"),
    "hy_v4": own("<tool_calls>", pairs("tool_call", ""), "</tool_calls>"),
    "inkling": own(
        "",
        f"<|message_model|>{NAME}<|content_invoke_tool_json|>"
        + OBJECT.replace('"arguments"', '"args"')
        + "<|end_message|>",
        "<|content_model_end_sampling|>",
    ),
    "muse_glimmer": own(
        "{# to=self #}",
        f'<|start|>assistant to={NAME}<|message|><atem:function_calls>\n<atem:invoke name="{NAME}">\n{LOOP}'
        f'<atem:parameter name="{{{{ k }}}}">{VALUE}</atem:parameter>\n{{% endfor %}}</atem:invoke>\n'
        "</atem:function_calls><|eom|>",
        "",
    ),
    "minimax_m3": ELEMENTS
    + own(
        f"{MARK}<tool_call>\n",
        f'{MARK}<invoke name="{NAME}">\n{LOOP}{MARK}<{{{{ k }}}}>{{{{ elements(v) }}}}{MARK}</{{{{ k }}}}>\n'
        f"{{% endfor %}}{MARK}</invoke>\n",
        f"{MARK}</tool_call>",
    ),
    "granite_20b_fc": own("", f"<function_call> {OBJECT}\n", ""),
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
MESSAGES = ("gpt_oss", "inkling", "muse_glimmer")  # replies are messages, which begin with a header
SINGLE = ("gpt_oss", "llama3_json", "gigachat3")  # a template of theirs refuses several calls


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
    begin = BEGINS.get(dialect) or form()["triggers"][0]
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
    if dialect not in MESSAGES:
        grammar.matcher(tokenizer.tokenize_str("Just an answer, { and [ and <b>."))
    with pytest.raises(GrammarError):
        grammar.matcher(tokenizer.tokenize_str(begin + "?!"))


BEGINS = {
    "inkling": "find_book<|content_invoke_tool_json|>",
    "muse_glimmer": " to=find_book<|message|><atem:function_calls>",
    "gpt_oss": "<|channel|>commentary to=functions.",
    "minimax_m2": "<minimax:tool_call>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "seed_oss": "<seed:tool_call>",
    "glm4_moe": "<tool_call>",
    "pythonic": "[clock(",
    "llama3_json": '{"name": "find_book", "parameters": ',
    "json": "<|python_tag|>",
    "prompted": "<tool_call>",
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


THOUGHT_AND_CALL: dict[
    str, tuple[str, ...]
] = {  # by dialect: reasoning with a call in it, an answer with one, a call
    "inkling": (
        "<|message_model|><|content_thinking|>{}<|end_message|>",
        "<|message_model|><|content_text|>{}<|end_message|>",
        '<|message_model|>clock<|content_invoke_tool_json|>{"name": "clock", "args": {}}<|end_message|>',
    ),
    "muse_glimmer": (
        " to=self<|message|>{}<|eom|>",
        "<|start|>assistant to=user<|message|>{}<|eom|>",
        '<|start|>assistant to=clock<|message|><atem:function_calls>\n<atem:invoke name="clock">\n</atem:invoke>\n'
        "</atem:function_calls><|eot|>",
    ),
}


@pytest.mark.parametrize("dialect", THOUGHT_AND_CALL)
def test_messages_say_what_they_are(dialect: str) -> None:
    """What looks like a call in reasoning or answer is text; any of them may be missing, or cut short."""
    thought, answer, call = THOUGHT_AND_CALL[dialect]
    quoted = call.partition("<|message|>")[2].partition("<|eot|>")[0] or '{"name": "clock", "args": {}}'
    for text, reasoning, content, calls in (
        (thought.format("Hm.") + answer.format("Hi <b>.") + call, "Hm.", "Hi <b>.", 1),
        (thought.format(quoted) + answer.format(quoted), quoted, quoted, 0),
        (
            thought.format("a") + thought.format("b").replace(" to=", "<|start|>assistant to=") + call + call,
            "a\nb",
            None,
            2,
        ),
        (
            thought.format("Hm.")[:-4],
            "Hm." + thought.format("")[-len(thought.partition("}")[2]) : -4],
            None,
            0,
        ),
        (call[: call.index("clock") + 3], None, None, 0),
        ("Hello <b>.", None, "Hello <b>.", 0),
    ):
        for pieces in ([text], list(text)):
            parser = parser_of(dialect)
            reply = fold([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])
            assert (reply.reasoning, reply.content, len(reply.tool_calls)) == (reasoning, content, calls), (
                text
            )
    tools = thinking(tool_use(None, None), dialect)  # and without tools
    parser = parser_for(tools, "Hello")
    assert parser is not None
    reply = parser.parse(thought.format("Hm.") + answer.format("Hi."))
    assert (reply.reasoning, reply.content) == ("Hm.", "Hi.")


def test_elements_in_elements() -> None:
    """Of MiniMax M3: objects and lists, and texts whose schema says what they are."""
    text = """Well. MARK<tool_call>
MARK<invoke name="order">
MARK<user>42MARK</user>
MARK<note> 4 </b>
MARK</note>MARK<items>
MARK<item>MARK<sku>1MARK</sku>MARK<tags>MARK</tags>MARK</item>
MARK<item>MARK<sku>x MARK</sku>MARK<n>2MARK</n>MARK</item>
MARK</items>MARK<free>MARK<item>1MARK</item>MARK</free>MARK<gone>nullMARK</gone>
MARK</invoke>
MARK</tool_call>""".replace("MARK", MARK)
    line: dict[str, Any] = {
        "type": "object",
        "properties": {"sku": {"type": "string"}, "n": {"type": "integer"}, "tags": {"type": "array"}},
    }
    properties = {
        "user": {"type": "integer"},
        "note": {"type": "string"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "gone": {"type": ["boolean", "null"]},
    }
    function = {
        "name": "order",
        "parameters": {"type": "object", "properties": properties, "$defs": {"line": line}},
    }
    for pieces in ([text], list(text)):
        parser = DIALECTS["minimax_m3"].new_parser([function], lambda: "0", True)
        reply = fold([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])
        assert reply.content == "Well." and calls_of(reply) == [
            (
                "order",
                {
                    "user": 42,
                    "note": " 4 </b>\n",
                    "items": [{"sku": "1", "tags": []}, {"sku": "x ", "n": 2}],
                    "free": [1],
                    "gone": None,
                },
            )
        ]
    deep = f"{MARK}<a>" * 5000
    reply = parser_of("minimax_m3").parse(f'{MARK}<tool_call>{MARK}<invoke name="clock">{deep}')
    assert reply.tool_calls[0].name == "clock"
    for part in ({"type": "object"}, {"type": ["array", "object"]}, {"type": "array", "maxItems": 65}):
        parameters = {"type": "object", "properties": {"a": part}}
        with pytest.raises(ValueError, match="tools: "):
            DIALECTS["minimax_m3"].whole_calls([{"name": "f", "parameters": parameters}], True)


@pytest.mark.parametrize("name", [name for name, marks in REASONING.items() if marks.reply is None])
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
    with caplog.at_level("INFO"):
        formats = reply_formats("{{ messages }}", "X")
    assert (formats.tools, formats.reasoning, formats.auto, formats.prompts_tools) == (
        "prompted",
        None,
        True,
        True,
    )
    assert "tool_call_parser: prompted, since the chat template shows no tools" in caplog.text
    assert reply_formats("{{ tools }}{{ messages }}", "X").tools == "json"
    assert reply_formats("{{ messages }}<tool_call>{{ xml_tools }}", "X").tools == "prompted"
    assert reply_formats("", "X") == reply_formats("{{ messages }}", "X", tools="none") == ReplyFormats()
    with pytest.raises(ValueError, match="needs a chat template"):
        reply_formats("", "X", auto=True)
