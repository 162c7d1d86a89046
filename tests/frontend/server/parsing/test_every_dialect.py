"""Every dialect with drawn functions: what its grammar allows is read back in any cut, and other text is text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.engine_core.grammar.compile import compile_grammar
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.frontend.server.parsing.call_formats import Format
from pagewire.frontend.server.parsing.constrained import arguments_schema
from pagewire.frontend.server.parsing.deltas import ParsedReply, fold
from pagewire.frontend.server.parsing.dialects import DIALECTS
from pagewire.ipc.wire.params import StructuredOutputsParams
from tests.frontend.server.parsing.test_dialects import FUNCTIONS, MESSAGES, demo_tokenizer

EOS, VOCABULARY, MAX_TOKENS = 2, 4096, 500
FREE = 500  # tokens that are allowed where text is free, at least
SETTINGS: Any = settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
VALUES = st.one_of(
    st.just({"type": "string"}),
    st.just({"type": "integer", "minimum": 0, "maximum": 9999}),
    st.just({"type": "boolean"}),
    st.just({"type": "number"}),
    st.sampled_from([{"enum": ["a", "b c"]}, {"enum": ["<x>", "1", "true"]}, {"const": "Köln"}]).map(
        lambda part: {"type": "string", **part}
    ),
    st.just({"type": "array", "items": {"type": "string"}, "maxItems": 2}),
    st.just({"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}, "required": ["x"]}),
    st.just({"type": ["string", "null"]}),
    st.just({"anyOf": [{"type": "boolean"}, {"type": "null"}]}),
)


@st.composite
def functions(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One to three functions with up to four parameters."""
    drawn = []
    for name in draw(st.permutations(["find", "room.free", "get-it", "f0"]))[: draw(st.integers(1, 3))]:
        names = draw(st.lists(st.sampled_from(["title", "n", "kind", "last_one"]), unique=True, max_size=4))
        properties = {each: draw(VALUES) for each in names}
        required = [each for each in names if draw(st.booleans())]
        drawn.append(
            {"name": name, "parameters": {"type": "object", "properties": properties, "required": required}}
        )
    return drawn


def texts_of(form: Any) -> Iterator[str]:
    """The texts in a format that may follow free text."""
    if isinstance(form, dict):
        for key, value in form.items():
            if key in ("end", "begin", "value", "separator") and isinstance(value, str) and value:
                yield value
            elif key != "json_schema":
                yield from texts_of(value)
    elif isinstance(form, list):
        for each in form:
            yield from texts_of(each)


def allowed_by(matcher: Any) -> list[int]:
    """The tokens that may come next."""
    bits = np.unpackbits(np.frombuffer(bytes(matcher.mask()), dtype=np.uint8), bitorder="little")
    return [int(each) for each in np.flatnonzero(bits[:VOCABULARY])]


def sampled(form: Format, chance: random.Random) -> str | None:
    """A text that the format allows, chosen token by token; None if it has not ended.

    Free text ends with a mark sooner than by chance.
    """
    tokenizer = demo_tokenizer()
    grammar = compile_grammar(StructuredOutputsParams(structural_tag={"format": form}), tokenizer, VOCABULARY)
    ends = [*dict.fromkeys(texts_of(form)), '"']
    token_ids: list[int] = []
    matcher = grammar.matcher([])
    while len(token_ids) < MAX_TOKENS and not matcher.complete:
        allowed = allowed_by(matcher)
        if EOS in allowed and chance.random() < 0.7:
            return tokenizer.decode_str(token_ids)
        if len(allowed) > FREE and chance.random() < 0.4:
            for end in chance.sample(ends, len(ends)):
                try:
                    ended = grammar.matcher(token_ids + tokenizer.tokenize_str(end))
                except GrammarError:
                    continue
                if ended.complete or len(allowed_by(ended)) < FREE:
                    matcher = ended
                    token_ids += tokenizer.tokenize_str(end)
                    break
            if matcher.complete or len(allowed_by(matcher)) < FREE:
                continue
        others = [i for i in allowed if i != EOS]
        if not others:
            return tokenizer.decode_str(token_ids)
        token_ids.append(chance.choice(others))
        matcher.accept(token_ids[-1])
    return tokenizer.decode_str(token_ids) if matcher.complete else None


def read(dialect: str, given: list[dict[str, Any]], pieces: list[str], parallel: bool = True) -> ParsedReply:
    parser = DIALECTS[dialect].new_parser(given, lambda: "0", parallel)
    return fold([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])


def cut(text: str, chance: random.Random) -> list[str]:
    places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 12))))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@SETTINGS
@given(given=functions(), seed=st.integers(0, 2**32), parallel=st.booleans())
def test_what_the_grammar_allows_is_read_back(
    dialect: str, given: list[dict[str, Any]], seed: int, parallel: bool
) -> None:
    chance = random.Random(seed)
    try:
        form = DIALECTS[dialect].whole_calls(given, parallel)
    except ValueError as error:  # some dialects have no way to write some types or names
        assert str(error).startswith("tools: ")
        return
    text = sampled(form, chance)
    if text is None:
        return
    schemas = {function["name"]: arguments_schema(function) for function in given}
    whole = read(dialect, given, [text], parallel)
    assert whole.tool_calls and whole.content is None, text
    for call in whole.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert parallel or len(whole.tool_calls) == 1
    assert read(dialect, given, list(text), parallel) == whole, text
    for _ in range(5):
        assert read(dialect, given, cut(text, chance), parallel) == whole, text
    # The same call behind other text, which is content and does not leak into it.
    before = "Well <b>, 1 < 2: "
    if dialect not in MESSAGES:
        behind = read(dialect, given, cut(before + text, chance), parallel)
        assert behind.tool_calls == whole.tool_calls or dialect == "pythonic", text


@cache
def example(dialect: str) -> str:
    """A text of calls."""
    chance = random.Random(7)
    while (text := sampled(DIALECTS[dialect].whole_calls(FUNCTIONS, True), chance)) is None:
        pass
    return text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dialect", sorted(set(DIALECTS) - set(MESSAGES)))
def test_text_that_looks_like_a_mark_is_text(dialect: str) -> None:
    """A call that is cut before its name, or in which something else stands there, stays as it is."""
    text = example(dialect)
    places = [place for function in FUNCTIONS if (place := text.find(function["name"])) > 0]
    for end in range(1, min(places) if places else 1):
        for written in (f"Hm, {text[:end]}", f"Hm, {text[:end]}?! ok", f"{text[:end]}<<{text[:end]} ok"):
            whole = read(dialect, FUNCTIONS, [written])
            assert (whole.content, whole.tool_calls) == (written, []), written
            assert read(dialect, FUNCTIONS, list(written)) == whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_damaged_calls_are_read_alike_in_any_cut(dialect: str, data: st.DataObject) -> None:
    text = example(dialect)
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    damaged = (
        text[:begin]
        + data.draw(st.sampled_from(["", "<", "</", "{", '"', "]", "\n", "\\", "x"]))
        + text[end:]
    )
    whole = read(dialect, FUNCTIONS, [damaged])
    assert read(dialect, FUNCTIONS, list(damaged)) == whole, damaged
    place = data.draw(st.integers(0, len(damaged)))
    assert read(dialect, FUNCTIONS, [damaged[:place], damaged[place:]]) == whole, damaged
