"""The whole core with a fake worker: requests under a grammar, and those beside them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import string
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from pagewire.engine_core.grammar import open as grammar_open
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Abort, Submit
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request
from tests.engine_core.conftest import RawFrontend
from tests.engine_core.fake_worker import EOS, VOCAB_SIZE, next_token

CHARACTERS = string.ascii_letters + string.digits + string.punctuation
TOKENS = [*CHARACTERS, *(f"{i}," for i in range(len(CHARACTERS), EOS)), "<eos>"]
DIGITS = {"regex": "[0-9]{1,20}"}
NUMBERS = "([1-9][0-9]*,){3,6}"
WAIT = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for the fake worker's vocabulary: characters, then numbers with a comma, then the end."""
    vocab = {text: i for i, text in enumerate(TOKENS)}
    assert len(vocab) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def reached() -> threading.Event:
    """Is set when the tokenizer of grammars is to be loaded."""
    return threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, reached: threading.Event) -> Iterator[threading.Event]:
    """No grammar is compiled before it is set."""
    event, load = threading.Event(), grammar_open.load_tokenizer

    def load_later(*args: Any) -> Any:
        reached.set()
        assert event.wait(WAIT)
        return load(*args)

    monkeypatch.setattr(grammar_open, "load_tokenizer", load_later)
    yield event
    event.set()


def text_of(token_ids: list[int]) -> str:
    return "".join(TOKENS[token_id] for token_id in token_ids if token_id != EOS)


def roll_out(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 7))
    return tokens[len(prompt) :]


def attach(start_core: Callable, folder: Path, **options: Any) -> RawFrontend:
    frontend: RawFrontend = start_core(folder=folder, **options).frontend()
    frontend.attach()
    return frontend


def run_some(frontend: RawFrontend) -> dict[tuple[int, int], list[int]]:
    """Requests with and without a grammar, beside each other."""
    frontend.submit(1, [1, 2, 3], structured_outputs={"regex": NUMBERS}, max_tokens=90, n=3)
    frontend.submit(2, [4] * 60, max_tokens=12)
    frontend.submit(3, [5], structured_outputs={"choice": ["700,800,", "xyz"]}, max_tokens=40)
    frontend.submit(4, [1, 2, 3], structured_outputs={"regex": "[!-~]*"}, max_tokens=5)
    places = [(1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (4, 0)]
    frontend.finish(*places)
    return frontend.outputs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 8},
        {"worker_options": ["--num-blocks", "9"]},
    ],
)
def test_rows_with_and_without_a_grammar(start_core: Callable, folder: Path, options: dict[str, Any]) -> None:
    frontend = attach(start_core, folder, **options)
    outputs = run_some(frontend)
    for index in range(3):
        assert re.fullmatch(NUMBERS, text_of(outputs[1, index]))
        assert frontend.ends[1, index].finish_reason == "stop"
    assert outputs[2, 0] == roll_out([4] * 60, 12)
    assert text_of(outputs[3, 0]) in ("700,800,", "xyz")
    assert outputs[4, 0] == roll_out([1, 2, 3], 5) and frontend.ends[4, 0].finish_reason == "length"
    status = frontend.status()
    assert status["num_free_blocks"] == status["num_blocks"] and status["waiting"] == 0


def test_nothing_depends_on_overlap(start_core: Callable, folder: Path) -> None:
    one, other = (run_some(attach(start_core, folder, async_scheduling=on)) for on in (True, False))
    assert one == other


def test_others_run_while_a_grammar_is_compiled(
    start_core: Callable, folder: Path, gate: threading.Event
) -> None:
    frontend = attach(start_core, folder)
    frontend.submit(1, [1], structured_outputs={"choice": ["a"]})
    frontend.submit(2, [2], max_tokens=20)
    frontend.finish((2, 0))
    assert (1, 0) not in frontend.outputs and frontend.status()["waiting"] == 1
    gate.set()
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == [0] and frontend.ends[1, 0].finish_reason == "stop"


def test_requests_leave_while_their_grammar_is_compiled(
    start_core: Callable, folder: Path, gate: threading.Event
) -> None:
    core = start_core(folder=folder)
    frontend, other = core.frontend("a"), core.frontend("b")
    for each in (frontend, other):
        each.attach()
        each.submit(1, [1], structured_outputs={"choice": ["a"]}, n=2)
    frontend.submit(2, [1], structured_outputs={"choice": ["a"]})
    frontend.say(Abort(keys=[1]))
    other.socket.close(0)
    gate.set()
    frontend.finish((2, 0))
    assert (1, 0) not in frontend.outputs and frontend.outputs[2, 0] == [0]
    assert frontend.call("pause").error is None  # answered once nothing is unfinished
    status = frontend.status()
    assert (status["running"], status["waiting"]) == (0, 0)


def test_a_pause_holds_what_is_being_compiled(
    start_core: Callable, folder: Path, gate: threading.Event
) -> None:
    frontend = attach(start_core, folder)
    frontend.submit(1, [1], structured_outputs={"choice": ["a"]})
    assert frontend.call("pause").error is None
    gate.set()
    assert frontend.status()["waiting"] == 1 and (1, 0) not in frontend.ends
    assert frontend.call("resume").error is None
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == [0]


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json": {"not": {}}}, 'json: not supported: "not"'),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"regex": "é+"}, "no output can satisfy it"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    start_core: Callable, folder: Path, structure: dict[str, Any], message: str
) -> None:
    frontend = attach(start_core, folder)
    for key in (1, 2):  # compiled, then remembered
        frontend.submit(key, [1], structured_outputs=structure, n=2)
        frontend.finish((key, 0), (key, 1))
        for index in range(2):
            end = frontend.ends[key, index]
            assert (end.finish_reason, end.error_type) == ("error", "ValueError")
            assert end.error is not None and message in end.error
    frontend.submit(3, [1], max_tokens=4)
    frontend.finish((3, 0))
    assert frontend.outputs[3, 0] == roll_out([1], 4)


def test_without_a_tokenizer_grammars_are_refused(start_core: Callable) -> None:
    frontend = attach(start_core, Path("/nowhere"))
    frontend.submit(1, [1], structured_outputs=DIGITS)
    frontend.finish((1, 0))
    assert "/nowhere has none" in (frontend.ends[1, 0].error or "")


def test_the_tokenizer_is_loaded_at_the_start_and_nothing_waits_for_it(
    start_core: Callable, folder: Path, gate: threading.Event, reached: threading.Event
) -> None:
    frontend = attach(start_core, folder)
    assert reached.wait(WAIT)  # without any request
    frontend.submit(1, [1], max_tokens=4)
    frontend.finish((1, 0))
    gate.set()


def test_an_engine_without_a_tokenizer_of_its_own_loads_none_ahead(
    start_core: Callable, folder: Path, gate: threading.Event, reached: threading.Event
) -> None:
    gate.set()
    frontend = attach(start_core, folder, skip_tokenizer_init=True)
    frontend.submit(1, [1], max_tokens=4)
    frontend.finish((1, 0))
    assert not reached.is_set()
    frontend.submit(2, [1], structured_outputs=DIGITS)
    frontend.finish((2, 0))
    assert reached.is_set() and frontend.outputs[2, 0]


def test_a_grammar_is_not_blamed_for_a_process_that_stands_still(
    start_core: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_GRAMMAR_TIMEOUT_S", "2")
    monkeypatch.setattr("pagewire.ipc.host.confined.GRACE_SECONDS", 2.0)
    core = start_core(folder=folder)
    frontend = core.frontend()
    frontend.attach()
    frontend.submit(1, [1], structured_outputs=DIGITS)
    frontend.finish((1, 0))
    for key in (2, 3):
        os.kill(core.serving.engine.grammars._prover.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        frontend.submit(key, [1], structured_outputs={"regex": "a{3}"})
        frontend.finish((key, 0))
        assert frontend.ends[key, 0].error_type == "EngineStalledError", frontend.ends[key, 0]
    for key in itertools.count(4):  # until the process is replaced
        frontend.submit(key, [1], structured_outputs={"regex": "a{3}"})
        frontend.finish((key, 0))
        if frontend.ends[key, 0].finish_reason == "stop":
            break
        assert frontend.ends[key, 0].error_type == "EngineStalledError"


def test_a_request_goes_on_from_the_tokens_it_has(start_core: Callable, folder: Path) -> None:
    frontend = attach(start_core, folder)
    choice = {"choice": ["700,800,900,"]}
    for key, done in ((1, [700, 800]), (2, [700, 801])):
        params = SamplingParams(max_tokens=9, structured_outputs=choice)  # type: ignore[arg-type]
        request = Request(key, "r", Prompt([1]), params, 7, EOS, output_token_ids=[done])
        frontend.say(Submit([request]))
    frontend.finish((1, 0), (2, 0))
    assert text_of(frontend.outputs[1, 0]) == "900," and frontend.ends[1, 0].finish_reason == "stop"
    assert "does not fit" in (frontend.ends[2, 0].error or "")


def test_killed_workers_change_nothing(start_core: Callable, folder: Path) -> None:
    expected = run_some(attach(start_core, folder))
    frontend = attach(start_core, folder)
    frontend.kill_worker()
    regex = "([1-9][0-9]*,){60}"
    frontend.submit(9, [1, 2, 3], structured_outputs={"regex": regex}, max_tokens=124)
    while not frontend.outputs.get((9, 0)):
        frontend.take(frontend.hear())
    frontend.kill_worker()
    outputs = run_some(frontend)
    assert {place: outputs[place] for place in expected} == expected
    frontend.finish((9, 0))
    found = text_of(frontend.outputs[9, 0])
    assert re.fullmatch(regex, found) or (
        frontend.ends[9, 0].finish_reason == "length" and re.fullmatch("([1-9][0-9]*,)+[0-9]*", found)
    )
    frontend.wait_for_start(3)
