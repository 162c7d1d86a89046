"""Grammars: compiled beside the loop, cached, limited, and refused in words."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

import pagewire.demo
from pagewire.engine_core.grammar.compilation import Compilation
from pagewire.engine_core.grammar.compile import compile_grammar, load_tokenizer
from pagewire.engine_core.grammar.matcher import Grammar
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.grammar.prover import ConfinedProver, Proof
from pagewire.engine_core.grammar.schema import json_schema
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.errors import EngineBusyError, EngineStalledError
from pagewire.ipc.host.confined import JobTimeoutError
from pagewire.ipc.options.structured_outputs import StructuredOutputsConfig
from pagewire.ipc.wire.params import StructuredOutputsParams

FOLDER = Path(pagewire.demo.__path__[0])
EOS = 2
VOCAB = 4100  # a little more than the tokenizer has
WAIT = 20.0


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(FOLDER, [EOS])


@pytest.fixture
def compiled(tokenizer: LLTokenizer) -> Callable[..., Grammar]:
    def compile_it(**structure: Any) -> Grammar:
        return compile_grammar(StructuredOutputsParams(**structure), tokenizer, VOCAB)

    return compile_it


@pytest.fixture
def accepts(tokenizer: LLTokenizer, compiled: Callable[..., Grammar]) -> Callable[..., bool]:
    """Is a text, as a whole, what a structure asks for?"""

    def accepted(text: str, **structure: Any) -> bool:
        try:
            matcher = compiled(**structure).matcher(tokenizer.tokenize_str(text))
        except GrammarError as error:
            assert "does not fit" in str(error), error
            return False
        return matcher.complete or allowed(matcher.mask(), EOS)

    return accepted


def allowed(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


@pytest.fixture(scope="module")
def prover() -> Iterator[ConfinedProver]:
    prover = ConfinedProver(FOLDER, [EOS], VOCAB)
    Woken.prover = prover
    yield prover
    prover.close()


@pytest.fixture(autouse=True)
def _prover_for_all(prover: ConfinedProver) -> None:
    """One process for all tests, as for all requests of a core."""


class Woken:
    """Grammars whose compilations can be waited for."""

    prover: ConfinedProver

    def __init__(self, load: Callable[[], LLTokenizer], **options: Any) -> None:
        self.event = threading.Event()
        options = {"seconds": WAIT, "open_prover": lambda: self.prover} | options
        self.grammars = Grammars(load, VOCAB, wake=self.event.set, **options)

    def compile(self, **structure: Any) -> Compilation:
        compilation = self.grammars.submit(StructuredOutputsParams(**structure), "", time.monotonic())
        while compilation.outcome is None:
            assert self.event.wait(WAIT)
            self.event.clear()
        return compilation


def test_a_mask_has_a_bit_per_token_of_the_model(
    compiled: Callable[..., Grammar], tokenizer: LLTokenizer
) -> None:
    matcher = compiled(choice=["yes", "no"]).matcher()
    mask = matcher.mask()
    assert len(mask) == -(-VOCAB // 32) * 4
    tokens = {tokenizer.decode_str([i]) for i in range(VOCAB) if allowed(mask, i)}
    assert tokens == {text[:n] for text in ("yes", "no") for n in (1, 2, 3)} & tokens
    assert {"y", "n"} <= tokens and not allowed(mask, EOS)


def test_a_matcher_goes_on_from_tokens(compiled: Callable[..., Grammar], tokenizer: LLTokenizer) -> None:
    digits = compiled(regex="[0-9]{2,3}")
    one, two = tokenizer.tokenize_str("1")[0], tokenizer.tokenize_str("2")[0]
    matcher = digits.matcher([one])
    assert not allowed(matcher.mask(), EOS) and allowed(matcher.mask(), two)
    matcher.accept(two)
    assert allowed(matcher.mask(), EOS) and not matcher.complete
    assert not allowed(digits.matcher([one, two], ignore_eos=True).mask(), EOS)
    assert digits.matcher([one, two]).mask() == matcher.mask()
    matcher.accept(EOS)
    assert matcher.complete
    assert digits.matcher([one, two, one]).complete
    assert not digits.matcher().complete  # each has a state of its own


def test_a_token_that_does_not_fit_is_an_error_for_good(
    compiled: Callable[..., Grammar], tokenizer: LLTokenizer
) -> None:
    matcher = compiled(regex="[0-9]+").matcher()
    with pytest.raises(GrammarError, match="token 75 does not fit the grammar") as caught:
        matcher.accept(75)
    assert "<state>" not in str(caught.value) and "<grammar>" not in str(caught.value)
    with pytest.raises(GrammarError):
        matcher.accept(tokenizer.tokenize_str("1")[0])
    with pytest.raises(GrammarError):
        compiled(regex="[0-9]+").matcher([75])


def test_settings_of_the_engine_hold_for_every_schema(tokenizer: LLTokenizer) -> None:
    """Requests that ask for the same share the compiled grammar; a request's own pattern goes first."""
    given = {"disable_any_whitespace": True, "disable_additional_properties": True}
    settings = StructuredOutputsConfig.read(given)
    woken, schema = Woken(lambda: tokenizer, defaults=settings), {"type": "object"}
    strict = woken.compile(json=schema)
    assert woken.compile(json=schema, **given) is strict
    assert woken.compile(regex="a").outcome is not None
    kept = StructuredOutputsParams(json=schema, whitespace_pattern=" ?")
    assert settings.completed(kept) == StructuredOutputsParams(
        json=schema, whitespace_pattern=" ?", disable_additional_properties=True
    )
    with pytest.raises(ValueError, match="unknown field of structured_outputs_config 'disable_any'"):
        StructuredOutputsConfig.read({"disable_any": True})


@pytest.mark.parametrize(
    ("good", "bad", "structure"),
    [
        ("123", "12", {"regex": "[0-9]{3}"}),
        ("123", "1234", {"regex": "^[0-9]{3}$"}),
        ("dark blue", "dark", {"choice": ["red", "dark blue"]}),
        ('"\\\n😀', "x", {"choice": ['"\\\n😀', "\x00\u2028"]}),
        ("abcd", "abe", {"grammar": 'root ::= "a" rest\nrest ::= "b" [c-d]*'}),
        ("abcd", "abe", {"grammar": 'start: "a" REST\nREST: /b[cd]*/'}),
        ("abcd", "abe", {"grammar": '?start: "a" rest\n?rest: "b" ("c" | "d")*'}),
        ('{"a": [1, {"b": null}]}', "[]", {"json_object": True}),
        ('{"a": 1}', '{"a": "1"}', {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}),
    ],
)
def test_every_kind(accepts: Callable[..., bool], good: str, bad: str, structure: dict[str, Any]) -> None:
    assert accepts(good, **structure) and not accepts(bad, **structure)


def test_tagged_text(accepts: Callable[..., bool]) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tag = {
        "structures": [
            {"begin": "<f=a>", "schema": schema, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "array"}, "end": ""},
        ],
        "triggers": ["<f="],
    }
    for text in ("just text", "", 'hello <f=a>{"x":1}</f> and <f=b>[1] more', "a < b", "line\nline"):
        assert accepts(text, structural_tag=tag), text
    for text in ("<f=c>", '<f=a>{"y":1}</f>', '<f=a>{"x":1}', '<f=a>{"x":1}</g>', "<f=b>{}"):
        assert not accepts(text, structural_tag=tag), text
    special = {
        "structures": [{"begin": "<|im_start|>", "schema": {}, "end": "!"}],
        "triggers": ["<|im_start|>"],
    }
    assert accepts("text", structural_tag=special)


def test_whitespace_between_tokens_of_json_is_bounded(accepts: Callable[..., bool]) -> None:
    good = ['{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{\n\t"a" :\n 1\n}']
    bad = ['{  "a":1}', '{\n\n"a":1}', ' {"a":1}', '{"a":1} ', "{\n" + " " * 21 + '"a":1}', '{"a":\r1}']
    for text in good + bad:
        assert accepts(text, json_object=True) == (text in good), text
        assert accepts(text, json_object=True, disable_any_whitespace=True) == (text == good[0]), text
    assert accepts('{"a":   1}', json_object=True, whitespace_pattern=" *")
    assert accepts('{"a":1}', json_object=True, whitespace_pattern="")
    assert not accepts('{"a": 1}', json_object=True, whitespace_pattern="")


def test_a_schema_cannot_bring_options_of_its_own(
    accepts: Callable[..., bool], compiled: Callable[..., Grammar]
) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": ".*", "lenient": True}}
    assert accepts("{}", json=schema) and not accepts("{   }", json=schema)
    with pytest.raises(GrammarError, match="not supported"):
        compiled(json={"type": "array", "contains": {}, "x-guidance": {"lenient": True}})


def test_additional_properties_can_be_left_out(accepts: Callable[..., bool]) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner, "c": {**inner, "additionalProperties": True}}}
    cases = {'{"a":{"b":1}}': True, '{"a":{"z":1}}': False, '{"z":1}': False, '{"c":{"z":1}}': True}
    for text, strict in cases.items():
        assert accepts(text, json=schema)
        assert accepts(text, json=schema, disable_additional_properties=True) == strict, text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.25", "0"),
        ({"type": "number", "minimum": -8.5, "exclusiveMaximum": -8}, "-8.2", "-8"),
        ({"propertyNames": {"pattern": "^a+$"}, "type": "object"}, '{"aa":1}', '{"b":1}'),
        ({"propertyNames": {"enum": ["a", "b"]}, "type": "object"}, '{"b":1}', '{"c":1}'),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, '{"a":1}', '{"b":1}'),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, "[1]", "[1,2]"),
        ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, "[1,1]", "[2]"),
        ({"type": "string", "format": "iri"}, '"http://a.b/c"', '"a b"'),
        ({"type": "string", "format": "date"}, '"0001-02-03"', '"0000-02-03"'),
        ({"type": "string", "format": "password"}, '"any thing"', "1"),
    ],
)
def test_what_is_said_in_other_keywords(
    accepts: Callable[..., bool], schema: dict[str, Any], good: str, bad: str
) -> None:
    assert accepts(good, json=schema) and not accepts(bad, json=schema)


def test_a_schema_is_looked_through_wherever_schemas_are() -> None:
    leaf = {"type": "array", "uniqueItems": False}
    schema = {
        "$defs": {"a": leaf},
        "properties": {"uniqueItems": leaf, "b": {"items": leaf, "anyOf": [leaf, True]}},
        "const": {"uniqueItems": False},
    }
    found = json_schema(json.loads(json.dumps(schema)), StructuredOutputsParams(json_object=True))
    assert json.dumps(found).count('"uniqueItems": false') == 1  # that of the constant, which is data
    assert found["properties"]["uniqueItems"] == {"type": "array"}


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"grammar": "start: missing"}, 'grammar: .*unknown name: "missing"'),
        ({"grammar": "root := ::= "}, "grammar: Expected"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"structural_tag": {"triggers": []}}, "structural_tag: .*structures"),
        ({"structural_tag": {"triggers": [], "structures": []}}, "must not be empty"),
        (
            {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "x", "end": ""}]}},
            "does not start with any",
        ),
        ({"json": {"$ref": "file:///etc/passwd"}}, "file:///etc/passwd is not in the schema"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"json": {"multipleOf": 10**6}}, "multipleOf: 1000000 is not supported"),
    ],
)
def test_errors_say_what_is_wrong(structure: dict[str, Any], message: str) -> None:
    found = Woken(lambda: load_tokenizer(FOLDER, [EOS])).compile(**structure)
    with pytest.raises(GrammarError, match=message):
        found.poll(time.monotonic())


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": r"(\w{1,500}\W{1,500}){500}"},
        {"json": {"type": "string", "maxLength": 10**9, "minLength": 10**6}},
        {
            "json": {
                "allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(8)]} for i in range(8)]
            }
        },
        {
            "json": {
                "$ref": "#/$defs/29",
                "$defs": {"0": {}}
                | {str(i): {"allOf": [{"$ref": f"#/$defs/{i - 1}"}] * 2} for i in range(1, 30)},
            }
        },
        {"grammar": 'start: s\ns: s s | "a" |'},
    ],
)
def test_grammars_made_to_hurt_are_compiled_or_refused(structure: dict[str, Any]) -> None:
    found = Woken(lambda: load_tokenizer(FOLDER, [EOS])).compile(**structure)
    try:
        ready = found.poll(time.monotonic())
    except GrammarError as error:
        assert structure.keys() & str(error).split(":")[:1]
    else:
        assert ready is not None and any(ready.matcher().mask())


def test_equal_grammars_are_compiled_once_and_the_oldest_is_forgotten(tokenizer: LLTokenizer) -> None:
    woken = Woken(lambda: tokenizer, capacity=2)
    first = woken.compile(regex="a")
    assert woken.compile(regex="a") is first
    second = woken.compile(regex="b")
    assert woken.compile(regex="a") is first
    woken.compile(regex="c")
    assert len(woken.grammars) == 2
    assert woken.compile(regex="a") is first and woken.compile(regex="b") is not second


def test_failures_are_remembered_too(tokenizer: LLTokenizer) -> None:
    woken = Woken(lambda: tokenizer)
    compilation = woken.compile(regex="(")
    assert woken.compile(regex="(") is compilation
    outcome = compilation.outcome  # without the frames that raised it: they hold the whole grammar
    assert isinstance(outcome, GrammarError) and outcome.__traceback__ is None and outcome.__context__ is None


def test_masks_behind_drafts_end_with_the_first_that_is_not_allowed(
    compiled: Callable[..., Grammar], tokenizer: LLTokenizer
) -> None:
    digits = compiled(regex="[0-9]{2,3}")
    one, two = tokenizer.tokenize_str("1")[0], tokenizer.tokenize_str("2")[0]
    letter = tokenizer.tokenize_str("x")[0]
    matcher = digits.matcher()
    masks = [digits.matcher(before).mask() for before in ([], [one], [one, two])]
    assert matcher.masks([]) == masks[:1]
    assert matcher.masks([one, two]) == masks
    assert matcher.masks([one, letter, two]) == masks[:2]
    assert matcher.masks([one, two, one, one]) == masks  # complete behind the third
    assert matcher.mask() == masks[0]  # it has not moved


class Gate:
    """Lets the tokenizer be loaded, and so compilations go on, when a test opens it."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer, self.opened, self.reached = tokenizer, threading.Event(), threading.Event()

    def load(self) -> LLTokenizer:
        self.reached.set()
        assert self.opened.wait(WAIT)
        return self.tokenizer


def test_the_time_limit_begins_when_the_tokenizer_is_loaded(tokenizer: LLTokenizer) -> None:
    gate = Gate(tokenizer)
    woken = Woken(gate.load, seconds=5.0)
    woken.grammars.start()
    assert gate.reached.wait(WAIT)  # before there is any grammar
    now = time.monotonic()
    early = woken.grammars.submit(StructuredOutputsParams(regex="a"), "", now)
    assert early.poll(now + 60.0) is None
    with pytest.raises(
        EngineStalledError, match="regex: the tokenizer for grammars was not loaded within 120 s"
    ):
        early.poll(now + 121.0)
    gate.opened.set()
    assert woken.compile(regex="a") is early and isinstance(early.poll(now + 122.0), Grammar)


class StalledProver:
    """Proves grammars once a test lets it; or says that it got no processor."""

    def __init__(self, prover: ConfinedProver, error: Exception | None = None) -> None:
        self.prover, self.error, self.limits = prover, error, list[float]()
        self.reached, self.opened = threading.Event(), threading.Event()

    def start(self) -> None:
        self.prover.start()

    def prove(self, structure: StructuredOutputsParams, seconds: float, cpu_seconds: float) -> Proof:
        self.limits.append(seconds)
        self.reached.set()
        assert self.opened.wait(WAIT)
        if self.error is not None:
            raise self.error
        return self.prover.prove(structure, WAIT, WAIT)

    def close(self) -> None:
        """The prover goes on."""


def test_a_limit_that_passes_without_an_answer_is_not_the_grammars_fault(
    tokenizer: LLTokenizer, prover: ConfinedProver
) -> None:
    stalled = StalledProver(prover)
    woken = Woken(lambda: tokenizer, seconds=5.0, open_prover=lambda: stalled)
    structure = StructuredOutputsParams(regex="a")
    slow = woken.grammars.submit(structure, "", time.monotonic())
    assert stalled.reached.wait(WAIT)
    late = time.monotonic() + 5.1
    with pytest.raises(
        EngineStalledError, match="regex: not compiled within 5 s, for which it got too little"
    ):
        slow.poll(late)
    assert woken.grammars.submit(structure, "", late) is slow and slow.poll(late + 4.9) is None
    stalled.opened.set()
    assert isinstance(woken.compile(regex="a").poll(late + 6.0), Grammar)


@pytest.mark.parametrize(
    ("error", "remembered", "expected"),
    [
        (JobTimeoutError("slow"), True, GrammarError),
        (EngineStalledError("no processor"), False, EngineStalledError),
    ],
)
def test_only_processor_time_is_the_grammars_fault(
    tokenizer: LLTokenizer,
    prover: ConfinedProver,
    error: Exception,
    remembered: bool,
    expected: type[Exception],
) -> None:
    stalled = StalledProver(prover, error)
    stalled.opened.set()
    woken = Woken(lambda: tokenizer, seconds=5.0, open_prover=lambda: stalled)
    first = woken.compile(regex="a")
    assert stalled.limits == [2.0, 5.0]  # in the quick lane, then in the slow one
    with pytest.raises(expected, match="regex: "):
        first.poll(time.monotonic())
    stalled.error = None
    assert (woken.compile(regex="a") is first) == remembered


def test_a_grammar_that_no_thread_had_time_for_is_compiled_when_it_comes_again(
    tokenizer: LLTokenizer, prover: ConfinedProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.engine_core.grammar.pool.NUM_THREADS", 1)
    stalled = StalledProver(prover)
    woken = Woken(lambda: tokenizer, seconds=5.0, open_prover=lambda: stalled)
    now = time.monotonic()
    woken.grammars.submit(StructuredOutputsParams(regex="a"), "", now)
    assert stalled.reached.wait(WAIT)  # by the only thread
    structure = StructuredOutputsParams(regex="b")
    late = woken.grammars.submit(structure, "", now - 6.0)
    with pytest.raises(EngineBusyError, match="regex: waited 5 s for other grammars"):
        late.poll(now)
    again = woken.grammars.submit(structure, "", now)
    assert again is not late and again.poll(now) is None
    stalled.opened.set()
    assert isinstance(woken.compile(regex="b").poll(time.monotonic()), Grammar)
    assert late.outcome is None  # the thread has skipped it


class Recorder:
    """Proves grammars, and keeps the order in which they came."""

    def __init__(self, prover: ConfinedProver) -> None:
        self._prover = prover
        self.order: list[str | None] = []

    def start(self) -> None:
        self._prover.start()

    def prove(self, structure: StructuredOutputsParams, seconds: float, cpu_seconds: float) -> Proof:
        self.order.append(structure.regex)
        return self._prover.prove(structure, seconds, cpu_seconds)

    def close(self) -> None:
        """The prover goes on."""


def test_a_tenant_does_not_wait_for_the_many_grammars_of_another(
    tokenizer: LLTokenizer, prover: ConfinedProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.engine_core.grammar.pool.NUM_THREADS", 1)
    gate, recorder = Gate(tokenizer), Recorder(prover)
    woken = Woken(gate.load, open_prover=lambda: recorder)

    def submit(tenant: str, regex: str) -> Compilation:
        return woken.grammars.submit(StructuredOutputsParams(regex=regex), tenant, time.monotonic())

    all_of_them = [submit("a", f"a{number}") for number in range(4)]
    assert gate.reached.wait(WAIT)  # for the first of them
    all_of_them.append(submit("b", "b"))
    assert submit("c", "a3") is all_of_them[3]  # which is then compiled in the turn of either
    gate.opened.set()
    while any(compilation.outcome is None for compilation in all_of_them):
        assert woken.event.wait(WAIT)
        woken.event.clear()
    first, *next_ones, last, very_last = recorder.order
    assert (first, last, very_last) == ("a0", "a1", "a2") and set(next_ones) == {"b", "a3"}


def test_too_many_at_once_are_refused(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine_core.grammar.pool.MAX_PENDING", 3)
    gate = threading.Event()

    def load() -> LLTokenizer:
        assert gate.wait(WAIT)
        return tokenizer

    woken = Woken(load)
    with pytest.raises(EngineBusyError, match="3 grammars are already waiting"):
        for i in range(10):
            woken.grammars.submit(StructuredOutputsParams(regex=f"a{i}"), "", time.monotonic())
    others = woken.grammars.submit(StructuredOutputsParams(regex="b"), "another tenant", time.monotonic())
    gate.set()
    assert woken.compile(regex="b") is others
    assert woken.compile(regex="a0").poll(time.monotonic()) is not None


def test_without_a_usable_tokenizer_every_grammar_is_refused(tmp_path: Path) -> None:
    for text, message in ((None, "has none"), ("{}", "cannot use")):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        found = Woken(lambda: load_tokenizer(tmp_path, [EOS])).compile(regex="a")
        with pytest.raises(GrammarError, match=message):
            found.poll(time.monotonic())
    with pytest.raises(GrammarError, match="out of range"):
        load_tokenizer(FOLDER, [5000])


def test_an_error_nobody_foresaw_refuses_the_grammar_and_no_more(tokenizer: LLTokenizer) -> None:
    loads = iter([RuntimeError("the disk is gone"), tokenizer])

    def load() -> LLTokenizer:
        found = next(loads)
        if isinstance(found, Exception):
            raise found
        return found

    woken = Woken(load)
    with pytest.raises(GrammarError, match="the disk is gone"):
        woken.compile(regex="a").poll(time.monotonic())
    assert isinstance(woken.compile(regex="b").poll(time.monotonic()), Grammar)
