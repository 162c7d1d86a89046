"""Log probabilities and ranks against torch.log_softmax and a full stable sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.sample.sampler import SamplingSlot, logprob_rows, sample


def arrays(rows: LogprobRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parts = (rows.token_ids, rows.logprobs, rows.ranks)
    assert [part.dtype for part in parts] == ["int32", "float32", "int32"]
    ids, logprobs, ranks = (
        np.frombuffer(bytearray(part.data), part.dtype).reshape(part.shape) for part in parts
    )
    return ids, logprobs, ranks


def check(logits: torch.Tensor, token_ids: list[int], k: int) -> None:
    ids, logprobs, ranks = arrays(logprob_rows(logits, token_ids, k))
    x, size = logits.float(), logits.shape[1]
    width = size if k == -1 else min(k, size)
    assert ids.shape == logprobs.shape == (len(token_ids), 1 + width)
    assert ids[:, 0].tolist() == token_ids
    order = x.sort(dim=1, descending=True, stable=True).indices[:, :width]
    np.testing.assert_array_equal(ids[:, 1:], order)
    expected = torch.log_softmax(x, 1).gather(1, torch.from_numpy(ids).long())
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=2e-6)
    assert ranks.tolist() == [int((row > row[i]).sum()) + 1 for row, i in zip(x, token_ids, strict=True)]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 30), st.integers(0, 5), st.integers(-1, 35))
def test_small_rows_with_ties(data: st.DataObject, size: int, n: int, k: int) -> None:
    value = st.sampled_from([float("-inf"), -2.0, 0.0, -0.0, 1.0, 1.5]) | st.floats(-50, 50, width=16)
    row = st.lists(value, min_size=size, max_size=size).filter(lambda row: max(row) > float("-inf"))
    rows = [data.draw(row) for _ in range(n)]
    token_ids = [data.draw(st.integers(0, size - 1)) for _ in range(n)]
    check(torch.tensor(rows).reshape(n, size), token_ids, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 20, 700, -1])
def test_large_rows(dtype: torch.dtype, k: int) -> None:
    torch.manual_seed(1)
    check((torch.randn(9, 5003) * 3).to(dtype), list(range(0, 5000, 600)), k)


def test_more_rows_than_are_worked_on_at_once() -> None:
    torch.manual_seed(2)
    check(torch.randn(80, 20_000), list(range(80)), 3)


def test_large_and_small_logits_keep_their_precision() -> None:
    check(torch.tensor([[1e4, 1e4 - 1, 0.0, -1e4], [1e-4, 0.0, -1e-4, 0.0]]), [3, 1], -1)


def test_nan_rows_give_nan_and_harm_nobody() -> None:
    logits = torch.randn(4, 50)
    good = arrays(logprob_rows(logits, [1, 2, 3, 4], 2))[1]
    logits[0, 7], logits[2, 3], logits[3] = float("nan"), float("inf"), float("-inf")
    found = arrays(logprob_rows(logits, [1, 2, 3, 4], 2))[1]
    assert np.isnan(found[[0, 2, 3]]).all()
    np.testing.assert_array_equal(found[1], good[1])


def test_sampled_rows_report_the_raw_logits() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 500).bfloat16()
    asked = [
        SamplingParams(logprobs=3, temperature=0.2, top_k=5),
        SamplingParams(logprobs=3, temperature=0, logit_bias={7: 100.0}),
        SamplingParams(),
        SamplingParams(logprobs=0, repetition_penalty=9.0),
        SamplingParams(logprobs=-1, allowed_token_ids=[4]),
        SamplingParams(logprobs=1000),
    ]
    slots = [SamplingSlot(params, 1, [], np.arange(9), 5, 9, 500) for params in asked]
    result = sample(logits, slots)
    assert result.token_ids[1] == 7 and result.token_ids[4] == 4
    assert sorted(result.logprobs) == [0, 1, 3, 4, 5]
    for row, found in result.logprobs.items():
        k = asked[row].logprobs
        assert k is not None
        assert found == logprob_rows(logits[row : row + 1], [result.token_ids[row]], k)
