"""When drafts are verified, and when a step waits so that they can be: under steps of known duration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sized
from random import Random
from typing import Any

import pytest

from pagewire.engine_core.drafting import drafting as drafting_module
from pagewire.engine_core.drafting.draft import TokenDraft
from pagewire.engine_core.drafting.drafting import Drafting, DraftLimits
from pagewire.engine_core.drafting.ngram import NgramDrafter
from pagewire.engine_core.drafting.open import open_speculation
from pagewire.engine_core.drafting.policy import MeasuredPolicy
from pagewire.engine_core.drafting.suffix import SuffixDrafter
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.speculation import NoSpeculation
from pagewire.ipc.speculative import SpeculativeConfig, speculative_config
from pagewire.ipc.wire.steps import Masks, RowResult, StepPlan, StepResult
from tests.engine_core.schedule.simulation import ModelWorker, RandomPolicy, Simulation

LOOP = "(bcdefghij){1,99}"  # a grammar that leaves no choice, so its output repeats itself
FLAT, LINEAR = 10_000, 0


class TimedWorker(ModelWorker):
    """Steps take `base` + 1000 microseconds for each sample; `late_us` to come if they are planned late."""

    base, late_us = FLAT, 0
    spent = 0  # microseconds by all steps

    def __init__(self, steps: Sized, *sizes: int) -> None:
        super().__init__(*sizes)
        self._in_flight = steps

    def run(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        result = super().run(plan, masks)
        num_samples = sum(row.num_samples for row in plan.rows)
        result.busy_us = self.base + 1000 * num_samples if self.base != FLAT else FLAT + num_samples
        result.idle_us = self.late_us if len(self._in_flight) == 1 else 0
        self.spent += result.busy_us + result.idle_us
        return result


class ErraticWorker(ModelWorker):
    """Steps take anything from a microsecond to 100 seconds, and as long to come."""

    def __init__(self, seed: int, *sizes: int) -> None:
        super().__init__(*sizes)
        self._random = Random(seed)

    def run(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        result = super().run(plan, masks)
        result.busy_us, result.idle_us = (int(10 ** self._random.uniform(0, 8)) for _ in range(2))
        return result


class TimedSimulation(Simulation):
    """With a worker whose steps take a while. plans: all that were made. seed: of an `ErraticWorker`."""

    def __init__(self, base: int, seed: int | None = None, **config: Any) -> None:
        self._base, self._seed = base, seed
        super().__init__(**{"max_model_len": 160, "num_blocks": 160, **config})
        self.made: list[StepPlan] = []

    def _new_worker(self) -> ModelWorker:
        sizes = self.config.num_blocks, self.config.block_size, self.config.stages
        if self._seed is not None:
            return ErraticWorker(self._seed, *sizes)
        worker = TimedWorker(self.scheduler.in_flight, *sizes)
        worker.base = self._base
        return worker

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self.made.append(plan)
        return plan

    @property
    def num_drafts(self) -> int:
        return self.scheduler.speculation.stats.num_drafts

    def loop(self, count: int = 1, **params: Any) -> list[Sequence]:
        """Requests whose output repeats itself."""
        return [
            self.submit(
                [2], max_tokens=99, ignore_eos=True, structured_outputs={"regex": LOOP}, seed=i, **params
            )[0]
            for i in range(count)
        ]


def ngrams(*, pipelined: bool = False, **limits: int) -> Drafting:
    return Drafting(DraftLimits(8, **limits), NgramDrafter(2, 5), MeasuredPolicy(), pipelined=pipelined)


def worker_drafts() -> Drafting:
    return Drafting(DraftLimits(4), None, MeasuredPolicy())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [ngrams, lambda: open_speculation(SpeculativeConfig("suffix", None, 8))])
def test_output_that_repeats_itself_takes_few_steps(
    depth: int, count: int, make: Callable[[], Drafting]
) -> None:
    simulation = TimedSimulation(FLAT, depth=depth, drafter=make())
    simulation.loop(count)
    simulation.drain()
    stats = simulation.scheduler.speculation.stats
    assert len(simulation.made) < 45
    assert stats.acceptance_rate > 0.9 and stats.efficiency > 0.9
    assert stats.num_emitted == stats.num_accepted + stats.num_rows
    assert sum(stats.drafted_at) == stats.num_drafts and sum(stats.accepted_at) == stats.num_accepted
    assert stats.seconds_without > 1.5 * stats.seconds > 0


@pytest.mark.parametrize("count", [1, 4])
def test_stages_run_other_steps_while_drafts_are_verified(count: int) -> None:
    drafter = ngrams(pipelined=True)
    simulation = TimedSimulation(FLAT, depth=2, stages=2, drafter=drafter)
    simulation.loop(count)
    both = 0  # times that two steps are in flight, each with drafts
    while simulation.scheduler.num_unfinished:
        while len(simulation.scheduler.in_flight) < 2 and simulation.plan() is not None:
            pass
        in_flight = [step for step in simulation.scheduler.in_flight if step.num_drafts]
        both += len(in_flight) == 2
        sequences = [sequence for step in in_flight for sequence in step.sequences]
        assert len(set(sequences)) == len(sequences)  # one with drafts in flight waits for its result
        simulation.commit()
    simulation.drain()
    stats = simulation.scheduler.speculation.stats
    assert len(simulation.made) < (45 if count == 1 else 90)
    assert (both > 0) == (count > 1)
    assert stats.acceptance_rate > 0.9
    # Each step is measured by its own drafts.
    assert drafter._acceptance.trust > 0.9 and not drafter._expected


def test_the_sequences_of_all_stages_count_for_the_largest_batch_with_drafts() -> None:
    for most, has_drafts in ((3, False), (4, True)):
        drafter = ngrams(pipelined=True, batch_size=most)
        simulation = TimedSimulation(FLAT, depth=2, stages=2, drafter=drafter)
        simulation.loop(4)
        while len(simulation.made) < 60 and simulation.scheduler.num_unfinished == 4:
            simulation.step()
        assert bool(simulation.num_drafts) == has_drafts
        simulation.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_where_each_token_costs_as_much_as_a_row_there_are_almost_no_drafts(depth: int) -> None:
    simulation = TimedSimulation(LINEAR, depth=depth, drafter=ngrams())
    for _ in range(2):
        simulation.loop(2)
        simulation.drain()
    assert simulation.scheduler.stats.num_steps >= 2 * 90
    assert simulation.num_drafts < 45  # of 396 tokens: those from which it learns what they cost


def test_nothing_changes_where_there_is_nothing_to_propose() -> None:
    """The same plans as without a drafter, one step ahead of what is known."""
    plans = []
    for drafter in (None, Drafting(DraftLimits(8), NgramDrafter(64, 64), MeasuredPolicy())):
        simulation = TimedSimulation(FLAT, depth=2, drafter=drafter)
        for seed in range(4):
            simulation.submit([2, 3, 4 + seed], max_tokens=40, seed=seed)
        simulation.drain()
        plans.append([(plan.step_id, plan.rows, plan.inits, plan.freed_slots) for plan in simulation.made])
    assert plans[0] == plans[1]


def test_the_next_step_waits_only_where_drafts_are_expected() -> None:
    simulation = TimedSimulation(FLAT, depth=2, drafter=ngrams())
    simulation.loop()
    drafted = late = 0
    while simulation.scheduler.num_unfinished:
        simulation.plan()
        step = simulation.scheduler.in_flight[0]
        drafted += bool(step.num_drafts)
        late += step.late and bool(simulation.made[-1].step_id)
        ahead = simulation.plan()
        if step.num_drafts:
            assert ahead is None  # its sequence goes on from where the step ends
        while simulation.results:
            simulation.commit()
    assert drafted > 5 and late - drafted <= 6


def test_a_drafter_in_the_worker_is_asked_where_it_pays() -> None:
    for base, pays in ((FLAT, True), (LINEAR, False)):
        simulation = TimedSimulation(base, depth=2, drafter=worker_drafts())
        for seed in range(3):
            simulation.submit([2, 3], max_tokens=90, seed=seed)
        simulation.drain()
        asked = sum(row.num_drafts > 0 for plan in simulation.made for row in plan.rows)
        assert (asked > 60) == pays and all(
            row.num_drafts <= 4 for plan in simulation.made for row in plan.rows
        )
        assert (len(simulation.made) < 75) == pays


@pytest.mark.parametrize("make", [ngrams, lambda: open_speculation(SpeculativeConfig("suffix", None, 8))])
def test_text_that_repeats_itself_by_chance_alone_is_hardly_slower(make: Callable[[], Drafting]) -> None:
    """Of twelve tokens at random two in a row soon stand somewhere before, so drafts abound, and few are right."""
    spent = []
    for drafter in (None, make()):
        simulation = TimedSimulation(5000, depth=2, drafter=drafter)
        assert isinstance(simulation.worker, TimedWorker)
        simulation.worker.late_us = 1500
        for seed in range(2):
            simulation.submit([2, 3], max_tokens=150, seed=seed)
        simulation.drain()
        spent.append(simulation.worker.spent)
    assert spent[1] < spent[0] / 0.97


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [ngrams, worker_drafts])
def test_some_drafts_are_verified_whatever_is_measured(depth: int, make: Callable[[], Drafting]) -> None:
    for seed in range(12):
        simulation = TimedSimulation(FLAT, seed, depth=depth, drafter=make())
        known = {"structured_outputs": {"regex": "b{32}"}} if make is ngrams else {}
        simulation.submit([2, 3], max_tokens=32, seed=seed, **known)
        simulation.drain()
        assert simulation.scheduler.speculation.stats.num_accepted > 0


def test_the_last_token_needs_no_draft() -> None:
    simulation = TimedSimulation(FLAT, depth=1, drafter=worker_drafts())
    simulation.submit([2, 3], max_tokens=40)
    simulation.drain()
    for count in (1, 2, 3):
        first = len(simulation.made)
        simulation.submit([2, 3], max_tokens=count)
        simulation.drain()
        asked = [row.num_drafts for plan in simulation.made[first:] for row in plan.rows]
        assert asked[0] == count // 3 and not any(asked[1:])


def test_no_drafts_above_a_batch_size_or_a_length() -> None:
    simulation = TimedSimulation(FLAT, drafter=ngrams(batch_size=2))
    simulation.loop(3)
    simulation.drain()
    assert simulation.num_drafts == 0
    simulation.loop(2)
    simulation.drain()
    assert simulation.num_drafts > 0
    simulation = TimedSimulation(FLAT, drafter=ngrams(num_tokens=50))
    (sequence,) = simulation.loop()
    simulation.drain()
    last = max(row.start + row.num_tokens for plan in simulation.made for row in plan.rows if row.drafts)
    assert 30 < last <= 50 + 8 + 1 and len(sequence.token_ids) == 100


class Fixed:
    """A drafter of one draft."""

    num_missing = 0

    def __init__(self, token_ids: list[int]) -> None:
        self._draft = TokenDraft(token_ids, [0.9] * len(token_ids))

    def open(self, token_ids: list[int], *, shared: bool) -> Fixed:
        return self

    def propose(self, limit: int) -> TokenDraft:
        return self._draft

    def learn(self, token_ids: list[int]) -> None:
        """It knows all it needs."""


def test_long_prompts_are_taken_in_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many that come at once, from the prefix cache, do not make the core wait."""
    monkeypatch.setattr(drafting_module, "PORTION", 100)
    simulation = TimedSimulation(FLAT, drafter=ngrams(), max_num_batched_tokens=2000, num_blocks=400)
    group = [simulation.submit([2, 3] * 45, seed=i, max_tokens=30)[0] for i in range(6)]
    seen = []
    while simulation.scheduler.num_unfinished and len(seen) < 12:
        simulation.step()
        missing = [s.drafts.source.num_missing > 60 for s in group if s.drafts and s.drafts.source]
        seen.append(missing.count(False) if missing else 0)
    assert seen[-1] == 6 and max(b - a for a, b in itertools.pairwise(seen)) <= 4
    simulation.drain()


def test_drafts_end_where_the_grammar_forbids_them() -> None:
    class All(RandomPolicy):
        def lengths(self, num_rows: int, reaches: Any, room: int) -> list[int]:
            return [len(reach) for reach in reaches]

        def hopeless(self, num_rows: int, room: int) -> bool:
            return False

    simulation = Simulation(depth=1, drafter=Drafting(DraftLimits(8), Fixed([2, 3, 9, 3]), All(0)))
    simulation.submit([2], max_tokens=8, structured_outputs={"regex": "c{8}"}, ignore_eos=True)
    simulation.step()
    plan = simulation.step()
    assert plan is not None and not plan.rows[0].drafts  # "b" is not "c"
    simulation = Simulation(depth=1, drafter=Drafting(DraftLimits(8), Fixed([3, 1, 9, 3]), All(0)))
    (sequence,) = simulation.submit(
        [2], max_tokens=8, structured_outputs={"regex": "[ac]{8}"}, ignore_eos=True
    )
    simulation.step()
    plan = simulation.step()
    assert plan is not None and plan.rows[0].drafts == [3, 1]
    simulation.drain()
    assert len(simulation.output(sequence)) == 8


def test_what_a_lost_worker_has_proposed_is_forgotten() -> None:
    simulation = TimedSimulation(FLAT, depth=1, drafter=worker_drafts())
    (sequence,) = simulation.submit([2, 3], max_tokens=60)
    while sequence.drafts is None or sequence.drafts.draft is None:
        simulation.step()
    simulation.fail()
    assert sequence.drafts.draft is None
    plan = simulation.plan()
    assert plan is not None and not plan.rows[0].drafts
    simulation.drain()


def test_more_drafts_than_were_asked_for_are_an_error_of_the_worker() -> None:
    simulation = Simulation(depth=1)
    simulation.submit([2, 3])
    plan = simulation.scheduler.plan(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match="returned 2 drafts, at most 0"):
        simulation.scheduler.commit(StepResult(plan.step_id, [RowResult([4], drafts=[5, 6])]), 0.0)


def test_only_outputs_of_sequences_that_share_prefixes_are_learnt() -> None:
    drafter = SuffixDrafter()
    simulation = TimedSimulation(FLAT, drafter=Drafting(DraftLimits(8), drafter, MeasuredPolicy()))
    simulation.submit([2, 3], max_tokens=9, salt="a tenant's")
    simulation.drain()
    assert drafter.history.num_tokens == 0
    simulation.submit([2, 3], max_tokens=9)
    simulation.drain()
    assert drafter.history.num_tokens == 10  # with the end


def test_each_method_has_its_drafter() -> None:
    assert isinstance(open_speculation(None), NoSpeculation)
    kinds = {}
    for name in ("ngram", "suffix"):
        opened = open_speculation(speculative_config({}, {"method": name}))
        assert isinstance(opened, Drafting)
        kinds[name] = type(opened._drafter)
    assert kinds == {"ngram": NgramDrafter, "suffix": SuffixDrafter}
    opened = open_speculation(SpeculativeConfig("mtp", None, 1))
    assert isinstance(opened, Drafting) and opened._drafter is None
