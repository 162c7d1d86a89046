"""The sampling kernels, emulated, against the CPU sampler: the same tokens, errors and logprobs, to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.ipc.params import SamplingParams
from pagewire.workers.device_sampler import DeviceSampler
from pagewire.workers.masks import TokenMasks
from pagewire.workers.sampler import SampleOutput, SamplingSlot, sample
from tests.kernels.cuda.emulate import ORDERS, EmulatedDevice

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
    device: EmulatedDevice | None = None,
    most: int = 20,
) -> SampleOutput:
    """The kernels give what the CPU sampler gives, and leave the logits alone."""
    before = logits.clone()
    sampler = DeviceSampler(device or EmulatedDevice(), len(slots), logits.shape[1], most, on="cpu")
    output = sampler.launch(logits, slots, masks).finish()
    assert output == sample(logits, slots, masks)
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))
    return output


# ---------------------------------------------------------------- anything goes

VOCAB = 40
token = st.integers(0, VOCAB - 1)
chance = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
logit = st.sampled_from(
    [-INF, -40.0, -3.0, -0.5, -0.0, 0.0, 0.5, 0.5, 2.0, 2.5, 30.0, 1e-40, -1e-40, 3e38, -3e38]
) | st.floats(-20, 20, width=32)
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB) | st.lists(
    st.sampled_from([0.0, 1.0, -INF]), min_size=VOCAB, max_size=VOCAB
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
    return values, slot, allowed


def masks_of(allowed: Sequence[list[int] | None], vocab_size: int) -> TokenMasks | None:
    """Rows' allowed tokens as a grammar gives them."""
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
    check(logits, [case[1] for case in cases], masks, EmulatedDevice(order=order))


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
        make_slot(vocab_size, seed=seed + i, prompt=prompt, output=output * 2, **asked)
        for i, asked in enumerate(SETTINGS)
    ]
    return logits, slots


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(4095, DTYPES[1]), (4097, DTYPES[2]), (9000, DTYPES[1]), (12288, DTYPES[0])]
)
def test_several_slices(vocab_size: int, dtype: torch.dtype) -> None:
    logits, slots = batch(vocab_size, dtype, vocab_size)
    check(logits, slots, device=EmulatedDevice(order=ORDERS[vocab_size % len(ORDERS)]))
