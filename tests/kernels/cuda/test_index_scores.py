"""The scores of an indexer's keys, emulated, against the reference; faults that are planted change them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cuda import indexing
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.kernels.reference.indexing import index_scores
from tests.kernels.batches import Paged, Shape
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, guarded
from tests.kernels.cuda.test_attention import BF16, FP16, batch_of

SPANS = [(0, 1), (40, 41), (0, 0), (120, 140), (299, 300)]


def inputs(
    dtype: torch.dtype, size: int, heads: int, block_size: int = 32
) -> tuple[Tensor, Tensor, Tensor, Paged]:
    """Queries, weights, keys and the batch. What no token was written to holds NaN."""
    paged = batch_of(SPANS, Shape(2, 1, 32, 32, block_size), dtype, padding=3)
    generator = torch.Generator().manual_seed(size + heads)
    q = torch.randn(len(paged.q), heads, size, generator=generator).to(dtype)
    weights = torch.randn(len(q), heads, generator=generator)
    index = torch.randn(len(paged.plain.k), block_size, size, generator=generator).to(dtype)
    index[paged.plain.k[:, 0, :, 0].isnan()] = torch.nan
    q[-3:], weights[-3:] = torch.nan, torch.nan
    return guarded(q), guarded(weights), guarded(index), paged


def check(launcher: EmulatedLauncher, case: tuple[Tensor, Tensor, Tensor, Paged], rows: range) -> None:
    q, weights, index, paged = case
    scores = indexing.index_scores(launcher, q, weights, 0.1, index, paged.batch, rows)
    expected = index_scores(q, weights, 0.1, index.nan_to_num(), paged.batch, rows)
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "size", "heads"), [(BF16, 128, 64), (FP16, 64, 5), (BF16, 64, 32)], ids=str
)
def test_scores(dtype: torch.dtype, size: int, heads: int, order: object) -> None:
    """Of all tokens and of some, of requests that follow each other within a block."""
    case = inputs(dtype, size, heads)
    for rows in (range(len(case[0])), range(3, 20), range(0)):
        check(EmulatedLauncher(order=order), case, rows)  # type: ignore[arg-type]


def test_the_reference_has_the_scores_of_plain_loops() -> None:
    q, weights, index, paged = inputs(FP16, 64, 3, 16)
    scores = index_scores(q, weights, 0.1, index.nan_to_num(), paged.batch, range(len(q)))
    batch, token = paged.batch, 0
    for request, queries in enumerate(batch.query_start_loc.diff().tolist()):
        length = int(batch.seq_lens[request])
        keys = index[batch.block_table[request, : -(-length // 16)].long()].flatten(0, 1)[:length].double()
        for position in range(length - queries, length):
            products = (q[token].double() @ keys[: position + 1].T * 0.1).relu()
            expected = (products * weights[token, :, None]).sum(0).float()
            torch.testing.assert_close(scores[token, : position + 1], expected, atol=1e-4, rtol=1e-4)
            assert scores[token, position + 1 :].eq(-torch.inf).all()
            token += 1
    assert scores[token:].eq(-torch.inf).all()


def test_a_score_depends_on_its_token_and_key_alone() -> None:
    """To the bit: alone, and among other tokens and requests."""
    q, weights, index, paged = inputs(BF16, 128, 32)
    launcher = EmulatedLauncher()
    together = indexing.index_scores(launcher, q, weights, 0.1, index, paged.batch, range(len(q)))
    last = len(q) - 4  # before the padding
    alone = AttentionBatch(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=paged.batch.seq_lens[-1:],
        block_table=paged.batch.block_table[-1:],
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        max_query_len=1,
        max_seq_len=300,
    )
    one = slice(last, last + 1)
    scores = indexing.index_scores(launcher, q[one], weights[one].clone(), 0.1, index, alone, range(1))
    assert torch.equal(scores, together[one])


def test_refusals() -> None:
    q, weights, index, paged = inputs(BF16, 64, 4)
    for error, message, changed in [
        (TypeError, "no kernel for torch.float32", {"q": q.float()}),
        (TypeError, "weights of torch.bfloat16", {"weights": weights.to(BF16)}),
        (ValueError, "no kernel for q", {"q": q[..., :32]}),
        (ValueError, "no kernel for q", {"weights": weights[:, :2]}),
        (ValueError, "no kernel for q", {"rows": range(len(q) + 1)}),
        (ValueError, "rows must be contiguous", {"q": torch.empty(len(q), 4, 128, dtype=BF16)[..., ::2]}),
        (ValueError, "rows must be contiguous", {"weights": torch.empty(len(q), 8)[:, ::2]}),
    ]:
        good = {
            "q": q,
            "weights": weights,
            "scale": 1.0,
            "index": index,
            "batch": paged.batch,
            "rows": range(2),
        }
        with pytest.raises(error, match=message):
            indexing.index_scores(EmulatedLauncher(), **{**good, **changed})  # type: ignore[arg-type]


FAULTS = [
    ("<= token)", "< token)"),
    ("if (first_key > position) continue;", "if (first_key >= position) continue;"),
    ("__syncthreads();  // the previous", "// the previous"),
    ("if (request != loaded)", "if (loaded < 0)"),
    ("if (key >= length) return nullptr;", ""),
    ("p.table_width + (key >> p.block_shift)", "p.table_width + (row >> p.block_shift)"),
    ("(key & ((1 << p.block_shift) - 1))", "(key & 15)"),
    ("token * p.q_token_stride", "first * p.q_token_stride"),
    ("__syncthreads();  // keys", "// keys"),
    ("const int head = heads + (lane & 15);", "const int head = lane & 15;"),
    ("warp * OWN + 8 * n + (lane >> 4)", "8 * n + (lane >> 4)"),
    ("mma<T>(products[n + 1], a, b + 2);", "mma<T>(products[n + 1], a, b);"),
    ("heads + 8 * i + lane / 4", "heads + lane / 4"),
    ("head < p.heads ? __ldg(", "true ? __ldg("),
    ("* p.scale, 0.0f)", "* p.scale, -1.0f)"),
    ("bits < 32; bits *= 2", "bits < 16; bits *= 2"),
    ("key <= position) p.scores", "key < position) p.scores"),
    ("token - p.first)", "token)"),
]


@pytest.mark.planted_faults
@pytest.mark.parametrize(("old", "new"), FAULTS, ids=str)
def test_faults_are_caught(old: str, new: str, catch: object) -> None:
    cases = [inputs(BF16, 64, 37), inputs(BF16, 64, 5)]

    def check_both(launcher: EmulatedLauncher) -> None:
        for case in cases:
            check(dataclasses.replace(launcher), case, range(2, len(case[0])))

    catch(check_both, Edit("index_scores.cu", old, new))  # type: ignore[operator]
