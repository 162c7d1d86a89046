"""Steps end in time while a stream waits: with a worker whose times are given, in plans, and in what is learnt."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step_time import (
    LEAST_SHARE,
    ChunkWork,
    EncoderRate,
    StepLimit,
    StepRates,
    pairs,
)
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.steps import StepPlan
from tests.engine_core.schedule.simulation import Simulation, expected

LIMIT, BLOCK = 0.2, 16
FIRST_FEW = 4  # plans with chunks before what they take is known; two are in flight


class TimedWorker:
    """The times of a machine's steps: some for each step, each row that decodes, and each token of a chunk, which
    grow with its context.

    Attributes:
        steps: seconds of each plan, with the tokens of its chunks. plans: all that it has run.
    """

    def __init__(
        self, step: float = 0.02, row: float = 0.001, token: float = 0.002, pair: float = 1e-6
    ) -> None:
        self.step, self.row, self.token, self.pair = step, row, token, pair
        self.steps: list[tuple[float, list[int]]] = []
        self.plans: list[StepPlan] = []

    def __call__(self, plan: StepPlan) -> float:
        seconds, sizes = self.step, []
        for row in plan.rows:
            if row.num_tokens == 1 and row.num_samples:
                seconds += self.row
            else:
                sizes.append(row.num_tokens)
                seconds += self.token * row.num_tokens + self.pair * pairs(row.start, row.num_tokens)
        self.steps.append((seconds, sizes))
        self.plans.append(plan)
        return seconds

    @property
    def chunks(self) -> list[tuple[float, list[int]]]:
        """The steps that have any."""
        return [step for step in self.steps if step[1]]


def limited(worker: TimedWorker, step_seconds: float = LIMIT, **config: Any) -> Simulation:
    """A scheduler of steps of 1,024 tokens over this worker."""
    sizes = {"max_model_len": 2048, "num_blocks": 200, "block_size": BLOCK, "max_num_batched_tokens": 1024}
    simulation = Simulation(**{**sizes, "step_seconds": step_seconds, **config})
    simulation.worker.seconds_of = worker
    return simulation


def with_stream(worker: TimedWorker, **config: Any) -> Simulation:
    """The same while a sequence generates, and what has run is forgotten."""
    simulation = limited(worker, **config)
    simulation.submit([2, 3, 4], max_tokens=500)
    for _ in range(8):
        simulation.step()
    worker.steps.clear()
    return simulation


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(2, 12), k=length)


@pytest.mark.parametrize("token", [0.0001, 0.001, 0.002, 0.006])
@pytest.mark.parametrize("pair", [0.0, 1e-6])
def test_a_prompt_beside_a_stream_runs_in_chunks_that_end_in_time(token: float, pair: float) -> None:
    worker = TimedWorker(token=token, pair=pair)
    simulation = with_stream(worker)
    (long,) = simulation.submit(prompt_of(1400), max_tokens=2)
    while long in simulation.live():
        simulation.step()
    assert sum(sum(sizes) for _, sizes in worker.chunks) == 1400
    assert all(len(plan) == 1 for _, plan in worker.chunks)
    assert max(seconds for seconds, _ in worker.chunks) <= 2 * LIMIT
    settled = worker.chunks[2 * FIRST_FEW : -1]
    assert all(seconds <= 1.1 * LIMIT for seconds, _ in settled)
    assert all(seconds >= 0.6 * LIMIT or sizes == [BLOCK] for seconds, sizes in settled)
    assert simulation.output(long) == expected(long)[0]
    simulation.drain()


def test_a_prompt_that_holds_nobody_up_has_all_of_the_budget() -> None:
    worker = TimedWorker()
    simulation = limited(worker)
    simulation.submit(prompt_of(1400), max_tokens=1)
    simulation.drain()
    assert [sizes for _, sizes in worker.chunks] == [[1024], [376]]
    simulation = limited(worker := TimedWorker())
    pool = PoolingParams(task="embed")
    for seed in range(2):  # what pools waits for no token
        simulation.submit(prompt_of(1400, seed), pool=pool)
    simulation.drain()
    assert [sum(sizes) for _, sizes in worker.chunks] == [1024, 1024, 752]


def test_no_limit() -> None:
    worker = TimedWorker()
    simulation = with_stream(worker, step_seconds=0.0)
    (long,) = simulation.submit(prompt_of(1400), max_tokens=1)
    while long in simulation.live():
        simulation.step()
    assert [sizes for _, sizes in worker.chunks] == [[1023], [377]]
    assert simulation.scheduler.limit.num_over == 0


def test_the_first_step_of_a_long_prompt_is_small_even_if_steps_were_cheap() -> None:
    worker = TimedWorker(token=0.02)  # far more than a step that decodes lets expect
    simulation = limited(worker)
    simulation.submit([2], max_tokens=500)  # one token says next to nothing of chunks
    for _ in range(8):
        simulation.step()
    (long,) = simulation.submit(prompt_of(300), max_tokens=1)
    while long in simulation.live():
        simulation.step()
    assert max(sum(sizes) for _, sizes in worker.chunks) <= 4 * BLOCK
    assert all(sizes == [BLOCK] for _, sizes in worker.chunks[FIRST_FEW:-1])


def test_a_prompt_goes_on_beside_rows_that_take_all_of_the_time() -> None:
    worker = TimedWorker(step=0.3)
    simulation = with_stream(worker)
    over = simulation.scheduler.limit.num_over
    (long,) = simulation.submit(prompt_of(800), max_tokens=1)
    while long in simulation.live():
        simulation.step()
    fair = LEAST_SHARE * worker.step / worker.token
    for _, (size,) in worker.chunks[2 * FIRST_FEW : -1]:
        assert 0.4 * fair <= size <= 1.2 * fair
    over = simulation.scheduler.limit.num_over - over
    assert abs(len(worker.steps) - over) <= 2  # those in flight at either end


def test_later_prompts_do_not_pass_one_that_was_cut() -> None:
    worker = TimedWorker()
    simulation = with_stream(worker)
    first, second = (simulation.submit(prompt_of(n, n), max_tokens=1)[0] for n in (900, 40))
    while first in simulation.live():
        simulation.step()
    done = 0
    for _, sizes in worker.chunks:
        assert len(sizes) == 1 or done + sizes[0] == 900
        done += sum(sizes)
    while second in simulation.live():
        simulation.step()
    simulation.drain()


def test_streams_behind_a_prompt_in_order_have_their_rows_in_each_step() -> None:
    worker = TimedWorker()
    simulation = limited(worker, policy="priority")
    stream = simulation.submit([2, 3, 4], max_tokens=500, priority=5)[0]
    for _ in range(8):
        simulation.step()
    long = simulation.submit(prompt_of(900), max_tokens=1, priority=0)[0]
    while long in simulation.live():
        plan = simulation.step()
        assert plan is not None and stream.slot in simulation.slots_of(plan)


def test_a_machine_that_slows_down_gets_smaller_chunks() -> None:
    worker = TimedWorker(token=0.001)
    simulation = with_stream(worker)
    (long,) = simulation.submit(prompt_of(2000), max_tokens=1)
    while long.computed < 800:
        simulation.step()
    worker.token *= 3
    worker.steps.clear()
    while long in simulation.live():
        simulation.step()
    assert max(seconds for seconds, _ in worker.chunks) < 3.1 * LIMIT
    assert max(seconds for seconds, _ in worker.chunks[6:]) < 1.1 * LIMIT


@pytest.mark.parametrize("length", [40, 300])
def test_a_picture_that_is_not_cut_runs_as_a_whole(length: int) -> None:
    worker = TimedWorker(token=0.02)
    simulation = with_stream(worker)
    picture = Media(20, length, b"cat", Tensor("uint8", (0,), b""))
    (long,) = simulation.submit(prompt_of(length + 60), max_tokens=1, media=[picture])
    while long in simulation.live():
        simulation.step()
    assert [length] in [sizes for _, sizes in worker.chunks]
    assert simulation.output(long) == expected(long)[0]


def test_a_step_that_encodes_a_medium_whole_says_nothing_of_slices() -> None:
    limit = StepLimit(LIMIT, BLOCK)
    work = ChunkWork()
    work.add(0, 64)
    limit.measure(work, 1, 0.1, 5.0)
    assert limit.rates.known and limit.num_over == 1
    assert limit.encoder.fitting(10, 1.0) == 0
    limit.measure(ChunkWork(), 0, 0.0)  # it is not known what it took
    assert limit.num_over == 1


# ---------------------------------------------------------------- slices of an encoder's pass

LAYERS = 12


def picture_of(size: int, start: int = 3, name: bytes = b"c") -> Media:
    """A picture of some embeddings, in as many places; `features_of` makes one of each byte of its name."""
    return Media(start, size, name * size, Tensor("uint8", (0,), b""))


def with_encoder(layer_seconds: float, streaming: bool = True, **config: Any) -> Simulation:
    """A scheduler whose worker encodes: a layer takes this long for each embedding.

    streaming: a sequence generates beside it.
    """
    worker = TimedWorker(token=0.0002)
    config = {"encoder_capacity": 500, "encoder_layers": LAYERS, **config}
    simulation = with_stream(worker, **config) if streaming else limited(worker, **config)
    simulation.worker.layer_seconds = layer_seconds
    return simulation


def slices_of(plan: StepPlan) -> list[tuple[bool, int]]:
    """Whether each pass of a plan begins, and where it stops."""
    return [(bool(encode.features), encode.until) for encode in plan.encodes]


def run_until_ended(simulation: Simulation, sequence: Sequence) -> list[StepPlan]:
    """The plans up to a sequence's end."""
    worker = simulation.worker.seconds_of
    assert isinstance(worker, TimedWorker)
    first = len(worker.plans)
    while sequence in simulation.live():
        simulation.step()
    return worker.plans[first:]


@pytest.mark.parametrize("layer_seconds", [0.0001, 0.0005, 0.002])
def test_a_picture_beside_a_stream_is_encoded_in_slices_that_end_in_time(layer_seconds: float) -> None:
    simulation = with_encoder(layer_seconds)
    stream = simulation.live()[0]
    over = simulation.scheduler.limit.num_over
    for size in (50, 100, 100):  # what slices take is learnt from the first
        (sequence,) = simulation.submit(
            [2] * (size + 5), max_tokens=2, media=[picture_of(size, name=b"%d" % (simulation.num_added % 10))]
        )
        plans = run_until_ended(simulation, sequence)
        slices = [each for plan in plans for each in slices_of(plan)]
        ends = [until or LAYERS for _, until in slices]
        assert ends == sorted(set(ends)) and ends[-1] == LAYERS
        assert [begins for begins, _ in slices] == [True] + [False] * (len(slices) - 1)
        assert all(stream.slot in simulation.slots_of(plan) for plan in plans if plan.encodes)
        assert simulation.output(sequence) == expected(sequence)[0]
        seconds = [layer_seconds * size * (end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
        one = layer_seconds * size
        assert max(seconds) <= max(0.9 * LIMIT, one)
        if size == 100 and one < LIMIT / 2:
            assert len(slices) <= 2 + sum(seconds) / (0.5 * LIMIT)
    assert simulation.scheduler.limit.num_over - over <= (12 * 3 if layer_seconds == 0.002 else 0)


def test_a_picture_that_holds_nobody_up_is_encoded_in_one_piece() -> None:
    for simulation in (
        with_encoder(0.01, streaming=False),
        with_encoder(0.01, step_seconds=0.0),
        with_encoder(0.01, encoder_layers=0),
    ):
        (sequence,) = simulation.submit([2] * 60, max_tokens=2, media=[picture_of(50)])
        plans = run_until_ended(simulation, sequence)
        assert [slices_of(plan) for plan in plans if plan.encodes] == [[(True, 0)]]
        (encoding,) = [plan for plan in plans if plan.encodes]
        assert any(row.entries for row in encoding.rows)


def test_what_is_left_of_a_picture_runs_in_one_piece_when_the_stream_has_ended() -> None:
    simulation = with_encoder(0.01)
    stream = simulation.live()[0]
    (sequence,) = simulation.submit([2] * 60, max_tokens=2, media=[picture_of(50)])
    for _ in range(3):
        simulation.step()
    assert simulation.worker.begun
    simulation.abort([stream])
    plans = run_until_ended(simulation, sequence)
    slices = [each for plan in plans for each in slices_of(plan)]
    assert slices[-1] == (False, 0) and len(slices) <= 3
    assert simulation.output(sequence) == expected(sequence)[0]


def test_a_picture_of_one_embedding_at_the_end_of_its_prompt_waits_for_nobody() -> None:
    """Its sequence waits for its own next token: that alone must not have the picture encoded in slices."""
    simulation = with_encoder(0.01)
    stream = simulation.live()[0]
    (sequence,) = simulation.submit([2], max_tokens=2, media=[picture_of(1, start=0)])
    simulation.step()
    assert simulation.worker.begun
    simulation.abort([stream])
    run_until_ended(simulation, sequence)
    assert simulation.output(sequence) == expected(sequence)[0]


def test_a_pass_that_no_sequence_needs_any_more_ends_when_another_one_begins() -> None:
    simulation = with_encoder(0.01)
    (first,) = simulation.submit([2] * 60, max_tokens=2, media=[picture_of(50)])
    for _ in range(3):
        simulation.step()
    assert len(simulation.worker.begun) == 1
    simulation.abort([first])
    (second,) = simulation.submit([2] * 60, max_tokens=2, media=[picture_of(40, name=b"d")])
    freed = [entry for plan in run_until_ended(simulation, second) for entry in plan.freed_entries]
    assert len(freed) == 1 and not simulation.worker.begun
    assert simulation.output(second) == expected(second)[0]


def test_sequences_with_the_same_picture_share_its_pass() -> None:
    simulation = with_encoder(0.002)
    submitted = [
        simulation.submit([2, n, *[2] * 50], max_tokens=2, media=[picture_of(40)])[0] for n in (3, 4)
    ]
    plans = [plan for sequence in submitted for plan in run_until_ended(simulation, sequence)]
    assert sum(begins for plan in plans for begins, _ in slices_of(plan)) == 1
    encoder = simulation.encoder
    assert encoder is not None and (encoder.num_queries, encoder.num_hits) == (2, 1)


def test_later_prompts_do_not_pass_a_picture_that_is_encoded() -> None:
    simulation = with_encoder(0.001)
    (first,) = simulation.submit([2] * 60, max_tokens=2, media=[picture_of(50)])
    while not simulation.worker.begun:
        simulation.step()
    (second,) = simulation.submit(prompt_of(100), max_tokens=1)
    while simulation.worker.begun:
        assert second.computed == 0
        simulation.step()
    run_until_ended(simulation, first)
    simulation.abort([simulation.live()[0]])
    simulation.drain()


def test_a_picture_with_which_the_worker_crashes_is_blamed_for_it() -> None:
    simulation = with_encoder(0.01)
    stream = simulation.live()[0]
    (sequence,) = simulation.submit([2] * 60, max_tokens=2, media=[picture_of(50)])
    while not simulation.worker.begun:
        simulation.step()
    simulation.fail()
    assert sequence.suspicion.num_in_row == 1 and stream.suspicion.num_in_row == 1
    simulation.abort([stream])
    simulation.drain()
    assert simulation.output(sequence) == expected(sequence)[0]


@pytest.mark.parametrize("speed", [0.01, 1.0, 30.0])
def test_the_rate_of_an_encoder_follows_what_slices_take(speed: float) -> None:
    rng, rate = Random(3), EncoderRate()
    for factor in (1.0, 3.0, 0.5):
        for _ in range(100):
            num_encoded = rng.randint(1, 20) * 100
            rate.observe(num_encoded, factor * speed * 1e-4 * num_encoded)
        assert rate.fitting(100, factor * speed * 0.05) in (4, 5)
    assert rate.fitting(100, speed * 1e6) == 4 * rate.largest // 100


@pytest.mark.parametrize("speed", [0.01, 1.0, 30.0])
def test_rates_follow_what_steps_take(speed: float) -> None:
    """Whatever rows, tokens and contexts have cost so far, a few hundred steps tell what they cost."""
    rng, rates = Random(3), StepRates()
    for _ in range(600):
        rows, tokens = rng.randint(1, 40), rng.choice([0, 0, 16, 64, 200])
        context = rng.randint(0, 20_000)
        seconds = speed * (0.02 + 0.0005 * rows + 0.002 * tokens + 2e-7 * pairs(context, tokens))
        rates.observe(rows, tokens, pairs(context, tokens), seconds)
    for rows, tokens, context in ((1, 0, 0), (40, 0, 0), (1, 100, 0), (20, 100, 15_000), (1, 30, 20_000)):
        truth = speed * (0.02 + 0.0005 * rows + 0.002 * tokens + 2e-7 * pairs(context, tokens))
        assert rates.seconds(rows, tokens, pairs(context, tokens)) == pytest.approx(truth, rel=0.15)
        left = rates.seconds(0, 100, pairs(context, 100)) - rates.seconds(0)
        assert rates.fitting(context, left) in (99, 100)
