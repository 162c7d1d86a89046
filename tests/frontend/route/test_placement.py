"""Where a request goes, and what is known of prefixes: against the plain meaning of the words."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.frontend.route.ledger import Work
from pagewire.frontend.route.placement import RUNNING_TOKENS, CoreLoad, choose_core, cost, next_in_turn
from pagewire.frontend.route.prefix_index import PrefixIndex
from pagewire.ipc.wire.block_names import prompt_names
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.messages import EngineInfo, Request
from pagewire.ipc.wire.params import SamplingParams

candidates = st.lists(
    st.builds(
        CoreLoad,
        core=st.integers(0, 9),
        num_cached=st.integers(0, 60).map(lambda blocks: 16 * blocks),
        num_waiting=st.integers(0, 3000),
        num_running=st.integers(0, 40),
        num_placed=st.integers(0, 5),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.core,
)


@given(candidates, st.integers(1, 1000), st.none() | st.integers(0, 9))
@settings(deadline=None)
def test_no_core_is_cheaper_than_the_chosen_one(
    candidates: list[CoreLoad], num_tokens: int, last: int | None
) -> None:
    core = choose_core(num_tokens, candidates, last)
    costs = {candidate.core: cost(candidate, num_tokens) for candidate in candidates}
    assert costs[core] == min(costs.values())
    if costs.get(last if last is not None else -1) == min(costs.values()):
        assert core == last  # sticky where equal
    assert choose_core(num_tokens, candidates[::-1], last) == core  # the order tells nothing


def test_a_prefix_outweighs_a_short_queue_and_a_long_queue_any_prefix() -> None:
    warm, cold = CoreLoad(0, num_cached=480), CoreLoad(1)
    assert choose_core(500, [cold, warm]) == 0
    assert choose_core(500, [cold, CoreLoad(0, num_cached=480, num_waiting=400)]) == 0
    assert choose_core(500, [cold, CoreLoad(0, num_cached=480, num_waiting=600)]) == 1
    assert choose_core(500, [cold, CoreLoad(0, num_cached=480, num_running=480 // RUNNING_TOKENS + 1)]) == 1


def test_equal_cores_are_filled_evenly() -> None:
    placed: Counter[int] = Counter()
    for _ in range(9):
        placed[choose_core(5, [CoreLoad(core, num_placed=placed[core]) for core in range(3)])] += 1
    assert set(placed.values()) == {3}
    assert [next_in_turn([CoreLoad(7), CoreLoad(3)], turn) for turn in range(4)] == [3, 7, 3, 7]


def test_there_must_be_a_core() -> None:
    with pytest.raises(ValueError):
        choose_core(5, [])


operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "expect", "unexpect", "reset", "forget"]),
        st.integers(0, 2),
        st.lists(st.integers(0, 6), max_size=4),
    ),
    max_size=25,
)


@given(operations, st.lists(st.integers(0, 6), max_size=6))
@settings(deadline=None)
def test_the_index_is_that_of_sets(operations: list[tuple[str, int, list[int]]], prompt: list[int]) -> None:
    """Against a set of what each core has reported, and a bag of what is expected there."""
    index = PrefixIndex()
    stored: dict[int, set[bytes]] = {core: set() for core in range(3)}
    expected: dict[int, Counter[bytes]] = {core: Counter() for core in range(3)}
    for action, core, numbers in operations:
        names = [bytes([number]) for number in numbers]
        if action == "store":
            stored[core] |= set(names)
        elif action == "remove":
            stored[core] -= set(names)
        elif action == "expect":
            expected[core].update(names)
        elif action == "unexpect":
            if Counter(names) - expected[core]:
                continue  # only what was expected is taken back
            expected[core] -= Counter(names)
        elif action == "reset":
            stored[core] = set()
        else:
            stored[core], expected[core] = set(), Counter()
        arguments = () if action in ("reset", "forget") else (names,)
        getattr(index, action)(core, *arguments)
    names = [bytes([number]) for number in prompt]
    for core, depth in index.depths(names, range(3)).items():
        there = [name in stored[core] or expected[core][name] > 0 for name in names]
        assert depth == (there.index(False) if False in there else len(names))
        assert index.num_names(core) == len(stored[core])
    for core in range(3):
        index.forget(core)
    assert not index._holders  # nothing is kept of cores that are gone


def test_long_prompts_share_nothing_with_short_ones_of_models_that_tell_them_apart() -> None:
    names = {n: prompt_names(Prompt([1] * n), 16, short_length=40) for n in (32, 40, 41)}
    assert names[32] == names[40] == prompt_names(Prompt([1] * 41), 16)
    assert not set(names[40]) & set(names[41])


def test_a_prompt_with_an_adapter_is_another_prompt(engine_info: EngineInfo) -> None:
    def names(adapter: AdapterSource | None) -> list[bytes]:
        request = Request(1, "r", Prompt([1] * 32), SamplingParams(), 0, adapter=adapter)
        return Work.of(request, engine_info).names

    one, same, other = AdapterSource("a", 1, "/a"), AdapterSource("a", 1, "/a"), AdapterSource("b", 2, "/b")
    assert names(one) == names(same) and len(names(one)) == 2
    assert not set(names(one)) & set(names(other)) and not set(names(one)) & set(names(None))
