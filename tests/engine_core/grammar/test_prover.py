"""Grammars that crash or fill the process that compiles them are refused; the core and other grammars go on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pagewire.demo
from pagewire.engine_core.grammar.chains import chain_length
from pagewire.engine_core.grammar.compile import load_tokenizer
from pagewire.engine_core.grammar.matcher import Grammar, GrammarError
from pagewire.engine_core.grammar.pool import Compilation, Grammars
from pagewire.engine_core.grammar.prover import MAX_GRAMMAR_BYTES, ConfinedProver
from pagewire.ipc.confined import JobTimeoutError
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.params import StructuredOutputsParams

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


def test_a_lost_process_is_replaced(prover: ConfinedProver) -> None:
    prove(prover, regex="x")
    before = prover.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert prove(prover, regex="x") and prover.pid != before


def test_the_longest_chain_is_found_wherever_it_begins() -> None:
    forwards = {str(i): [str(i + 1)] for i in range(9)}
    backwards = dict(reversed(forwards.items()))
    assert chain_length(forwards) == chain_length(backwards) == 9
    assert chain_length({"a": ["a"]}) == 1 and chain_length({}) == 0
    assert chain_length({"a": ["b"], "b": ["a"]}) == 2


class Pool:
    """Grammars, and a way to wait for them."""

    def __init__(self, prover: ConfinedProver, **options: Any) -> None:
        self.woken = threading.Event()
        options = {"seconds": WAIT} | options
        self.grammars = Grammars(
            lambda: load_tokenizer(FOLDER, [EOS]),
            VOCAB,
            open_prover=lambda: prover,
            wake=self.woken.set,
            **options,
        )

    def submit(self, **structure: Any) -> Compilation:
        return self.grammars.submit(StructuredOutputsParams(**structure), time.monotonic())

    def wait(self, compilation: Compilation) -> Grammar:
        while compilation.outcome is None:
            assert self.woken.wait(WAIT)
            self.woken.clear()
        grammar = compilation.poll(time.monotonic())
        assert grammar is not None
        return grammar


def test_slow_grammars_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine_core.grammar.pool.QUICK_CPU_SECONDS", 0.05)
    pool = Pool(ConfinedProver(FOLDER, [EOS], VOCAB), seconds=3.0)
    slow = [pool.submit(regex="a?" * (12_000 + i)) for i in range(4)]
    assert pool.wait(pool.submit(regex="a")).num_bytes
    assert any(compilation.outcome is None for compilation in slow)  # the short one did not wait for them
    pool.grammars.close()


def test_the_memory_of_grammars_is_bounded_cached_and_in_use(prover: ConfinedProver) -> None:
    pool = Pool(prover)
    sizes = [pool.wait(pool.submit(regex="a?" * (2000 + i))).num_bytes for i in range(2)]
    pool = Pool(prover, max_bytes=int(1.5 * max(sizes)))
    kept = pool.wait(pool.submit(regex="a?" * 2000))
    assert pool.submit(regex="a?" * 2000).outcome is kept
    with pytest.raises(EngineBusyError, match="grammars in use take"):
        pool.wait(pool.submit(regex="a?" * 2001))
    del kept
    pool.wait(pool.submit(regex="a?" * 2001))  # it was not remembered as bad, and there is room now
    assert pool.grammars.num_bytes <= 1.5 * max(sizes)
