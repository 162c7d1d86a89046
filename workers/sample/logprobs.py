"""Log probabilities and ranks of given tokens, and the most likely tokens, from raw logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import LogprobRows
from pagewire.kernels.data.drawing import ONE
from pagewire.kernels.ops import fixed_point_probabilities
from pagewire.kernels.reference.drawing import depths_below, top_tokens

CHUNK = 2**20  # logits processed at a time, which limits scratch memory


class Logprobs(NamedTuple):
    """`LogprobRows` before packing: token_ids int32 [n, 1 + k], logprobs float32 [n, 1 + k], ranks int32 [n]."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]

    def pack(self) -> LogprobRows:
        """The message for all rows."""
        return LogprobRows(*map(_tensor, self))

    def rows(self) -> Iterator[LogprobRows]:
        """One message per row."""
        for i in range(len(self.ranks)):
            row = slice(i, i + 1)
            yield Logprobs(self.token_ids[row], self.logprobs[row], self.ranks[row]).pack()


def logprob_rows(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> LogprobRows:
    """Log probability and rank of `token_ids[i]` under `logits[i]`, and of the k most likely tokens.

    logits: [n, V], any float dtype. k: -1 or more than V means the whole vocabulary. The most likely
    tokens are sorted, ties by lower id; a rank is 1 + the number of larger logits. NaN logits give NaN.
    """
    return logprobs_of(logits, token_ids, k).pack()


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> Logprobs:
    """As `logprob_rows`, but as arrays."""
    k = logits.shape[1] if k == -1 else min(k, logits.shape[1])
    step = max(1, CHUNK // logits.shape[1])
    empty = Logprobs(np.zeros((0, 1 + k), np.int32), np.zeros((0, 1 + k), np.float32), np.zeros(0, np.int32))
    parts = [empty]
    for start in range(0, len(token_ids), step):
        parts.append(_chunk(logits[start : start + step].float(), token_ids[start : start + step], k))
    return Logprobs(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _chunk(x: torch.Tensor, token_ids: Sequence[int], k: int) -> Logprobs:
    ids = torch.tensor(token_ids, device=x.device)[:, None]
    chosen = x.gather(1, ids)
    ranks = (x > chosen).sum(1).add_(1).cpu().numpy()
    top_values, top_ids = top_tokens(x, k)
    values = np.concatenate((chosen.cpu().numpy(), top_values), 1)
    columns = np.concatenate((ids.cpu().numpy(), top_ids), 1)
    return Logprobs(
        columns.astype(np.int32), (values - _normalisers(x)).astype(np.float32), ranks.astype(np.int32)
    )


def _normalisers(x: torch.Tensor) -> NDArray[np.float64]:
    """log(sum(exp(x))) per row, float64 [n, 1]; NaN where x has NaN, +inf or nothing finite."""
    peaks = x.amax(1)
    totals = fixed_point_probabilities(depths_below(x, peaks, [1.0] * len(x))).sum(1).tolist()
    logs = [
        peak + math.log(total / ONE) if math.isfinite(peak) else math.nan
        for peak, total in zip(peaks.tolist(), totals, strict=True)
    ]
    return np.array(logs)[:, None]


def _tensor(array: NDArray[Any]) -> Tensor:
    return Tensor(array.dtype.name, array.shape, array.tobytes())
