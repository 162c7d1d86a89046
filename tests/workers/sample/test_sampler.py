"""The sampler against a sampler that takes every definition literally, one row and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Masks
from pagewire.kernels import ops
from pagewire.kernels.reference import drawing as m
from pagewire.kernels.reference.kernels import reference
from pagewire.kernels.reference.random import uniform
from pagewire.workers.sample import sampler
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import SamplingSlot, sample

INF = math.inf


def make_slot(
    vocab_size: int,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    **params: Any,
) -> SamplingSlot:
    tokens = np.array([*prompt, *output, *[-7] * 5], dtype=np.int32)  # what lies beyond must not be read
    num_tokens = len(prompt) + len(output)
    return SamplingSlot(SamplingParams(**params), seed, stop_ids, tokens, len(prompt), num_tokens, vocab_size)


def pick(row: torch.Tensor | list[float], **asked: Any) -> int:
    """The token for one row."""
    x = torch.as_tensor(row)
    result = sample(x[None], [make_slot(len(x), **asked)])
    assert not result.errors
    return result.token_ids[0]


# ---------------------------------------------------------------- the definition, taken literally


def edited(
    row: torch.Tensor, params: SamplingParams, stop_ids: Sequence[int], prompt: list[int], output: list[int]
) -> list[float]:
    x = [np.float32(v) for v in row.float().tolist()]
    history = prompt + output
    allowed = params.allowed_token_ids
    for i in range(len(x)):
        if allowed is not None and i not in allowed:
            x[i] = np.float32(-INF)
        x[i] += np.float32((params.logit_bias or {}).get(i, 0))
        for *prefix, last in params.bad_words_token_ids or ():
            if last == i and history[len(history) - len(prefix) :] == prefix:
                x[i] = np.float32(-INF)
        if i in history:
            repetition = np.float32(params.repetition_penalty)
            x[i] = x[i] * repetition if x[i] < 0 else x[i] / repetition
        if count := output.count(i):
            x[i] = x[i] - np.float32(params.frequency_penalty) * np.float32(count)
            x[i] = x[i] - np.float32(params.presence_penalty)
        if len(output) < params.min_tokens and i in stop_ids:
            x[i] = np.float32(-INF)
    return [float(v) for v in x]


def survivors(x: list[float], params: SamplingParams) -> dict[int, int]:
    """Mass by token id, of what the truncations leave."""
    peak = max(x)
    depths = (peak - torch.tensor(x)) / params.temperature
    masses = reference.fixed_point_probabilities(depths).tolist()
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    order = [i for i in order if masses[i] > 0 and masses[i] >= params.min_p * 2**44]
    if params.top_k:
        order = order[: params.top_k]
    need, kept, reached = params.top_p * sum(masses[i] for i in order), [], 0
    for i in order:
        if reached >= need:
            break
        kept.append(i)
        reached += masses[i]
    return {i: masses[i] for i in sorted(kept)}


def literal(
    row: torch.Tensor,
    params: SamplingParams,
    seed: int,
    stop_ids: Sequence[int],
    prompt: list[int],
    output: list[int],
) -> int | None:
    """The token, or None where none is possible."""
    x = edited(row, params, stop_ids, prompt, output)
    if max(x) == -INF:
        return None
    if params.temperature == 0:
        return x.index(max(x))
    kept = survivors(x, params)
    u = int(float(uniform([seed], [len(prompt) + len(output)])[0]) * 2**53)
    reached = 0
    for i, mass in kept.items():
        reached += mass
        if reached * 2**53 > u * sum(kept.values()):
            return i
    raise AssertionError("unreachable")


VOCAB = 24
token = st.integers(0, VOCAB - 1)
chance = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
logit = st.sampled_from([-INF, -40.0, -3.0, -0.5, 0.0, 0.5, 0.5, 2.0, 2.5, 30.0]) | st.floats(
    -20, 20, width=32
)


@st.composite
def params_strategy(draw: st.DrawFn) -> SamplingParams:
    optional = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        "top_k": st.integers(1, VOCAB + 5),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999]),
        "min_p": chance,
        "repetition_penalty": st.sampled_from([0.5, 1.3, 5.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 1.1]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB + 3), st.sampled_from([-100.0, -1.0, 2.0]), max_size=4
        ),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB + 3), min_size=1, max_size=9),
        "bad_words_token_ids": st.lists(st.lists(token, min_size=1, max_size=3), max_size=4),
        "min_tokens": st.integers(0, 4),
    }
    names = draw(st.sets(st.sampled_from(sorted(optional)), max_size=6))
    return SamplingParams(**{name: draw(optional[name]) for name in sorted(names)})


case = st.tuples(
    params_strategy(),
    st.lists(logit, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -INF),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(token, max_size=3),  # stop ids
    st.lists(token, min_size=1, max_size=6),  # prompt
    st.lists(token, max_size=6),  # output
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(case, min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
)
def test_any_batch_gives_what_the_definition_says(cases: list[Any], dtype: torch.dtype) -> None:
    logits = torch.tensor([case[1] for case in cases]).to(dtype)
    before = logits.clone()
    slots = [
        SamplingSlot(
            params, seed, stop_ids, np.array(prompt + output), len(prompt), len(prompt + output), VOCAB
        )
        for params, _, seed, stop_ids, prompt, output in cases
    ]
    result = sample(logits, slots)
    expected = [
        literal(row, params, seed, stop_ids, prompt, output)
        for row, (params, _, seed, stop_ids, prompt, output) in zip(logits, cases, strict=True)
    ]
    assert result.token_ids == [token_id or 0 for token_id in expected]
    assert sorted(result.errors) == [row for row, token_id in enumerate(expected) if token_id is None]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 1000, 3001])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 100.0, "top_p": 0.7},
        {"top_k": 7},
        {"top_k": 900, "top_p": 0.999},
        {"min_p": 0.1},
        {"temperature": 0.01},
    ],
    ids=str,
)
def test_larger_vocabularies(vocab_size: int, asked: dict[str, Any]) -> None:
    torch.manual_seed(vocab_size)
    logits = (torch.randn(8, vocab_size) * 3).bfloat16()  # many ties
    slots = [make_slot(vocab_size, seed=seed, **asked) for seed in range(8)]
    expected = [literal(logits[i], slots[i].params, i, [], [1, 2, 3], []) for i in range(8)]
    assert sample(logits, slots).token_ids == expected


# ---------------------------------------------------------------- single stages


def test_greedy_takes_the_lowest_of_equals() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert pick(torch.tensor([0.0, 3.0, 1.0, 3.0]).to(dtype), temperature=0) == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert pick([0.0, 88.0, 1.0, -INF, 87.9], temperature=temperature) == 1


def test_huge_temperatures_are_uniform_over_what_is_possible() -> None:
    found = {pick([0.0, 88.0, -INF, 40.0], temperature=1e300, seed=seed) for seed in range(50)}
    assert found == {0, 1, 3}


def test_extreme_logits_do_not_overflow() -> None:
    big = float(torch.finfo(torch.float32).max)
    assert pick([-big, big, 0.0]) == 1
    assert pick([big, 0.0], temperature=0, repetition_penalty=1e-300, prompt=[0]) == 0
    assert pick([0.0, 0.0, -5.0], temperature=0, repetition_penalty=1e300, prompt=[0, 1]) == 0


@pytest.mark.parametrize("asked", [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}], ids=str)
def test_the_tightest_truncation_keeps_the_most_likely(asked: dict[str, Any]) -> None:
    assert {pick([0.0, 2.0, 1.0, 1.9], seed=seed, **asked) for seed in range(30)} == {1}


def test_ties_at_the_cut_go_to_lower_ids() -> None:
    assert {pick([1.0] * 300, top_k=3, seed=seed) for seed in range(60)} == {0, 1, 2}
    assert {pick([1.0] * 10, top_p=0.3, seed=seed) for seed in range(60)} == {0, 1, 2}
    assert {pick([1.0] * 10, min_p=1.0, seed=seed) for seed in range(99)} == set(range(10))


def test_top_k_beyond_the_vocabulary_does_nothing() -> None:
    row = torch.randn(50)
    assert [pick(row, seed=s, top_k=51) for s in range(20)] == [pick(row, seed=s) for s in range(20)]


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_truncations_keep_what_hugging_face_keeps(scale: float) -> None:
    torch.manual_seed(5)
    x = torch.randn(20, 400) * scale
    depths = m.depths_below(x, x.amax(1), [1.0] * 20)
    bins = m.depth_bins(depths)

    def compare(masses: torch.Tensor, warper: Any) -> None:
        kept = torch.isfinite(warper(torch.zeros(20, 1, dtype=torch.long), x.clone()))
        assert torch.equal(masses > 0, kept & (ops.fixed_point_probabilities(depths) > 0))

    for k in (1, 5, 100):
        masses = ops.fixed_point_probabilities(depths)
        m.keep_top_k(x, bins, masses, [k] * 20)
        compare(masses, hf.TopKLogitsWarper(k))
    for p in (0.05, 0.5, 0.95):
        masses = ops.fixed_point_probabilities(depths)
        m.keep_top_p(x, bins, masses, [p] * 20)
        compare(masses, hf.TopPLogitsWarper(p))
        masses = ops.fixed_point_probabilities(depths)
        m.keep_min_p(masses, [p] * 20)
        compare(masses, hf.MinPLogitsWarper(p))


def test_repetition_penalty_is_hugging_face_s() -> None:
    torch.manual_seed(6)
    for i in range(50):
        row, history = torch.randn(30), torch.randint(30, (8,))
        expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(history[None], row[None].clone())[0].argmax()
        half = history[:4].tolist(), history[4:].tolist()
        assert pick(row, temperature=0, repetition_penalty=1.7, prompt=half[0], output=half[1]) == expected, i


def test_presence_and_frequency_count_the_output_only() -> None:
    row = [5.0, 4.5, 4.0]
    assert pick(row, temperature=0, presence_penalty=0.6, prompt=[0], output=[2]) == 0
    assert pick(row, temperature=0, presence_penalty=0.6, output=[0, 0, 0]) == 1
    assert pick(row, temperature=0, frequency_penalty=0.3, output=[0]) == 0
    assert pick(row, temperature=0, frequency_penalty=0.3, output=[0, 0]) == 1
    assert pick(row, temperature=0, frequency_penalty=0.3, output=[0, 0, 1, 1, 0, 0]) == 2


def test_bad_words() -> None:
    row = [1.0, 5.0, 4.0, 3.0]
    words = [[1], [3, 0, 2], [2, 2]]
    assert pick(row, temperature=0, bad_words_token_ids=words, prompt=[0]) == 2
    assert pick(row, temperature=0, bad_words_token_ids=words, prompt=[3, 0]) == 3
    assert pick(row, temperature=0, bad_words_token_ids=words, prompt=[3], output=[0]) == 3
    assert pick(row, temperature=0, bad_words_token_ids=words, prompt=[2]) == 3
    assert pick(row, temperature=0, bad_words_token_ids=[[9, 0, 0, 1], [77], [0, 99], []], prompt=[0]) == 1


def test_min_tokens_holds_stop_tokens_back() -> None:
    slot = make_slot(4, temperature=0, min_tokens=2, stop_ids=[1, 99])
    logits = torch.tensor([[0.0, 9.0, 5.0, 1.0]])
    tokens = []
    for _ in range(4):
        tokens += sample(logits, [slot]).token_ids
        slot.append(tokens[-1])
    assert tokens == [2, 2, 1, 1]


def test_allowed_tokens_and_bias() -> None:
    row = [1.0, 5.0, 4.0, 3.0]
    assert pick(row, temperature=0, allowed_token_ids=[0, 3, 1000]) == 3
    assert pick(row, temperature=0, logit_bias={0: 4.5, 1000: 9.0}) == 0
    assert pick(row, temperature=0, logit_bias={1: -100, 2: -100}, allowed_token_ids=[0, 1, 2]) == 0


# ---------------------------------------------------------------- statistics


def chi_square(tokens: list[int], probabilities: torch.Tensor) -> float:
    expected = probabilities.double().numpy() * len(tokens)
    return float(((np.bincount(tokens, minlength=len(expected)) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("asked", [{}, {"temperature": 1.7}, {"top_p": 0.8}, {"top_k": 20}], ids=str)
def test_frequencies_are_the_softmax(vary: str, asked: dict[str, Any]) -> None:
    torch.manual_seed(7)
    row, n = torch.randn(40), 4000
    params = SamplingParams(**asked)
    kept = survivors(row.tolist(), params)
    probabilities = torch.tensor([kept.get(i, 0) / sum(kept.values()) for i in range(40)])
    tokens = np.zeros(n, np.int32)
    at = [(i, 5) if vary == "seed" else (5, i) for i in range(n)]
    slots = [SamplingSlot(params, seed, [], tokens, 0, position, 40) for seed, position in at]
    found = sample(row.expand(n, 40), slots).token_ids
    ids = probabilities.nonzero()[:, 0].tolist()
    assert set(found) <= set(ids)
    freedom = len(ids) - 1
    statistic = chi_square([ids.index(i) for i in found], probabilities[ids])
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    if not params.top_k and params.top_p == 1:
        torch.testing.assert_close(probabilities, torch.softmax(row / params.temperature, 0))


def test_seeds_differ() -> None:
    row = torch.zeros(10_000)
    assert len({pick(row, seed=seed) for seed in range(50)}) > 45


# ---------------------------------------------------------------- batches

MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"top_k": 40},
    {"top_p": 0.9, "logprobs": 4},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    {"min_p": 0.02},
    {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 0},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "temperature": 2.0},
    {"logit_bias": {5: 10.0}, "bad_words_token_ids": [[3, 9], [8]], "logprobs": 4},
    {"allowed_token_ids": list(range(0, 200, 3)), "min_p": 0.1, "top_k": 9, "top_p": 0.8},
    {"temperature": 5.0, "top_p": 0.99, "logprobs": -1},
    {"min_tokens": 3, "temperature": 1.3},
]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size", [1003, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("threads")
def test_a_row_gets_the_same_alone_in_any_batch_and_with_any_threads(
    vocab_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(8)
    n = 3 * len(MIXED)
    logits = (torch.randn(n, vocab_size) * 2).to(dtype)

    def outcome(rows: list[int]) -> list[tuple[int, Any]]:
        slots = [
            make_slot(vocab_size, seed=i, stop_ids=[4], output=[6, 6], **MIXED[i % len(MIXED)]) for i in rows
        ]
        result = sample(logits[rows], slots)
        assert not result.errors
        return [(token_id, result.logprobs.get(i)) for i, token_id in enumerate(result.token_ids)]

    alone = [outcome([i])[0] for i in range(n)]
    torch.set_num_threads(1)
    assert outcome(list(range(n))) == alone
    torch.set_num_threads(3)
    order = torch.randperm(n).tolist()
    assert outcome(order) == [alone[i] for i in order]
    assert outcome(order[:7]) == [alone[i] for i in order[:7]]


def test_how_many_rows_are_worked_on_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(11)
    logits = torch.randn(40, 900)
    slots = [make_slot(900, seed=i, **MIXED[i % 4 + 1]) for i in range(40)]
    whole = sample(logits, slots)
    for size in (1, 2000):
        monkeypatch.setattr(sampler, "CHUNK", size)
        assert sample(logits, slots) == whole


def test_exp_does_not_depend_on_where_a_value_lies() -> None:
    """What batch invariance rests on: equal inputs, equal outputs, at any offset and length."""
    torch.manual_seed(9)
    values = -torch.rand(3000) * 40
    expected = values.exp()
    for start in range(40):
        for size in (1, 7, 33, 500, 2900):
            part = values[start : start + size]
            assert torch.equal(part.clone().exp_(), expected[start : start + size])
            assert torch.equal(part.exp(), expected[start : start + size])


@settings(max_examples=40, deadline=None)
@given(params_strategy(), st.integers(0, 2**64 - 1), st.integers(1, 11))
def test_a_slot_rebuilt_from_its_history_goes_on_the_same(
    params: SamplingParams, seed: int, cut: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    steps = torch.randn(12, 1, VOCAB, generator=generator) * 2
    tokens = np.zeros(15, np.int64)
    tokens[:3] = 1, 2, 1

    def run(first: int) -> list[int]:
        slot = SamplingSlot(params, seed, [5, 6], tokens, 3, 3 + first, VOCAB)
        for i in range(first, 12):
            tokens[3 + i] = sample(steps[i], [slot]).token_ids[0]
            slot.append(int(tokens[3 + i]))
        return tokens[3:].tolist()

    whole = run(0)
    tokens[3 + cut :] = 0
    assert run(cut) == whole


# ---------------------------------------------------------------- rows that cannot be sampled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", MIXED, ids=str)
def test_a_bad_row_gets_an_error_and_the_others_their_tokens(
    asked: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(10)
    logits = torch.randn(6, 300).to(dtype)
    slots = [make_slot(300, seed=i, **asked) for i in range(6)]
    good = sample(logits, slots)
    logits[1, 299] = math.nan
    logits[3, 0] = INF
    logits[4] = -INF
    result = sample(logits, slots)
    assert sorted(result.errors) == [1, 3, 4]
    assert "nan" in result.errors[1] and "inf" in result.errors[3] and "-inf" in result.errors[4]
    for row in range(6):
        assert result.token_ids[row] == (0 if row in result.errors else good.token_ids[row])
        assert result.logprobs.get(row) == (None if row in result.errors else good.logprobs.get(row))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_that_leave_nothing_are_an_error(temperature: float) -> None:
    slots = [
        make_slot(8, temperature=temperature),
        make_slot(8, temperature=temperature, allowed_token_ids=[2], bad_words_token_ids=[[2]], logprobs=1),
        make_slot(8, temperature=temperature, allowed_token_ids=[2], min_tokens=1, stop_ids=[2], top_p=0.5),
        make_slot(8, temperature=temperature, allowed_token_ids=[100]),
        make_slot(8, temperature=temperature, allowed_token_ids=[2], top_k=2),
    ]
    result = sample(torch.zeros(5, 8), slots)
    assert sorted(result.errors) == [1, 2, 3] and not result.logprobs
    assert all("no token can be generated" in error for error in result.errors.values())
    assert result.token_ids[1:] == [0, 0, 0, 2]


def test_an_empty_batch() -> None:
    assert sample(torch.zeros(0, 8), []).token_ids == []


# ---------------------------------------------------------------- masks


def masks_of(allowed: dict[int, Sequence[int]], vocab_size: int) -> TokenMasks:
    """Masks for some samples, by way of the message."""
    words = -(-vocab_size // 32)
    bits = b"".join(
        sum(1 << token_id for token_id in tokens).to_bytes(4 * words, "little") for tokens in allowed.values()
    )
    return TokenMasks.of(Masks(1, list(allowed), Tensor("int32", (len(allowed), words), bits)))


ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {3: 2.0}},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "bad_words_token_ids": [[5]]},
    {"temperature": 1.0, "allowed_token_ids": list(range(0, 70, 2))},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_is_a_list_of_allowed_tokens_whatever_else_is_asked(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    size, rows = 70, 4 * len(ASKED)
    logits = (torch.randn(rows, size) * 2).to(dtype)
    before = logits.clone()
    params = [ASKED[row % len(ASKED)] for row in range(rows)]
    allowed = {row: torch.randperm(size)[: 1 + 9 * (row % 5)].tolist() for row in range(0, rows, 2)}
    slots = [make_slot(size, seed=row, **params[row]) for row in range(rows)]
    result = sample(logits, slots, masks_of(allowed, size))
    for row in range(rows):
        asked = dict(params[row])
        if row in allowed:
            own = asked.get("allowed_token_ids", range(size))
            asked["allowed_token_ids"] = [i for i in own if i in allowed[row]]
        if asked.get("allowed_token_ids") == []:
            assert row in result.errors
            continue
        expected = sample(logits[row : row + 1], [make_slot(size, seed=row, **asked)])
        assert result.token_ids[row] == expected.token_ids[0]
        assert (row in result.errors) == bool(expected.errors)
    assert torch.equal(logits, before)


def test_a_mask_that_allows_everything_changes_nothing() -> None:
    torch.manual_seed(4)
    logits = torch.randn(len(ASKED), 1000).bfloat16()
    slots = [make_slot(1000, seed=row, logprobs=2, **asked) for row, asked in enumerate(ASKED)]
    masks = masks_of({row: range(1000) for row in range(len(ASKED))}, 1000)
    assert sample(logits, slots, masks) == sample(logits, slots)


def test_log_probabilities_are_of_the_raw_logits_under_a_mask() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 0.0]])
    plain = sample(logits, [make_slot(4, temperature=0.0, logprobs=3)])
    found = sample(logits, [make_slot(4, temperature=0.0, logprobs=3)], masks_of({0: [2]}, 4))
    assert plain.token_ids == [1] and found.token_ids == [2]
    assert found.logprobs[0].token_ids.tolist() == [2, 1, 2, 0]
    assert found.logprobs[0].ranks.tolist() == [2]


def test_a_mask_that_allows_nothing_is_an_error_of_its_row_alone() -> None:
    logits = torch.randn(4, 40)
    slots = [make_slot(40, temperature=t) for t in (0.0, 0.0, 1.0, 1.0)]
    result = sample(logits, slots, masks_of({1: [], 3: []}, 40))
    assert sorted(result.errors) == [1, 3] and "grammar" in result.errors[1]
    good = sample(logits, slots)
    assert [result.token_ids[row] for row in (0, 2)] == [good.token_ids[row] for row in (0, 2)]
