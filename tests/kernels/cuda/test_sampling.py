"""The emulated sampling kernels have the tokens, errors and log probabilities of the CPU sampler, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.ipc.wire.params import SamplingParams
from pagewire.kernels.cuda import sampling as cuda
from pagewire.kernels.ops import fixed_point_probabilities
from pagewire.workers.device.cuda_sampler import CudaPendingTokens, CudaTokenSampler
from pagewire.workers.sample.logprobs import logprobs_of
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import SampleOutput, SamplingSlot, sample
from pagewire.workers.sample.typical import Candidate, TypicalAcceptance
from tests.kernels.cuda.emulate import ORDERS, EmulatedLauncher
from tests.kernels.cuda.emulate.memory import guarded
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice

INF = math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_slot(
    vocab_size: int,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    **params: Any,
) -> SamplingSlot:
    tokens = np.array([*prompt, *output], dtype=np.int32)
    return SamplingSlot(
        SamplingParams(**params), seed, stop_ids, tokens, len(prompt), len(tokens), vocab_size
    )


def check(
    logits: torch.Tensor,
    slots: Sequence[SamplingSlot],
    masks: TokenMasks | None = None,
    launcher: EmulatedLauncher | None = None,
    max_most_likely: int = 20,
) -> SampleOutput:
    """The kernels' output equals the CPU sampler's, and the logits are not changed.

    Except in rows whose mask hides a NaN or infinity: their log probabilities are NaN, of undefined tokens.
    """
    before = logits.clone()
    sampler = CudaTokenSampler(EmulatedCudaDevice(launcher), len(slots), logits.shape[1], max_most_likely)
    output = sampler.launch(logits, slots, masks).finish()
    expected = sample(logits, slots, masks)
    hidden = [row for row in expected.logprobs if not math.isfinite(logits[row].float().max())]
    for row in hidden:
        logprobs = np.frombuffer(output.logprobs.pop(row).logprobs.data, np.float32)
        assert np.isnan(logprobs).all() and expected.logprobs.pop(row)
    assert output == expected
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))
    return output


# ---------------------------------------------------------------- random batches

VOCAB = 40
token = st.integers(0, VOCAB - 1)
chance = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
logit = st.sampled_from(
    [-INF, -40.0, -3.0, -0.5, -0.0, 0.0, 0.5, 0.5, 2.0, 2.5, 30.0, 1e-40, -1e-40, 3e38, -3e38]
) | st.floats(-20, 20, width=32)
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB) | st.lists(
    st.sampled_from([0.0, 1.0, -INF]), min_size=VOCAB, max_size=VOCAB
)
rule = st.builds(
    TypicalAcceptance,
    st.sampled_from([0.0, 0.02, 0.09, 0.25, 0.5, 1.0]),
    st.sampled_from([0.0, 0.1, 0.3, 1.0, 1e6]),
)
broken = st.sampled_from([math.nan, INF, -math.nan])


@st.composite
def params_strategy(draw: st.DrawFn) -> SamplingParams:
    optional = {
        "temperature": st.sampled_from([0.0, 1e-300, 1e-6, 0.3, 1.0, 4.0, 1e300]),
        "top_k": st.integers(1, VOCAB + 5),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": chance,
        "repetition_penalty": st.sampled_from([0.5, 1.3, 5.0, 1e-300, 1e300]),
        "presence_penalty": st.sampled_from([-1.5, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 1.1]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB + 3), st.sampled_from([-100.0, -1.0, 2.0]), max_size=4
        ),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB + 3), min_size=1, max_size=9),
        "bad_words_token_ids": st.lists(st.lists(token, min_size=1, max_size=3), max_size=4),
        "min_tokens": st.integers(0, 4),
        "logprobs": st.integers(0, 5) | st.just(VOCAB + 2),
    }
    names = draw(st.sets(st.sampled_from(sorted(optional)), max_size=6))
    return SamplingParams(**{name: draw(optional[name]) for name in sorted(names)})


@st.composite
def case_strategy(draw: st.DrawFn) -> tuple[list[float], SamplingSlot, list[int] | None]:
    values = draw(rows)
    if draw(st.integers(0, 9)) == 0:
        values[draw(token)] = draw(broken)
    prompt, output = draw(st.lists(token, min_size=1, max_size=6)), draw(st.lists(token, max_size=6))
    slot = SamplingSlot(
        draw(params_strategy()),
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(st.lists(token, max_size=3)),
        np.array(prompt + output),
        len(prompt),
        len(prompt + output),
        VOCAB,
    )
    allowed = draw(st.none() | st.lists(st.integers(0, VOCAB - 1), max_size=12))
    if draw(st.booleans()):
        slot = slot.ahead([], Candidate(draw(st.integers(-1, VOCAB + 1)), draw(rule)))
    return values, slot, allowed


def masks_of(allowed: Sequence[list[int] | None], vocab_size: int) -> TokenMasks | None:
    """Masks of the rows' allowed tokens, in the form that a grammar computes."""
    masked = [i for i, ids in enumerate(allowed) if ids is not None]
    if not masked:
        return None
    bits = np.zeros((len(masked), -(-vocab_size // 32) * 32), np.uint8)
    for place, i in enumerate(masked):
        bits[place, allowed[i]] = 1
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return TokenMasks({i: place for place, i in enumerate(masked)}, torch.from_numpy(packed))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(case_strategy(), min_size=1, max_size=5),
    st.sampled_from(DTYPES),
    st.sampled_from(ORDERS),
    st.integers(0, 9),
)
def test_any_batch(cases: list[Any], dtype: torch.dtype, order: tuple[int, int], gap: int) -> None:
    padded = torch.full((len(cases), VOCAB + gap), math.nan, dtype=dtype)
    logits = padded[:, :VOCAB]
    logits[:] = torch.tensor([case[0] for case in cases])
    masks = masks_of([case[2] for case in cases], VOCAB)
    check(logits, [case[1] for case in cases], masks, EmulatedLauncher(order=order))


# ---------------------------------------------------------------- larger vocabularies

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 100.0, "top_p": 0.7},
    {"top_k": 7, "logprobs": 20},
    {"top_k": 900, "top_p": 0.999},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "logprobs": 5},
    {"min_p": 0.1},
    {"temperature": 0.01, "top_p": 0.5},
    {"top_p": 0.95, "presence_penalty": 1.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 5.0, "top_k": 5000, "top_p": 0.9},
]


def batch(vocab_size: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, list[SamplingSlot]]:
    torch.manual_seed(seed)
    logits = (torch.randn(len(SETTINGS), vocab_size) * 3).to(dtype)
    prompt, output = torch.randint(vocab_size, (300,)).tolist(), torch.randint(vocab_size, (90,)).tolist()
    slots = [
        make_slot(vocab_size, seed=seed + i, prompt=prompt, output=output * 2, **params)
        for i, params in enumerate(SETTINGS)
    ]
    return logits, slots


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(4095, DTYPES[1]), (4097, DTYPES[2]), (9000, DTYPES[1]), (12288, DTYPES[0])]
)
def test_several_slices(vocab_size: int, dtype: torch.dtype) -> None:
    logits, slots = batch(vocab_size, dtype, vocab_size)
    check(logits, slots, launcher=EmulatedLauncher(order=ORDERS[vocab_size % len(ORDERS)]))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_draft_takes_the_place_of_the_drawn_token_where_it_is_typical(order: tuple[int, int]) -> None:
    """Likely and unlikely drafts of every slice, and with truncations that leave them out."""
    vocab_size = 9000
    logits, slots = batch(vocab_size, torch.bfloat16, 7)
    logits[:, 8190:8200] += 12  # around the border of two slices
    drafts = [3, 8190, 8192, 8999, int(logits[7].argmax())]
    rules = [TypicalAcceptance(0.09, 0.3), TypicalAcceptance(0.9, 0.5), TypicalAcceptance(0.0, 0.0)]
    plain = check(logits, slots).token_ids
    taken = []
    for i, (draft, rule) in enumerate((draft, rule) for draft in drafts for rule in rules):
        some = [slot.ahead([], Candidate(draft, rule)) for slot in slots]
        output = check(logits, some, launcher=EmulatedLauncher(order=order))
        taken += [
            (i, row) for row, token_id in enumerate(output.token_ids) if token_id == draft != plain[row]
        ]
        assert all(token_id in (draft, plain[row]) for row, token_id in enumerate(output.token_ids))
    assert 30 < len(taken) < 110


def test_whether_a_draft_counts_is_sampled_on_the_device() -> None:
    """No PyTorch on the host waits for the logits: the next step takes the token from the device."""
    logits = torch.tensor([[0.0, 0.1, 0.2, 9.0]])
    slot = make_slot(4).ahead([], Candidate(1, TypicalAcceptance(0.0, 0.0)))
    pending = CudaTokenSampler(EmulatedCudaDevice(), 1, 4, 20).launch(logits, [slot])
    assert isinstance(pending, CudaPendingTokens) and pending.token_ids.tolist() == [1]


def test_a_large_vocabulary() -> None:
    vocab_size = 128256
    logits, slots = batch(vocab_size, torch.bfloat16, 3)
    check(logits[2:6], slots[2:6])


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("params", [{"top_k": 5000}, {"top_p": 0.7}, {"top_k": 8000, "top_p": 0.9}], ids=str)
def test_more_ties_than_are_kept_in_a_list(params: dict[str, Any], order: tuple[int, int]) -> None:
    """The kernel then reads the row again. Of equal logits, lower ids come first."""
    logits = torch.zeros(2, 9000)
    logits[1, torch.randperm(9000)[:3]] = 1.0
    slots = [make_slot(9000, seed=seed, logprobs=20, **params) for seed in range(2)]
    check(logits, slots, launcher=EmulatedLauncher(order=order))


def test_the_last_slice_of_a_row_counts() -> None:
    vocab_size = 8193
    logits = torch.zeros(6, vocab_size)
    logits[0, -1] = math.nan
    logits[1, -1] = INF
    logits[2] = -INF
    logits[3, -1] = 1.0
    logits[4, :-1] = -INF
    allowed = [None, None, None, None, None, [vocab_size - 1]]
    slots = [make_slot(vocab_size, temperature=i % 2 * 0.001, top_p=0.9) for i in range(6)]
    output = check(logits, slots, masks_of(allowed, vocab_size))
    assert sorted(output.errors) == [0, 1, 2] and output.token_ids[3:] == [vocab_size - 1] * 3


def test_nothing_left() -> None:
    logits = torch.zeros(4, 4100)
    params: list[dict[str, Any]] = [
        {"allowed_token_ids": [4200]},
        {"allowed_token_ids": [7], "bad_words_token_ids": [[7]]},
        {"allowed_token_ids": [4099], "min_tokens": 1, "stop_ids": [4099], "temperature": 0},
        {"temperature": 0},
    ]
    masks = masks_of([None, None, None, []], 4100)
    assert sorted(check(logits, [make_slot(4100, **row) for row in params], masks).errors) == [0, 1, 2, 3]


def test_one_memory_for_many_launches() -> None:
    """A launch leaves the memory ready for the next launch, for all parameters and after errors."""
    sampler = CudaTokenSampler(EmulatedCudaDevice(EmulatedLauncher(order=ORDERS[2])), len(SETTINGS), 5000, 20)
    for seed in range(6):
        logits, slots = batch(5000, torch.float32, seed)
        logits[seed, seed] = math.nan
        logits[seed + 1] = 0.0  # more candidates than the list holds
        some = slice(0, len(slots) - seed)
        assert sampler.launch(logits[some], slots[some]).finish() == sample(logits[some], slots[some])


@pytest.mark.parametrize(("vocab_size", "offset"), [(4099, 1), (5000, 3), (64, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_logit_beyond_the_row_is_read(dtype: torch.dtype, vocab_size: int, offset: int) -> None:
    """The last row ends before inaccessible memory, and rows begin at any alignment."""
    memory = guarded(torch.randn(2 * vocab_size + offset).to(dtype))
    logits = memory[memory.numel() - 2 * vocab_size :].view(2, vocab_size)
    check(logits, [make_slot(vocab_size, top_p=0.9, top_k=40, logprobs=3) for _ in range(2)])


@pytest.mark.parametrize("k", [-1, 3, 50])
def test_log_probabilities_of_more_tokens_than_the_kernels_support(k: int) -> None:
    logits, slots = torch.randn(2, 60), [make_slot(60, logprobs=k), make_slot(60, logprobs=2)]
    check(logits, slots, max_most_likely=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_of_given_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, 6000) * 4).to(dtype)
    logits[1, 5:] = -INF
    logits[2] = 1.0
    token_ids = torch.tensor([5, 5999, 17, int(logits[3].argmax()), 4096])
    request = cuda.sampling_request([cuda.RowSampling(num_most_likely=k) for k in (0, 9, 30, 1, 30)])
    result = cuda.Sampler(EmulatedLauncher(), 8, 6000, 30, on="cpu").logprobs(logits, token_ids, request)
    depths = logits.float().amax(1)[:, None] - logits.float()
    assert torch.equal(result.totals, fixed_point_probabilities(depths).sum(1))
    logprobs = result.logprobs()
    for i, k in enumerate(request.nums_most_likely.tolist()):
        expected = logprobs_of(logits[i : i + 1], [int(token_ids[i])], k)
        assert result.ids[i, : 1 + k].tolist() == expected.token_ids[0].tolist()
        assert logprobs[i, : 1 + k].tobytes() == expected.logprobs.tobytes()
        assert result.ranks[i] == expected.ranks[0]


def test_unsupported_arguments_are_refused() -> None:
    launcher, row = EmulatedLauncher(), cuda.RowSampling()
    for vocab_size, max_most_likely in [(0, 1), (2**18 + 1, 1), (100, 1025)]:
        with pytest.raises(ValueError, match="not"):
            cuda.Sampler(launcher, 4, vocab_size, max_most_likely, on="cpu")
    sampler = cuda.Sampler(launcher, 2, 100, 5, on="cpu")
    with pytest.raises(TypeError, match="float64"):
        sampler.sample(torch.zeros(1, 100, dtype=torch.float64), cuda.sampling_request([row]))
    for logits, rows in [
        (torch.zeros(3, 100), [row] * 3),
        (torch.zeros(1, 99), [row]),
        (torch.zeros(100, 2).T[:1], [row]),
        (torch.zeros(2, 100), [row]),
        (torch.zeros(1, 100), [cuda.RowSampling(num_most_likely=6)]),
    ]:
        with pytest.raises(ValueError):
            sampler.sample(logits, cuda.sampling_request(rows))
    with pytest.raises(ValueError, match="masks"):
        sampler.sample(
            torch.zeros(1, 100), cuda.sampling_request([row], torch.zeros(1, 3, dtype=torch.int32))
        )
    with pytest.raises(ValueError, match="int64"):
        sampler.logprobs(torch.zeros(1, 100), torch.zeros(2, dtype=torch.int64), cuda.sampling_request([row]))
    for wrong in [
        cuda.RowSampling(temperature=-1.0),
        cuda.RowSampling(temperature=INF),
        cuda.RowSampling(num_most_likely=1025),
        cuda.RowSampling(mask=0),
    ]:
        with pytest.raises(ValueError):
            cuda.sampling_request([wrong])


def test_ids_outside_the_vocabulary_have_no_effect() -> None:
    ids = np.array([-1, -(2**40), 100, 2**31 + 5, 2**32 + 5])
    ones = np.ones(len(ids), np.float32)
    row = cuda.RowSampling(
        frequency=2.0, count_ids=ids, counts=ones, bias_ids=ids, biases=ones, forbidden_ids=ids.tolist()
    )
    logits = torch.zeros(1, 100)
    logits[0, 5] = 0.5
    sampler = cuda.Sampler(EmulatedLauncher(), 1, 100, 0, on="cpu")
    assert sampler.sample(logits, cuda.sampling_request([row])).token_ids.tolist() == [5]


def test_no_rows() -> None:
    result = cuda.Sampler(EmulatedLauncher(), 1, 100, 0, on="cpu").sample(
        torch.zeros(0, 100), cuda.sampling_request([])
    )
    assert result.token_ids.tolist() == []
