"""Passes of encoders in slices: the bits of one piece, whatever runs between, and nothing is left of them."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pagewire.engine_core.media.encoder_cache import EncoderCache
from pagewire.engine_core.media.features import Features
from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.tenants.accounts import Account, Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Request
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Encode, StepPlan
from pagewire.workers.media.entries import MediaEntries
from pagewire.workers.media.slices import LayerGate, SlicedPass, cut_layers
from pagewire.workers.media.tower import EncodedMedium
from tests.workers.driver import load_runner
from tests.workers.media.checkpoints import BY_NAME
from tests.workers.media.parity import MediaDriver, Question, Reader, picture, sound, words

CPU = torch.device("cpu")
NUM_TOKENS = 12


def load(name: str, folder: Path) -> tuple[Any, Reader]:
    """A worker with a tiny model, and what makes its prompts."""
    model = BY_NAME[name]
    runner, _ = load_runner(model.write(folder), media=True, max_model_len=512, num_blocks=600)
    return runner, Reader(folder)


def same(one: EncodedMedium | None, other: EncodedMedium) -> bool:
    """True if all bits are equal."""
    assert one is not None and not one.error and not other.error
    pairs = zip([one.rows, *one.deep], [other.rows, *other.deep], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def passes() -> list[threading.Thread]:
    """The threads of passes that are not over."""
    return [thread for thread in threading.enumerate() if thread.name == "encoder"]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "llava", "mistral3", "internvl", "qwen2_audio"])
def test_slices_make_the_bits_of_one_piece(name: str, tmp_path: Path) -> None:
    """Wherever they end, and also if other media are encoded in between."""
    runner, reader = load(name, tmp_path)
    hears = BY_NAME[name].hears
    media = [sound(1.5, 1), sound(2.2, 2)] if hears else [picture(80, 110, 1), picture(50, 50, 3)]
    reader.prompt(Question([*media]))
    kind, tower = "audio" if hears else "image", runner.media.tower
    given, others = reader.features.values()
    whole, other = tower.encode(kind, given), tower.encode(kind, others)
    num_layers = runner.media.num_layers
    assert num_layers > 1
    for ends in ([], [1], [num_layers - 1], list(range(1, num_layers))):
        begun = tower.sliced(kind, given)
        for end in ends:
            assert begun.advance(end) is None
            assert same(tower.encode(kind, others), other)
        assert same(begun.advance(), whole)
    assert not passes()


def test_a_pass_that_is_freed_or_dropped_ends(tmp_path: Path) -> None:
    runner, reader = load("qwen2_vl", tmp_path)
    entries: MediaEntries = runner.media
    reader.prompt(Question([picture(80, 110, 1)]))
    (given,) = reader.features.values()
    begin = StepPlan(1, [], encodes=[Encode(3, "image", given, 1)])
    for end in (lambda: runner.step(StepPlan(2, [], freed_entries=[3])), entries.clear):
        runner.step(begin)
        assert len(passes()) == 1 and not entries.num_bytes
        end()
        assert not passes() and not entries.num_bytes
    runner.step(begin)
    result = runner.step(StepPlan(2, [], encodes=[Encode(3, "image", {})]))
    assert not passes() and entries.num_bytes and result.encode_us > 0


def test_a_pass_that_fails_in_a_later_slice_fails_its_rows_alone(tmp_path: Path) -> None:
    runner, reader = load("qwen2_vl", tmp_path)
    prompt = reader.prompt(Question([picture(80, 110, 1), words(3, 1)]))
    text = Prompt(words(9, 3))
    driver = MediaDriver(runner, reader, budget=400)
    (expected,) = driver.generate([text], 4)
    blocks = max(
        (part for part in runner.media.tower.module.modules() if isinstance(part, nn.ModuleList)), key=len
    )
    right = blocks[1].forward

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such angle")

    blocks[1].forward = fail
    driver = MediaDriver(runner, reader, budget=400, in_slices=True)
    with pytest.raises(AssertionError, match="cannot encode this image: no such angle"):
        driver.generate([prompt], 4)
    blocks[1].forward = right
    assert MediaDriver(runner, reader, budget=400).generate([text], 4) == [expected]
    assert not passes()


def test_errors_that_end_the_worker_come_out_of_a_slice() -> None:
    def run() -> int:
        layers[0](1)
        raise torch.OutOfMemoryError("none is left")

    layers = nn.ModuleList([Added(1), Added(2)])
    begun = SlicedPass(run, cut_layers(nn.Sequential(layers)), CPU)
    with pytest.raises(torch.OutOfMemoryError, match="none is left"):
        begun.advance()
    assert not passes()


class Added(nn.Module):
    """Adds a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, value: int) -> int:
        return value + self.number


def test_an_encoder_without_a_list_of_layers_runs_in_one_piece() -> None:
    assert cut_layers(nn.Sequential(Added(1), Added(2))).num_layers == 0
    assert cut_layers(nn.Sequential(nn.ModuleList([Added(1)]))).num_layers == 0
    lists = nn.ModuleDict({"few": nn.ModuleList([Added(1)] * 2), "many": nn.ModuleList([Added(1)] * 3)})
    assert cut_layers(lists).num_layers == 3
    assert SlicedPass(lambda: Added(1)(2), LayerGate([]), CPU).advance(1) == 3


class Engine:
    """The real scheduler over a real worker, in this process, with two steps in flight.

    Attributes:
        tokens: of each sequence. gained: for each step, the sequences that got a token, and the slice that it ran.
    """

    def __init__(self, runner: Any, reader: Reader, step_seconds: float) -> None:
        self._runner, self._reader = runner, reader
        config = SchedulerConfig(600, 4, 512, depth=2, step_seconds=step_seconds)
        self.encoder = EncoderCache(1000, config.max_num_batched_tokens, runner.media.num_layers)
        self.scheduler = Scheduler(config, WaitingQueue("fcfs", Accounts(1 << 30)), groups=[self.encoder])
        self.tokens: dict[Sequence, list[int]] = {}
        self.gained: list[tuple[set[Sequence], list[Encode]]] = []
        self._launched: deque[StepPlan] = deque()

    def submit(self, prompt: Prompt, num_tokens: int) -> Sequence:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(len(self.tokens), "r", prompt, params, seed=0)
        (sequence,) = sequences(
            request,
            b"test",
            len(self.tokens),
            0.0,
            max_model_len=512,
            share_prefixes=False,
            tenant=Account(b"test"),
            cuts_media=True,
        )
        sequence.features = [self._features(medium.name) for medium in prompt.encoded]
        self.tokens[sequence] = []
        self.scheduler.add(sequence)
        return sequence

    def _features(self, name: bytes) -> Features:
        from array import array

        tensors = self._reader.features[name]
        grid = tensors["image_grid_thw"]
        size = tensors["pixel_values"].shape[0] // 4
        return Features(name, "image", array("i"), size, tensors, grid)

    def step(self) -> None:
        while len(self._launched) < 2 and (plan := self.scheduler.plan(0.0)) is not None:
            self._launched.append(plan)
        plan = self._launched.popleft()
        outcomes = self.scheduler.commit(self._runner.step(plan), 0.0)
        for sequence, delta in outcomes:
            assert delta.finish_reason != "error", delta
            self.tokens[sequence] += delta.token_ids
        self.gained.append(({sequence for sequence, _ in outcomes}, plan.encodes))


def test_a_stream_gets_a_token_with_each_slice_of_a_picture_beside_it(tmp_path: Path) -> None:
    """And all tokens are those without a limit, where the picture is encoded in one piece."""
    runner, reader = load("qwen3_vl", tmp_path)
    prompts = [
        Prompt(words(9, 3)),
        reader.prompt(Question([words(5, 1), picture(80, 110, 1), words(7, 2)])),
        reader.prompt(Question([picture(60, 40, 2), words(3, 4), picture(50, 50, 3), words(2, 5)])),
    ]
    expected = MediaDriver(runner, reader, budget=400).generate(prompts, NUM_TOKENS)
    engine = Engine(runner, reader, step_seconds=1e-6)  # no time at all: a layer in each step
    stream = engine.submit(prompts[0], 400)
    while len(engine.tokens[stream]) < 3:
        engine.step()
    first = len(engine.gained)
    pictures = [engine.submit(prompt, NUM_TOKENS) for prompt in prompts[1:]]
    while not all(sequence.finished for sequence in pictures):
        engine.step()
    sliced = [step for step in engine.gained[first:] if step[1]]
    assert not stream.finished and all(stream in gained for gained, _ in sliced)
    assert len(sliced) == 3 * runner.media.num_layers and engine.encoder.num_queries == 3
    assert [engine.tokens[sequence] for sequence in pictures] == expected[1:]
    assert engine.tokens[stream][:NUM_TOKENS] == expected[0]
    engine.scheduler.abort([stream])
    assert not passes()
