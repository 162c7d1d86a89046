"""How many drafts pay, under costs that are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagewire.engine_core.drafting.acceptance import FIRST_RATIO, Acceptance, Ratio, reaches
from pagewire.engine_core.drafting.costs import MeasuredStep, WaitCost
from pagewire.engine_core.drafting.draft import TokenDraft
from pagewire.engine_core.drafting.policy import NUM_TRIALS, PROBE_INTERVAL, MeasuredPolicy
from pagewire.engine_core.drafting.state import SequenceDrafts
from pagewire.engine_core.schedule.step_costs import FIRST_FEW, StepCosts, size_class


def observe(
    policy: MeasuredPolicy,
    num_rows: int,
    num_samples: int,
    seconds: float,
    idle: float = 0.0,
    *,
    drafted: bool = False,
    num_tokens: int | None = None,
) -> None:
    """A step; with drafts it verifies them, and all are right unless `num_tokens` says how many tokens it gave."""
    num_tokens = num_samples if num_tokens is None else num_tokens
    policy.observe(MeasuredStep(num_rows, num_samples, num_tokens, seconds, idle, False, drafted, drafted))


def measured(cost: Callable[[int], float], gap: float = 0.0, most: int = 200) -> MeasuredPolicy:
    """A policy that has seen steps of all sizes."""
    policy = MeasuredPolicy()
    for _ in range(20):
        for size in range(1, most):
            observe(policy, size, size, cost(size))
            observe(policy, 1, size, cost(size), gap, drafted=True)
    return policy


def chain(chance: float, count: int) -> list[float]:
    return [chance ** (i + 1) for i in range(count)]


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.3, 0.7, 0.95])
def test_the_length_is_that_of_most_tokens_in_a_second(num_rows: int, chance: float) -> None:
    """Within the margin, compared with every equal length of all rows' drafts."""

    def cost(size: int) -> float:
        return 0.010 + 0.0004 * size

    def rate(lengths: list[int]) -> float:
        return sum(sum(chance**i for i in range(k + 1)) for k in lengths) / cost(num_rows + sum(lengths))

    chosen = measured(cost).lengths(num_rows, [chain(chance, 10)] * num_rows, 1000)
    assert 1.04 * rate(chosen) >= max(rate([k] * num_rows) for k in range(11))
    assert not any(chosen) or rate(chosen) > rate([0] * num_rows)


def test_none_pay_where_each_token_costs_as_much_as_a_row() -> None:
    policy = measured(lambda size: 0.001 * size)
    for num_rows in (1, 4, 64):
        assert policy.hopeless(num_rows, 100)
        assert policy.lengths(num_rows, [chain(0.9, 8)] * num_rows, 100) == [0] * num_rows


def test_what_waiting_costs_is_weighed() -> None:
    gain = chain(0.5, 3)
    assert any(measured(lambda size: 0.010).lengths(1, [gain], 9))
    assert not any(measured(lambda size: 0.010, gap=0.010).lengths(1, [gain], 9))


def test_one_sequence_gets_what_others_cannot_use() -> None:
    policy = measured(lambda size: 0.010 + 0.001 * size)
    drafts = [chain(0.95, 6), chain(0.1, 6), []]
    first, *others = policy.lengths(3, drafts, 100)
    assert 2 < first <= 6 and others == [0, 0]
    assert policy.lengths(3, drafts, 2) == [2, 0, 0]


def test_one_sequence_does_not_slow_down_many() -> None:
    """It would give the most tokens in a second, at the cost of every other sequence."""
    policy = measured(lambda size: 0.010 + 0.001 * size)
    sure = chain(0.98, 12)
    assert policy.lengths(1, [sure], 100)[0] > 6
    assert policy.lengths(16, [sure] + [[]] * 15, 100)[0] <= 2


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    policy = MeasuredPolicy()
    assert policy.hopeless(1, 10) and policy.lengths(1, [chain(0.9, 5)], 10) == [0] and policy.seconds(1) == 0


def decide(
    cost: Callable[[int], float], count: int, slow: dict[tuple[bool, int], float], longest: int = 8
) -> list[bool]:
    """Whether each of `count` steps of one row has drafts, of 1 to `longest` tokens in turn.

    slow: by which factor a step takes longer than it costs, by whether it has drafts and its number among those.
    """
    policy, drafted = MeasuredPolicy(), list[bool]()
    for number in range(count):
        draft = chain(0.9, 1 + number % longest)
        [length] = [0] if policy.hopeless(1, 8) else policy.lengths(1, [draft], 8)
        factor = slow.get((length > 0, drafted.count(length > 0)), 1.0)
        observe(policy, 1, 1 + length, cost(1 + length) * factor, 0.1 * (factor > 1), drafted=length > 0)
        drafted.append(length > 0)
    return drafted


@pytest.mark.parametrize("longest", [1, 8])
@pytest.mark.parametrize("slow", [(False, 0), (True, 0), (True, 1), (True, 7)])
def test_a_slow_step_at_the_beginning_does_not_stop_drafts_that_pay(
    slow: tuple[bool, int], longest: int
) -> None:
    """Of `PROBE_INTERVAL` steps and a few, less than after which it would be noticed otherwise."""
    drafted = decide(lambda size: 0.010 + 0.0001 * size, PROBE_INTERVAL, {slow: 50.0}, longest)
    assert sum(drafted) >= PROBE_INTERVAL - 20


@pytest.mark.parametrize("longest", [1, 8])
def test_drafts_that_never_pay_are_tried_a_few_times(longest: int) -> None:
    drafted = decide(lambda size: 0.010 * size, PROBE_INTERVAL, {}, longest)
    assert sum(drafted) == NUM_TRIALS and sum(drafted[:20]) == NUM_TRIALS


def test_drafts_that_are_asked_for_and_never_verified_are_not_tried_for_ever() -> None:
    policy, asked = MeasuredPolicy(), 0
    for _ in range(PROBE_INTERVAL):
        [length] = policy.lengths(1, [chain(0.9, 4)], 8)
        policy.observe(MeasuredStep(1, 1, 1, 0.05 if length else 0.01, 0.0, False, length > 0, False))
        asked += length > 0
    assert NUM_TRIALS < asked <= 64


@pytest.mark.parametrize("num_rows", [1, 16])
def test_drafts_that_seem_to_pay_and_do_not_are_given_up(num_rows: int) -> None:
    """Each waits a fifth of a step and is wrong, whatever its reach says."""
    policy, spent = MeasuredPolicy(), 0.0
    for _ in range(3000):
        reaches = [chain(0.6, 4)] * num_rows
        num_drafts = 0 if policy.hopeless(num_rows, 99) else sum(policy.lengths(num_rows, reaches, 99))
        idle, drafted = (0.002, True) if num_drafts else (0.0, False)
        observe(policy, num_rows, num_rows + num_drafts, 0.010, idle, drafted=drafted, num_tokens=num_rows)
        spent += 0.010 + idle
    assert spent < 1.02 * 3000 * 0.010


def test_drafts_that_have_not_paid_are_tried_again_when_they_would() -> None:
    policy, drafted = MeasuredPolicy(), list[bool]()
    for number in range(3000):
        [length] = policy.lengths(1, [chain(0.6, 4)], 8)
        num_tokens = 1 if number < 1000 else 1 + length
        idle = 0.002 if length else 0.0
        observe(policy, 1, 1 + length, 0.010, idle, drafted=length > 0, num_tokens=num_tokens)
        drafted.append(length > 0)
    assert sum(drafted[:1000]) < 120 and sum(drafted[2000:]) > 900


def test_a_step_without_drafts_is_measured_now_and_then() -> None:
    """The machine has become three times faster, and drafts that paid do so no longer."""
    policy, drafted = MeasuredPolicy(), list[bool]()
    for number in range(1500):
        [length] = policy.lengths(1, [chain(0.9, 1)], 8)
        plain = 0.030 if number < 500 else 0.010
        observe(policy, 1, 1 + length, 0.031 if length else plain, drafted=length > 0)
        drafted.append(length > 0)
    assert sum(drafted[:500]) > 480 and sum(drafted[1200:]) < 20


def test_it_is_tried_again_now_and_then_and_seldom() -> None:
    policy = measured(lambda size: 0.001 * size)
    tried = 0
    for _ in range(10 * PROBE_INTERVAL):
        if not policy.hopeless(4, 40) and any(policy.lengths(4, [chain(0.9, 8)] * 4, 40)):
            tried += 1
            observe(policy, 4, 12, 0.012, drafted=True)
    assert 5 <= tried <= 10


def test_a_machine_that_has_become_faster_is_noticed() -> None:
    policy = measured(lambda size: 0.001 * size)
    drafted = 0
    for _ in range(40 * PROBE_INTERVAL):
        lengths = [0] if policy.hopeless(1, 8) else policy.lengths(1, [chain(0.9, 8)], 8)
        observe(policy, 1, 1, 0.001)
        if lengths[0]:
            observe(policy, 1, 1 + lengths[0], 0.001, drafted=True)
            drafted += 1
    assert drafted > PROBE_INTERVAL


def test_costs_follow_a_level_that_all_sizes_share() -> None:
    costs = StepCosts()
    for _ in range(50):
        for size in (1, 4, 16):
            costs.observe(size, 0.001 * (10 + size))
    assert costs.seconds(4) == pytest.approx(0.014, rel=0.02)
    assert costs.seconds(10) == pytest.approx(0.020, rel=0.02)  # on the line between 4 and 16
    for _ in range(50):
        costs.observe(1, 0.022)  # twice what it was
    assert costs.seconds(1) == pytest.approx(0.022, rel=0.02)
    assert costs.seconds(16) > 0.035


def test_one_slow_step_changes_little() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(1, 0.01)
    costs.observe(1, 10.0)
    assert costs.seconds(1) < 0.025


def test_the_first_few_measurements_count_as_their_least() -> None:
    costs = StepCosts()
    for seconds in (0.5, 0.02, 0.01):
        assert not costs.settled(1)
        costs.observe(1, seconds)
        assert costs.seconds(1) == pytest.approx(seconds)
    assert costs.settled(1) and FIRST_FEW == 3
    costs.observe(8, 5.0)  # says nothing yet
    assert costs.seconds(8) < 0.02
    costs.observe(8, 0.08)
    costs.observe(8, 0.09)
    assert costs.seconds(8) == pytest.approx(0.08)


def test_one_long_wait_changes_little() -> None:
    wait = WaitCost()
    for seconds in (0.1, 0.001, 0.001):
        wait.observe(seconds)
    assert wait.seconds == 0.001
    wait.observe(0.1)
    assert wait.seconds < 0.007
    for _ in range(5):
        wait.observe(0.001)
    assert wait.seconds < 0.003


def test_sizes_are_their_own_up_to_eight_then_four_to_an_octave() -> None:
    assert [size_class(n) for n in (1, 2, 7, 8)] == [1, 2, 7, 8]
    assert sorted({size_class(n) for n in range(16, 65)}) == [16, 20, 24, 28, 32, 40, 48, 56, 64]


def test_a_request_starts_from_what_others_have_shown() -> None:
    acceptance = Acceptance()
    assert acceptance.of(Ratio()) == pytest.approx(FIRST_RATIO)
    other = Ratio()
    for _ in range(3000):
        acceptance.add(other, 0.9, False)
    own = Ratio()
    assert acceptance.of(own) < 0.1
    for _ in range(40):
        acceptance.add(own, 0.9, True)
    assert acceptance.of(own) > 0.8 > acceptance.of(other)
    for _ in range(5000):
        acceptance.recover(other)
    assert acceptance.of(other) > 0.5


def test_a_draft_is_compared_with_tokens_that_come_one_by_one() -> None:
    acceptance, state = Acceptance(), SequenceDrafts(None, 9)
    state.draft = TokenDraft([1, 2, 3, 4], [0.9] * 4)
    state.take([1], acceptance)
    assert state.draft == TokenDraft([2, 3, 4], [0.9] * 3)
    state.take([2, 3, 9, 5], acceptance)
    assert state.draft is None and state.ratio.right == pytest.approx(3 * 0.95**1, rel=0.1)
    state.draft = TokenDraft([7], [0.5])
    state.take([7, 8], acceptance)
    assert state.draft is None


def test_reaches_are_of_a_token_and_all_before_it() -> None:
    draft = TokenDraft([1, 2, 3], [0.5, 0.5, 0.9])
    assert reaches(draft, 1.0) == pytest.approx([0.5, 0.25, 0.225])
    assert reaches(draft, 2.0, 1) == pytest.approx([0.98**2, 0.98**3])
