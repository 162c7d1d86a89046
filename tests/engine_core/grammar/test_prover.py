"""Grammars that crash or fill the process that compiles them are refused; the core and other grammars go on."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pagewire.demo
from pagewire.engine_core.grammar.chains import chain_length
from pagewire.engine_core.grammar.compilation import Compilation
from pagewire.engine_core.grammar.compile import compile_text, load_tokenizer
from pagewire.engine_core.grammar.matcher import MAX_EXCESS_SECONDS, SHARE, Grammar, MasksTime
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.grammar.prover import (
    MAX_GRAMMAR_BYTES,
    ConfinedProver,
    Proof,
    Prover,
    resident_bytes,
    try_steps,
)
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.errors import EngineBusyError, EngineStalledError
from pagewire.ipc.host.confined import JobTimeoutError, Limits, killed_error
from pagewire.ipc.host.heap import release_spare_memory
from pagewire.ipc.wire.params import StructuredOutputsParams

FOLDER = Path(pagewire.demo.__path__[0])
EOS, VOCAB, WAIT = 2, 4100, 60.0
RULES = "start: r0\n" + "".join(f'r{i}: r{i + 1} "x"\n' for i in range(3000)) + 'r3000: "a"\n'
REFERENCES = {
    "$ref": "#/$defs/d0",
    "$defs": {
        **{
            f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
            for i in range(2000)
        },
        "d2000": {"type": "string"},
    },
}


@pytest.fixture(scope="module")
def prover() -> Iterator[ConfinedProver]:
    prover = ConfinedProver(FOLDER, [EOS], VOCAB)
    yield prover
    prover.close()


def prove(prover: ConfinedProver, cpu_seconds: float = 20.0, **structure: Any) -> int:
    return prover.prove(StructuredOutputsParams(**structure), WAIT, cpu_seconds).num_bytes


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"grammar": RULES}, "grammar: a chain of more than 256 rules"),
        ({"json": REFERENCES}, "json: a chain of more than 256 references"),
        (
            {"grammar": json.dumps({"grammars": [{"lark_grammar": RULES}]})},
            "too complex: it is nested too deeply",
        ),
        ({"regex": " " * 60_000 + "("}, "invalid regex"),
        ({"regex": "a?" * 100_000}, "too complex: it needs more than 256 MiB"),
    ],
)
def test_grammars_that_would_end_a_core_are_refused(
    prover: ConfinedProver, structure: dict[str, Any], message: str
) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        prove(prover, **structure)
    assert len(str(caught.value)) < 1100
    assert 0 < prove(prover, regex="a+") < MAX_GRAMMAR_BYTES


def test_a_grammar_that_takes_too_long_is_ended(prover: ConfinedProver) -> None:
    with pytest.raises(JobTimeoutError):
        prove(prover, 0.1, regex="a?" * 20_000)


def test_what_took_too_long_is_remembered_but_not_held(prover: ConfinedProver) -> None:
    structure = StructuredOutputsParams(regex="b?" * 20_000)
    holders = sys.getrefcount(structure)
    with suppress(JobTimeoutError):  # pytest.raises would hold it, with its frames
        prover.prove(structure, WAIT, 0.1)
        pytest.fail("it was compiled in a tenth of a second")
    assert sys.getrefcount(structure) == holders


def test_a_lost_process_is_replaced(prover: ConfinedProver) -> None:
    prove(prover, regex="x")
    before = prover.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert prove(prover, regex="x") and prover.pid != before


def test_a_process_that_stands_still_is_replaced(
    prover: ConfinedProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(prover, regex="x")
    monkeypatch.setattr("pagewire.ipc.host.confined.GRACE_SECONDS", -WAIT + 0.1)
    before = prover.pid
    assert before is not None
    os.kill(before, signal.SIGSTOP)
    structure = StructuredOutputsParams(regex="y")
    with monkeypatch.context() as once:
        once.setattr("pagewire.ipc.host.confined.NUM_ATTEMPTS", 1)
        with pytest.raises(EngineStalledError, match="did not answer"):
            prover.prove(structure, WAIT, 1.0)
    monkeypatch.undo()
    assert prover.prove(structure, WAIT, 1.0).num_bytes and prover.pid != before  # it was not remembered


def test_a_process_is_closed_while_it_starts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")  # which it reads in vain
    prover = ConfinedProver(tmp_path, [EOS], VOCAB)
    failures: list[Exception] = []

    def start() -> None:
        try:
            prover.start()
        except Exception as error:
            failures.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    while (pid := prover.pid) is None:
        time.sleep(0)
    prover.close()
    starting.join(WAIT)
    assert not starting.is_alive() and not Path(f"/proc/{pid}").exists()
    assert isinstance(failures[0], EngineBusyError)


@pytest.mark.parametrize(
    ("number", "limits", "kind"),
    [
        (signal.SIGPROF, Limits(10, 5, 1, computes=True), JobTimeoutError),
        (signal.SIGALRM, Limits(10, 5, 1, computes=True), EngineStalledError),
        (signal.SIGALRM, Limits(10, 5, 1), JobTimeoutError),
    ],
)
def test_a_job_that_only_computes_is_not_blamed_for_wall_clock_time(
    number: int, limits: Limits, kind: type[Exception]
) -> None:
    assert type(killed_error(-number, limits)) is kind


def test_the_longest_chain_is_found_wherever_it_begins() -> None:
    forwards = {str(i): [str(i + 1)] for i in range(9)}
    backwards = dict(reversed(forwards.items()))
    assert chain_length(forwards) == chain_length(backwards) == 9
    assert chain_length({"a": ["a"]}) == 1 and chain_length({}) == 0
    assert chain_length({"a": ["b"], "b": ["a"]}) == 2


def children(pid: int | None) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())


def test_a_process_proves_one_grammar_after_the_other_until_one_fails(prover: ConfinedProver) -> None:
    prove(prover, regex="x")
    seen = set()
    for number in range(20):
        prove(prover, regex=f"x{number}")
        seen |= children(prover.pid)
    assert len(seen) < 10
    before, failures = children(prover.pid), 0
    while children(prover.pid) & before:
        with pytest.raises(GrammarError):
            prove(prover, regex="(")
        failures += 1
        assert failures < 100


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {}, "q": {}}} for i in range(395)]},
        {"type": "string", "pattern": "a?" * 2500},
    ],
)
def test_a_grammar_that_fails_at_once_is_refused(prover: ConfinedProver, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="json: too complex: "):
        prove(prover, json=schema)


def test_masks_that_take_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine_core.grammar.prover.MAX_MASK_SECONDS", -1.0)
    tokenizer = load_tokenizer(FOLDER, [EOS])
    with pytest.raises(GrammarError, match="regex: too complex: to find the allowed next tokens takes"):
        try_steps(compile_text("regex", "start: /a+/", tokenizer, VOCAB), "regex")


def test_the_time_of_masks_is_bounded_for_all_sequences_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine_core.grammar.matcher.MASK_ALLOWANCE", -1.0)
    monkeypatch.setattr("pagewire.engine_core.grammar.matcher.SHARE", 0.0)
    monkeypatch.setattr("pagewire.engine_core.grammar.matcher.MAX_EXCESS_SECONDS", 3.5)
    tokenizer = load_tokenizer(FOLDER, [EOS])
    grammar = compile_text("regex", "start: /a+/", tokenizer, VOCAB)  # computes a mask
    one, other = grammar.matcher(), grammar.matcher()
    assert any(one.mask()) and any(other.mask()) and any(one.mask())
    with pytest.raises(GrammarError, match="has become too complex"):
        other.mask()


def test_masks_may_take_a_share_of_the_time_but_not_all_of_it() -> None:
    now = 0.0
    time_of_masks = MasksTime(lambda: 0.0, lambda: now)

    def step(num_masks: int, mask_seconds: float, step_seconds: float) -> None:
        nonlocal now
        now += step_seconds
        for _ in range(num_masks):
            time_of_masks.check()
            now += mask_seconds
            time_of_masks.add(mask_seconds)

    for _ in range(10_000):
        step(256, 0.0004, 0.01)  # quick masks of many sequences
        step(1, 0.003, 0.005)  # slow ones of one
    assert time_of_masks.excess < MAX_EXCESS_SECONDS
    begin = now
    with pytest.raises(GrammarError, match="has become too complex"):
        step(256, 0.009, 0.01)  # slow ones of many
    assert now - begin < 2 * MAX_EXCESS_SECONDS / (1 - SHARE)
    with pytest.raises(GrammarError, match="has become too complex"):
        step(1, 0.0001, 0.0)


class Once:
    """Proves each grammar once: a second proof is not of the same memory to the byte."""

    def __init__(self, prover: Prover) -> None:
        self._prover = prover
        self._proofs: dict[bytes, Proof] = {}

    def prove(self, structure: StructuredOutputsParams, seconds: float, cpu_seconds: float) -> Proof:
        key = msgspec.msgpack.encode(structure)
        if key not in self._proofs:
            self._proofs[key] = self._prover.prove(structure, seconds, cpu_seconds)
        return self._proofs[key]

    def start(self) -> None:
        self._prover.start()

    def close(self) -> None:
        self._prover.close()


class Pool:
    """Grammars, and a way to wait for them."""

    def __init__(self, prover: Prover, **options: Any) -> None:
        self.woken = threading.Event()
        options = {"seconds": WAIT} | options
        self.grammars = Grammars(
            lambda: load_tokenizer(FOLDER, [EOS]),
            VOCAB,
            open_prover=lambda: prover,
            wake=self.woken.set,
            **options,
        )

    def submit(self, tenant: str = "a", **structure: Any) -> Compilation:
        return self.grammars.submit(StructuredOutputsParams(**structure), tenant, time.monotonic())

    def wait(self, compilation: Compilation) -> Grammar:
        while compilation.outcome is None:
            assert self.woken.wait(WAIT)
            self.woken.clear()
        grammar = compilation.poll(time.monotonic())
        assert grammar is not None
        return grammar


def test_slow_grammars_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine_core.grammar.pool.QUICK_CPU_SECONDS", 0.05)
    pool = Pool(ConfinedProver(FOLDER, [EOS], VOCAB))
    pool.wait(pool.submit(regex="b"))  # with which the process that proves them has started
    slow = [pool.submit(regex="a?" * (12_000 + i)) for i in range(4)]
    assert pool.wait(pool.submit(regex="a")).num_bytes
    assert any(compilation.outcome is None for compilation in slow)  # the short one did not wait for them
    pool.grammars.close()


def words(first: int) -> dict[str, Any]:
    """A schema of thousands of words, another one for each number."""
    return {"enum": [f"{number * 7919}" for number in range(first, 5000)]}


def test_the_memory_of_grammars_is_bounded_cached_and_in_use(prover: ConfinedProver) -> None:
    once = Once(prover)
    pool = Pool(once)
    sizes = [pool.wait(pool.submit(json=words(i))).num_bytes for i in range(2)]
    max_bytes = int(3.1 * max(sizes))  # a tenant alone has half of it
    pool = Pool(once, max_bytes=max_bytes)
    kept = pool.wait(pool.submit(json=words(0)))
    assert pool.submit(json=words(0)).outcome is kept
    with pytest.raises(EngineBusyError, match="grammars in use take"):
        pool.wait(pool.submit(json=words(1)))
    others = pool.wait(pool.submit("b", json=words(1)))  # of another tenant, which has a share of its own
    assert others.num_bytes + kept.num_bytes <= max_bytes
    del others
    del kept
    pool.wait(pool.submit(json=words(1)))  # it was not remembered as bad, and there is room now
    assert pool.grammars.num_bytes <= max_bytes


def test_the_memory_of_cached_grammars_is_bounded(prover: ConfinedProver) -> None:
    once = Once(prover)
    first = Pool(once)
    one = first.wait(first.submit(json=words(0))).num_bytes
    pool = Pool(once, max_cached_bytes=int(2.5 * one))
    compilations = [pool.submit(json=words(0))]
    for number in range(1, 4):
        pool.wait(compilations[-1])
        compilations.append(pool.submit(json=words(number)))
    pool.wait(compilations[-1])
    again = [pool.submit(json=words(number)) for number in (3, 2, 0)]
    assert again[:2] == [compilations[3], compilations[2]] and again[2] is not compilations[0]
    pool.wait(again[2])


def generate(grammar: Grammar, num_tokens: int) -> None:
    """Draw tokens under a grammar, as a sequence would."""
    draw, matcher = random.Random(1), grammar.matcher(ignore_eos=True)
    for _ in range(num_tokens):
        mask = int.from_bytes(matcher.mask(), "little")
        allowed = mask >> (start := draw.randrange(mask.bit_length())) << start or mask
        matcher.accept((allowed & -allowed).bit_length() - 1)


def test_what_a_grammar_grows_by_in_use_is_counted(prover: ConfinedProver) -> None:
    """Its first 40 letters, which are all that the prover tries, need few states."""
    pool = Pool(prover, max_cached_bytes=1 << 20)
    regex = "[a-z]{40}([a-z]*[aeiou][a-z]{12} )*"
    grammar = pool.wait(pool.submit(regex=regex))
    assert grammar.num_bytes < 1 << 20 and pool.submit(regex=regex).outcome is grammar
    release_spare_memory()
    before = resident_bytes()
    generate(grammar, 400)
    grown = resident_bytes() - before
    assert grammar.num_bytes > 1 << 20
    assert grown / 4 < grammar.num_bytes < 4 * grown
    pool.grammars.tidy()
    assert pool.submit(regex=regex).outcome is not grammar, "it is too large now to be cached"


def test_grammars_in_use_that_grow_beyond_all_memory_end(prover: ConfinedProver) -> None:
    """The largest of the tenant that has most."""
    pool = Pool(prover, max_bytes=10 << 20)
    names = (("a", "[a-z]*"), ("a", "[a-y]*"), ("b", "[a-x]*"))
    large, small, other = [pool.wait(pool.submit(tenant, regex=regex)) for tenant, regex in names]
    large.num_bytes, small.num_bytes, other.num_bytes = 4 << 20, 2 << 20, 5 << 20
    pool.grammars.tidy()
    generate(small, 1)
    generate(other, 1)
    with pytest.raises(GrammarError, match="no memory for its further growth"):
        generate(large, 1)
    assert pool.submit("a", regex="[a-z]*").outcome is not large, (
        "others may have it again, once there is room"
    )


def test_a_choice_has_as_many_strings_as_its_limit_allows(prover: ConfinedProver) -> None:
    choices = [f"choice {number}" for number in range(16_384)]
    proof = prover.prove(StructuredOutputsParams(choice=choices), WAIT, WAIT)
    assert proof.num_bytes < MAX_GRAMMAR_BYTES
