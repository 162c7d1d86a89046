"""Sequences with equal parameters have one set of tables, which change none of their tokens."""

from __future__ import annotations

import copy
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import SlotInit, StepPlan, ToWorker
from pagewire.workers.batch.slots import Slots
from pagewire.workers.sample import logit_edits, token_tables
from pagewire.workers.sample.sampler import SamplingSlot, sample

VOCAB = 50
NUM_SLOTS = 32
# Every list of tokens, and penalties; tokens outside the vocabulary among them.
EDITS: dict[str, Any] = {
    "logit_bias": {3: 4.0, 7: -2.5, VOCAB + 1: 9.0},
    "bad_words_token_ids": [[4], [5, 6], [2, 5, 9], [6, VOCAB + 3]],
    "min_tokens": 3,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "temperature": 0.8,
    "max_tokens": 99,
}


def plan_of(tasks: list[SamplingParams], stop_ids: list[int] | None = None) -> StepPlan:
    """A plan that fills a slot for each task, as a worker decodes it."""
    inits = [
        SlotInit(slot, [slot % VOCAB, 5], 2, [0], task, seed=slot, stop_ids=stop_ids or [])
        for slot, task in enumerate(tasks)
    ]
    codec: Codec[ToWorker] = Codec(ToWorker, trusts=True)
    plan = codec.decode(codec.encode(StepPlan(0, [], inits)))
    assert isinstance(plan, StepPlan)
    return plan


def new_slots() -> Slots:
    return Slots(NUM_SLOTS, 16, 4, VOCAB)


def long_params(n: int = 1) -> SamplingParams:
    """Parameters that name ten thousand tokens."""
    bad_words = [[i % 40, i // 40 % 40, i % 7] for i in range(2000)]
    bias = {i: i / 100 for i in range(4000)}
    return SamplingParams(bad_words_token_ids=bad_words, logit_bias=bias, n=n)


def test_slots_with_equal_parameters_have_one_set_of_tables() -> None:
    slots = new_slots()
    slots.apply(plan_of([SamplingParams(**EDITS, seed=seed) for seed in range(3)], stop_ids=[1, 2]))
    slots.apply(StepPlan(1, [], [plan_of([SamplingParams(**EDITS)] * 9, stop_ids=[1, 2]).inits[8]]))
    tables = [slot.edits.tables for slot in slots.sampling.values()]
    assert len(tables) == 4 and all(each is tables[0] for each in tables)


def test_many_slots_with_equal_parameters_take_memory_once() -> None:
    def grown(num_slots: int) -> int:
        """Bytes that slots hold when the plans that filled them are gone."""
        plans = [plan_of([SamplingParams()] * slot + [long_params()]) for slot in range(num_slots)]
        for plan in plans:
            del plan.inits[:-1]
        slots = new_slots()
        gc.collect()
        tracemalloc.start()
        for plan in plans:
            slots.apply(plan)
        del plans, plan
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size

    one, many = grown(1), grown(NUM_SLOTS)
    assert one > 100_000 and many < 1.5 * one


def test_tables_end_with_the_last_slot_that_has_them() -> None:
    slots = new_slots()
    slots.apply(plan_of([long_params()] * 3))
    before = set(token_tables._tables)
    slots.apply(StepPlan(1, [], [], freed_slots=[0, 2]))
    gc.collect()
    assert set(token_tables._tables) == before
    slots.apply(StepPlan(2, [], [], freed_slots=[1]))
    gc.collect()
    assert len(before - set(token_tables._tables)) == 1


def test_a_slot_keeps_no_list_of_its_parameters() -> None:
    params = SamplingParams(**EDITS, allowed_token_ids=[1, 2, 3], top_k=3, logprobs=2)
    given = copy.deepcopy(params)
    slot = SamplingSlot(params, 0, [8], np.arange(5), 5, 5, VOCAB)
    assert params == given, "parameters of the caller were changed"
    for name in params.__struct_fields__:
        kept = getattr(slot.params, name)
        assert (
            kept is None if isinstance(getattr(given, name), (list, dict)) else kept == getattr(given, name)
        )
    plain = SamplingParams(top_k=3)
    assert SamplingSlot(plain, 0, [8], np.arange(5), 5, 5, VOCAB).params is plain


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": {3: 4.0, 7: -2.5}},
        {"logit_bias": {3: 4.5, 7: -2.5, VOCAB + 1: 9.0}},
        {"bad_words_token_ids": [[4], [5, 6], [2, 5], [9]]},
        {"bad_words_token_ids": [[4, 5, 6, 2, 5, 9]]},
        {"bad_words_token_ids": None},
        {"allowed_token_ids": [4]},
    ],
)
def test_different_parameters_are_not_mixed(change: dict[str, Any]) -> None:
    slots = new_slots()
    slots.apply(plan_of([SamplingParams(**EDITS), SamplingParams(**EDITS | change)], stop_ids=[1, 2]))
    assert slots.sampling[0].edits.tables is not slots.sampling[1].edits.tables


def test_neither_other_stop_tokens_nor_another_vocabulary_have_the_same_tables() -> None:
    params, tokens = SamplingParams(**EDITS), np.arange(5)
    made = [
        SamplingSlot(params, 0, stop_ids, tokens, 5, 5, vocab_size).edits.tables
        for stop_ids, vocab_size in (
            ([1, 2], VOCAB),
            ([1], VOCAB),
            ([], VOCAB),
            ([1, 2], 7),
            ([1, 2, 7], VOCAB),
        )
    ]
    assert len(set(map(id, made))) == len(made)
    assert [len(tables.bias_ids) for tables in made] == [2, 2, 2, 1, 2]


def run(slots: list[SamplingSlot], num_tokens: int) -> list[list[int]]:
    """The tokens that slots draw, from logits that are a function of slot and position."""
    drawn: list[list[int]] = [[] for _ in slots]
    for position in range(num_tokens):
        logits = torch.stack([
            torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * index + position))
            for index in range(len(slots))
        ])  # fmt: skip
        output = sample(logits, slots)
        assert not output.errors
        for slot, tokens, token_id in zip(slots, drawn, output.token_ids, strict=True):
            slot.append(token_id)
            tokens.append(token_id)
    return drawn


def test_shared_tables_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of parameters in turns, with drafts in between that must leave no trace."""
    kinds = [EDITS, EDITS | {"logit_bias": {3: 1.0}, "allowed_token_ids": [*range(40)]}]

    def slots() -> list[SamplingSlot]:
        return [
            SamplingSlot(SamplingParams(**kinds[i % 2]), i, [1, 2], np.array([5, i, 2, 5]), 4, 4, VOCAB)
            for i in range(8)
        ]

    shared = slots()
    assert len({id(slot.edits.tables) for slot in shared}) == 2
    first = run(shared, 10)
    for slot in shared:
        ahead = slot.ahead([5, 6, 4])
        assert ahead.edits.tables is slot.edits.tables and ahead.edits.forbidden().tolist()
    both = [a + b for a, b in zip(first, run(shared, 10), strict=True)]

    fresh: Callable[..., token_tables.TokenTables] = token_tables.TokenTables
    monkeypatch.setattr(logit_edits, "token_tables", fresh)
    own = slots()
    assert len({id(slot.edits.tables) for slot in own}) == 8
    alone = [run([slot], 10) for slot in own[:1]]
    own = slots()
    tokens = [a + b for a, b in zip(run(own, 10), run(own, 10), strict=True)]
    assert both == tokens and alone[0][0] == tokens[0][:10]
