"""Tool calls in replies: every format as models write it, split and damaged anywhere."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.frontend.server.parsing.constrained import NamedCall, RequiredCalls
from pagewire.frontend.server.parsing.deltas import (
    Arguments,
    CallStart,
    ContentDelta,
    Delta,
    ParsedReply,
    fold,
)
from pagewire.frontend.server.parsing.dialects import HERMES
from pagewire.frontend.server.parsing.llama3_json import Llama3JSON
from pagewire.frontend.server.parsing.marked_calls import MarkedCalls
from pagewire.frontend.server.parsing.mistral import Mistral
from pagewire.frontend.server.parsing.parser import Parser
from pagewire.frontend.server.parsing.pythonic import BARE
from pagewire.frontend.server.parsing.pythonic import Pythonic as PythonicCalls

Call = tuple[str, str]
Hermes = partial(MarkedCalls, HERMES)
Pythonic = partial(PythonicCalls, BARE)


def named_call(new_id: Callable[[], str]) -> NamedCall:
    return NamedCall("f", new_id)


KINDS: list[Callable[[Callable[[], str]], Parser]] = [
    Hermes,
    Mistral,
    Llama3JSON,
    Pythonic,
    RequiredCalls,
    named_call,
]


def new_parser(kind: Callable[..., Parser], **options: Any) -> Parser:
    """A parser with the ids "0", "1", ..."""
    ids = map(str, itertools.count())
    return kind(lambda: next(ids), **options)


def streamed(parser: Parser, pieces: list[str]) -> list[Delta]:
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def calls_of(reply: ParsedReply) -> list[Call]:
    return [(call.name, call.arguments) for call in reply.tool_calls]


EXAMPLES: list[tuple[Callable[..., Parser], str, str | None, list[Call]]] = [
    (Hermes, "Hello!\n", "Hello!\n", []),
    (Hermes, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, [("f", '{"a": 1}')]),
    (
        Hermes,
        'So:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"x": [{}]}, "name": "g-1.x"}\n</tool_call>\nDone. ',
        "So:\n\n\nDone.",
        [("f", "{}"), ("g-1.x", '{"x": [{}]}')],
    ),
    (
        Hermes,
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\"{[", "é": "\\u00e9"}}</tool_call>',
        None,
        [("f", '{"a": "}</tool_call>\\"{[", "é": "\\u00e9"}')],
    ),
    (Hermes, '<tool_call>{"id": "x", "name": "f", "parameters": {}, "z": {"}": []}} ', None, [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}')]),
    # A string of arguments is the call's, whatever is in it.
    (Hermes, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', None, [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', None, [("f", "[1]")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": "Köln"}</tool_call>', None, [("f", "Köln")]),
    (Hermes, '<tool_call>{"arguments": "{\\"a\\": nope}", "name": "f"}</tool_call>', None, [("f", '{"a": nope}')]),
    (
        Hermes,
        '<tool_call>{"name": "f", "arguments": "' + "[" * 100_000 + '"}</tool_call>',
        None,
        [("f", "[" * 100_000)],
    ),
    # The closing tag ends arguments whose brackets are open.
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": {"": [1</tool_call>', None, [("f", '{"a": {"": [1]}}')]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": "{["\n</tool_call> so', " so", [("f", '{"a": "{["\n}')]),
    # Arguments that are cut short or not JSON are as the model wrote them.
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": "\\', None, [("f", '{"a": "\\')]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": nope}}</tool_call>', None, [("f", '{"a": nope}')]),
    (
        Hermes,
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (Hermes, '<tool_call>{"name": "f", "arguments": {}</tool_call> and', " and", [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {}}} </tool_call>', "} </tool_call>", [("f", "{}")]),
    # Text that is not a call, though it begins like one.
    *(
        (Hermes, text, text, [])
        for text in (
            "a <tool_call> b",
            "<tool_call></tool_call>",
            "<tool_call>\n[]\n</tool_call> ",
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "{\\"\\ud800\\": 1}"}</tool_call>',
            '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
            "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
            '<tool_call>{"function": {"name": "f"}}</tool_call>',
            '<tool_call>{"arguments": {"a": 1}}</tool_call>',
            '<tool_call>{"arguments": {"a": 1</tool_call>, "name": "f"}',
            '<tool_call>{"name": "f", "argum',
            '<tool_call>{"name": "' + "f" * 1000,
            "a < b, <tool>, <tool_cal",
            "<tool_call>" * 3,
        )
    ),
    (Mistral, "Hello [TOOL", "Hello [TOOL", []),
    (
        Mistral,
        'Well [TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}, "id": "x"}] ok',
        "Well  ok",
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
    (
        Mistral,
        '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]h[ARGS]{"b',
        None,
        [("f", '{"a": 1}'), ("g", "{}"), ("h", '{"b')],
    ),
    (Mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"na', ' {"na', [("f", "{}")]),
    (Mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {}} {"n', ' {"n', [("f", "{}")]),
    # A list behind other text.
    (
        Mistral,
        'So [TOOL_CALLS] I call f: [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}] ok',
        "So  I call f:  ok",
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    (Mistral, '[TOOL_CALLS] [1] a[0] [ {"name": "f", "arguments": {"a', " [1] a[0]", [("f", '{"a')]),
    (
        Mistral,
        '[TOOL_CALLS] no [TOOL_CALLS] [{"name": "f", "arguments": {}}]',
        "[TOOL_CALLS] no",
        [("f", "{}")],
    ),
    *((Mistral, text, text, []) for text in ('[TOOL_CALLS] a [{"name": 3}]', "[TOOL_CALLS] a [TOOL_CALLS] [{}]")),
    *((Mistral, text, text, []) for text in ("[TOOL_CALLS] what", "[TOOL_CALLS][]", "[TOOL_CALLS]f()", "[TOOL")),
    (Llama3JSON, '{"name": "f", "parameters": {"a": {}}}', None, [("f", '{"a": {}}')]),
    (
        Llama3JSON,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"type": "function", "name": "g", "arguments": {}}',
        None,
        [("f", "{}"), ("g", "{}")],
    ),
    (Llama3JSON, 'So:\n {"name": "f", "parameters": {}}\n\nDone', "So:\n \n\nDone", [("f", "{}")]),
    (Llama3JSON, '{"name": "f", "parameters": {}}; done', "; done", [("f", "{}")]),
    (Llama3JSON, 'So: {"name": "f", "parameters": { }} ok?', "So:  ok?", [("f", "{ }")]),
    (Llama3JSON, 'x <|python_tag|> {"name": "f", "parameters": {"a', "x", [("f", '{"a')]),
    *(
        (Llama3JSON, text, text, [])
        for text in (
            '{"name": "Bob"}',
            '{"name": "Bob", "age": 4}',
            '{"name": "f", "parameters": {invalid json}',
            "{\"name\": \"f\", \"parameters\": {'a': 1}}",
            '{"parameters": {"a": nope}, "name": "f"}',
            '{"name": "f", "parameters": {',
            "{\n",
            "{}\n{{\n{",
            "<|python_tag|>import math",
            "<|python",
        )
    ),
    (
        Pythonic,
        '[f(a=1, b="x)]", c={"k": [True, None, (1.5,)]}), g(), h.i(x=false, y=null, z=-1)]',
        None,
        [
            ("f", '{"a": 1, "b": "x)]", "c": {"k": [true, null, [1.5]]}}'),
            ("g", "{}"),
            ("h.i", '{"x": false, "y": null, "z": -1}'),
        ],
    ),
    (Pythonic, "So:\n[f(a='é\\'\\n')] Done", "So:\n Done", [("f", '{"a": "é\'\\n"}')]),
    (Pythonic, 'x<|python_start|>[f(a="""b"c""", d="",),]<|python_end|>', "x", [("f", '{"a": "b\\"c", "d": ""}')]),
    (Pythonic, "[f(a='\\d')]", None, [("f", '{"a": "\\\\d"}')]),
    (Pythonic, "[f(a=1)", None, [("f", '{"a": 1}')]),
    # A grammar of JSON's numbers allows them, and JSON has no word for infinity.
    (Pythonic, "[f(a=1e999, b=[-1E999])]", None,
     [("f", '{"a": 1.7976931348623157e+308, "b": [-1.7976931348623157e+308]}')]),
    (Pythonic, "[f(a=1), g(b=", " g(b=", [("f", '{"a": 1}')]),
    (Pythonic, "[f(a=1), 2]", " 2]", [("f", '{"a": 1}')]),
    # Calls with other arguments than literals are content; those around them are calls.
    (Pythonic, "[f(a=b), g(a=1)] ok", "[f(a=b) ok", [("g", '{"a": 1}')]),
    (Pythonic, "[f(1), g(x=2), h(*y), i()]", "[f(1) h(*y)", [("g", '{"x": 2}'), ("i", "{}")]),
    (Pythonic, "[f(a=1), g(b(2)),]<|python_end|>", " g(b(2))", [("f", '{"a": 1}')]),
    *(
        (Pythonic, text, text, [])
        for text in (
            "[text](url) [f(a=1)]",
            "[1, 2]",
            "[]",
            "[f(1)]",
            "[f(1), g(2),]<|python_end|> ok",
            "[f(a=1) + 2]",
            "[f(a=1)(b=2)]",
            "[f(**{'a': 1})]",
            "[f(a={**{}})]",
            "[f(a=b)]",
            "[f(a=__import__('os').system('true'))]",
            "[f(a={1})]",
            "[f(a=b'x')]",
            "[f(a=...)]",
            "[f(a='\\ud800')]",
            "[f(a=1, a=2)]",
            "[f(a='\n')]",
            "[f(a=" + "9" * 5000 + ")]",
            "[f(a=" + "[" * 5000 + "]" * 5000 + ")]",
            "[f(a=" + "-" * 50_000 + "1)]",
            "[f(a=" + "1+" * 50_000 + "1)]",
            "[f(a='",
            "[f(a='''b''",
            "[f(a",
        )
    ),
    (RequiredCalls, ' [{"name": "f", "parameters": {"a": 1}},{"name": "g", "parameters": {}}]', None,
     [("f", '{"a": 1}'), ("g", "{}")]),
    (RequiredCalls, '[{"name": "f", "parameters": {"a', None, [("f", '{"a')]),
    (RequiredCalls, '[{"name": "f"', '[{"name": "f"', []),
    (RequiredCalls, '[{"name": "f", "parameters": {}}, {"name": "g"', None, [("f", "{}")]),
    (RequiredCalls, '[{"name": "f", "parameters": {}}, ', None, [("f", "{}")]),
    (RequiredCalls, '[{"name": "f", "parameters": {}}] x', " x", [("f", "{}")]),
    (RequiredCalls, "I cannot", "I cannot", []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "content", "calls"), EXAMPLES)
def test_examples(kind: type[Parser], text: str, content: str | None, calls: list[Call]) -> None:
    reply = new_parser(kind).parse(text)
    assert (reply.content, calls_of(reply)) == (content, calls)
    pieces = [text] if len(text) > 1000 else list(text)
    assert fold(streamed(new_parser(kind), pieces)) == reply


def test_the_arguments_of_a_named_call_are_all_the_text() -> None:
    assert calls_of(new_parser(named_call).parse('{"a": 1} ')) == [("f", '{"a": 1} ')]
    assert calls_of(new_parser(named_call).parse("")) == [("f", "")]


# ---------------------------------------------------------------- any text, cut anywhere

PIECES = """
    <tool_call> </tool_call> [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> <|python_start|> <|python_end|> { } [ ]
    ( ) , ; : = " ' \\ "name" "arguments" "parameters" "id" "f" {"name":"f","arguments":{
    {"name":"g","parameters":{}} f(a=1) [f(a='x'), g( null true \\" \\u00e9 \\ud83d <tool_ < | é 世 🦊
"""
WORDS = st.sampled_from([*PIECES.split(), "\n", " ", "\n\n", " \t"])
TEXTS = st.lists(st.one_of(WORDS, WORDS, WORDS, st.text(max_size=3)), max_size=30).map("".join)


def cut(text: str, seed: int) -> list[str]:
    """Return the text in pieces, some of them empty."""
    chance = random.Random(seed)
    places = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, len(text) + 2)))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=TEXTS, seed=st.integers())
def test_the_reply_does_not_depend_on_how_the_text_is_split(
    kind: Callable[..., Parser], text: str, seed: int
) -> None:
    reply = new_parser(kind).parse(text)
    deltas = streamed(new_parser(kind), cut(text, seed))
    assert fold(deltas) == reply
    starts = [delta.index for delta in deltas if isinstance(delta, CallStart)]
    assert starts == list(range(len(reply.tool_calls)))
    assert all(delta.text for delta in deltas if isinstance(delta, (ContentDelta, Arguments)))


@pytest.mark.parametrize("kind", KINDS[:-1])
@settings(deadline=None)
@given(text=TEXTS)
def test_text_that_is_not_a_call_is_content(kind: Callable[..., Parser], text: str) -> None:
    reply = new_parser(kind).parse(text)
    content = reply.content or ""
    if not reply.tool_calls:
        assert content == text
    rest = iter(text)
    assert all(character in rest for character in content)  # in order: nothing is made up
    if kind is not Pythonic:
        arguments = [call.arguments for call in reply.tool_calls]
        strings = [json_string(part) for part in re.findall(r'"(?:[^"\\]|\\.)*"', text, re.DOTALL)]
        assert all(
            part in text or part == "{}" or part in strings or part.rstrip("]}") in text for part in arguments
        )


def json_string(text: str) -> str | None:
    """The string that JSON text encodes; None if it is invalid."""
    try:
        value: str = json.loads(text, strict=False)
    except ValueError:
        return None
    return value


# ---------------------------------------------------------------- well-formed replies and their parts

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("None", "True", "False") and name.isidentifier() and not keyword(name)
)
STRINGS = st.one_of(st.text(max_size=6), WORDS)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), STRINGS
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
PROSE = st.text("abc é世.,!?<>\n ", max_size=12).filter(lambda text: "<tool" not in text)
LAYOUT: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"indent": st.sampled_from([None, 2]), "ensure_ascii": st.booleans()}
)


def keyword(name: str) -> bool:
    import keyword as words

    return words.iskeyword(name)


def written(call: tuple[str, dict[str, Any]], arguments: str, layout: dict[str, Any]) -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, **layout)


def hermes_text(calls: Any, before: str, after: str, layout: Any) -> tuple[str, str]:
    inside = "\n".join(f"<tool_call>\n{written(c, 'arguments', layout)}\n</tool_call>" for c in calls)
    return before + inside + after, before + "\n" * (len(calls) - 1) + after


def mistral_text(calls: Any, before: str, after: str, layout: Any) -> tuple[str, str]:
    inside = ", ".join(written(c, "arguments", layout) for c in calls)
    return f"{before}[TOOL_CALLS] [{inside}]{after}", before + after


def llama_text(calls: Any, before: str, after: str, layout: Any) -> tuple[str, str]:
    before = before and before + "\n"
    inside = "; ".join(written(c, "parameters", layout) for c in calls)
    return before + inside + after, before + after


def python_text(calls: Any, before: str, after: str, layout: Any) -> tuple[str, str]:
    before = before and before + "\n"
    inside = ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in calls)
    return f"{before}[{inside}]{after}", before + after


def required_text(calls: Any, before: str, after: str, layout: Any) -> tuple[str, str]:
    return "[" + ",".join(written(c, "parameters", layout) for c in calls) + "]", ""


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        (Hermes, hermes_text),
        (Mistral, mistral_text),
        (Llama3JSON, llama_text),
        (Pythonic, python_text),
        (RequiredCalls, required_text),
    ],
)
@settings(deadline=None)
@given(calls=CALLS, before=PROSE, after=PROSE, layout=LAYOUT, seed=st.integers())
def test_well_formed_replies(
    kind: type[Parser],
    write: Callable[..., tuple[str, str]],
    calls: Any,
    before: str,
    after: str,
    layout: dict[str, Any],
    seed: int,
) -> None:
    text, prose = write(calls, before, after, layout)
    reply = fold(streamed(new_parser(kind), cut(text, seed)))
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == calls
    assert reply.content == (prose.rstrip() or None)
    assert [call.id for call in reply.tool_calls] == [str(index) for index in range(len(calls))]
    # Cut short, a reply is the beginning of the whole one.
    end = seed % (len(text) + 1)
    part = new_parser(kind).parse(text[:end])
    for short, whole in zip(part.tool_calls, reply.tool_calls, strict=False):
        assert short.name == whole.name and whole.arguments.startswith(short.arguments)
    single = new_parser(kind, parallel=False).parse(text)
    assert single.tool_calls == reply.tool_calls[:1] and single.content == reply.content


@settings(deadline=None)
@given(calls=CALLS, before=PROSE, layout=LAYOUT)
def test_hermes_agrees_with_a_pattern_on_the_whole_text(calls: Any, before: str, layout: Any) -> None:
    calls = [
        (name, {k: v for k, v in args.items() if "</tool_call>" not in json.dumps(v)}) for name, args in calls
    ]
    text, _ = hermes_text(calls, before, "", layout)
    bodies = [json.loads(part) for part in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    reply = new_parser(Hermes).parse(text)
    assert [(c["name"], c["arguments"]) for c in bodies] == [(n, json.loads(a)) for n, a in calls_of(reply)]


# ---------------------------------------------------------------- as early as is safe


def test_content_comes_at_once_and_arguments_as_they_are_written() -> None:
    parser = new_parser(Hermes)
    assert parser.feed("Look <") == [ContentDelta("Look")]
    assert parser.feed("b> <tool") == [ContentDelta(" <b>")]
    assert parser.feed('_call>\n{"name": "f", "argu') == []
    assert parser.feed('ments": {"a') == [CallStart(0, "0", "f"), Arguments(0, '{"a')]
    assert parser.feed('": 1') == [Arguments(0, '": 1')]
    assert parser.feed('}}</tool_call>\n<tool_call>{"name": "g"}') == [
        Arguments(0, "}"),
        CallStart(1, "1", "g"),
        Arguments(1, "{}"),
    ]
    assert parser.finish() == []
    assert parser.finish() == []


def test_calls_of_python_come_one_by_one() -> None:
    parser = new_parser(Pythonic)
    assert parser.feed("[see]") == [ContentDelta("[see]")]
    parser = new_parser(Pythonic)
    assert parser.feed("[f(a=1") == []
    assert parser.feed("), g(") == [CallStart(0, "0", "f"), Arguments(0, '{"a": 1}')]
    assert parser.feed("h)") == [ContentDelta(" g(h)")]


def test_a_constrained_reply_is_calls_from_the_start() -> None:
    parser = new_parser(named_call)
    assert parser.feed("{") == [CallStart(0, "0", "f"), Arguments(0, "{")]
    assert parser.feed('"a') == [Arguments(0, '"a')]
    parser = new_parser(RequiredCalls)
    assert parser.feed('[{"name": "f", "parameters": {"a": ') == [
        CallStart(0, "0", "f"),
        Arguments(0, '{"a": '),
    ]


def test_call_ids_have_the_form_that_templates_accept() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    ids = [call.id for call in Mistral().parse(text).tool_calls]
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", name) for name in ids) and len(set(ids)) == 2
    (call,) = Llama3JSON().parse('{"name": "f", "parameters": {}}').tool_calls
    assert re.fullmatch(r"call_[0-9a-f]{24}", call.id)
