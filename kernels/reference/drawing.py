"""Draws tokens by their probabilities in 64-bit fixed point: the reference of `Kernels.draw`.

A token's *mass* is its unnormalised probability as a 64-bit fixed-point number, `exp(z) * 2**44` rounded down,
where z is its logit minus the row's largest, divided by the temperature. Integer sums are exact, so no sum depends
on its order: not on the number of threads, the device, the other rows, or the algorithm. So sampling is batch
invariant, and since `exp` is defined operation by operation (`Kernels.fixed_point_probabilities`), a CPU and a GPU
sample the same tokens. A token with z below -30 (a ten-trillionth of its probability) has mass 0 and is never
drawn. Masses of up to 2**18 tokens cannot overflow.

Every truncation keeps a prefix of one order, most likely first and ties by lower token id, and removes a token
by setting its mass to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.kernels.data.drawing import FRACTION_BITS, ONE, Draw
from pagewire.kernels.reference.random import uniform

LOG2_E = 1.44269504
LN_2 = (0.693359375, -2.12194440e-4)  # in two parts: the first has so few bits that its products are exact
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

FEW = 32  # a top_k of at most 1 / FEW of the vocabulary is small
BLOCK = 256  # tokens per partial sum when the drawn token is searched

# Bins of z: float32's exponent and top 6 bits of fraction, from 2**-12 to 2**6. Logarithmic, so that a bin
# holds few tokens at any temperature.
BIN_SHIFT = 17
FIRST_BIN = (127 - 12) << 6
NUM_BINS = 18 << 6


def probabilities(depths: torch.Tensor) -> torch.Tensor:
    """See `Kernels.fixed_point_probabilities`."""
    # exp(r - n log 2) is 2**-n times Cephes' polynomial for exp(r).
    depths = depths.clamp(max=32)
    n = (depths * LOG2_E).round()
    r = (n * LN_2[0] - depths) + n * LN_2[1]
    p = torch.full_like(r, EXP[0])
    for coefficient in EXP[1:]:
        p = p.mul_(r).add_(coefficient)
    p = p.mul_(r * r).add_(r).add_(1)
    power = (n.neg_().int().add_(127 + FRACTION_BITS) << 23).view(torch.float32)
    return p.mul_(power).long()


class Masses(NamedTuple):
    """What tokens are drawn from: depths float32 [n, m] and masses int64 [n, m], 0 where truncation leaves nothing.

    ids: int64 [n, m], the tokens of the columns, ascending; None: each is its own, and m is V.
    """

    depths: torch.Tensor
    masses: torch.Tensor
    ids: NDArray[np.int64] | None


def truncated(
    x: torch.Tensor,
    peaks: torch.Tensor,
    draws: Sequence[Draw],
    probabilities: Callable[[torch.Tensor], torch.Tensor],
) -> Masses:
    """The masses of rows of logits x [n, V], any float dtype, with finite row maxima `peaks` [n].

    probabilities: see `Kernels.fixed_point_probabilities`.

    If all top_k are small, only the max(top_k) largest logits are processed. The other tokens would get mass 0, so
    the result is the same.
    """
    size, ids = x.shape[1], None
    top_k = [min(draw.top_k or size, size) for draw in draws]
    if max(top_k) * FEW <= size:
        values, columns = top_tokens(x.float(), max(top_k))
        ids = np.sort(columns, 1)
        x = torch.from_numpy(np.take_along_axis(values, np.argsort(columns, 1), 1))
        peaks = peaks.cpu()
    depths = depths_below(x, peaks, [draw.temperature for draw in draws])
    masses = probabilities(depths)
    if any(draw.min_p > 0 for draw in draws):
        keep_min_p(masses, [draw.min_p for draw in draws])
    by_k, by_p = min(top_k) < size, any(draw.top_p < 1 for draw in draws)
    bins = depth_bins(depths) if by_k or by_p else depths
    if by_k:
        keep_top_k(x, bins, masses, top_k)
    if by_p:
        keep_top_p(x, bins, masses, [draw.top_p for draw in draws])
    return Masses(depths, masses, ids)


def tokens_of(found: Masses, draws: Sequence[Draw]) -> list[int]:
    """The token of each row."""
    uniforms = uniform([draw.seed for draw in draws], [draw.position for draw in draws])
    columns = draw(found.masses, uniforms)
    if found.ids is None:
        return columns
    return [int(row[i]) for row, i in zip(found.ids, columns, strict=True)]


def depths_below(x: torch.Tensor, peaks: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """(row maximum - logit) / temperature: float32 [n, V], at least 0.

    x: [n, V] any float dtype, peaks: [n] its finite row maxima. The difference is taken first, so that a tiny
    temperature cannot give inf - inf.
    """
    divisors = torch.tensor(temperatures, dtype=torch.float32, device=x.device)
    return (peaks.float()[:, None] - x.float()).div_(divisors[:, None])


def keep_min_p(masses: torch.Tensor, min_p: Sequence[float]) -> None:
    """Keep tokens at least `min_p` [n] times as likely as the most likely one (Nguyen et al. 2024)."""
    limits = torch.tensor([math.ceil(p * ONE) for p in min_p], device=masses.device)
    masses.masked_fill_(masses < limits[:, None], 0)


def depth_bins(depths: torch.Tensor) -> torch.Tensor:
    """The bin of each depth, int64 [n, V], for `keep_top_k` and `keep_top_p`. Monotonic in depth."""
    return (depths.view(torch.int32) >> BIN_SHIFT).sub_(FIRST_BIN).clamp_(0, NUM_BINS - 1).long()


def keep_top_k(x: torch.Tensor, bins: torch.Tensor, masses: torch.Tensor, top_k: Sequence[int]) -> None:
    """Keep the first `top_k` [n] tokens of the order (Fan et al. 2018). x: logits [n, V]."""
    present = (masses > 0).long()
    needs = [min(k, count) for k, count in zip(top_k, present.sum(1).tolist(), strict=True)]
    _keep_prefix(x, bins, masses, present, needs)


def keep_top_p(x: torch.Tensor, bins: torch.Tensor, masses: torch.Tensor, top_p: Sequence[float]) -> None:
    """Keep the shortest prefix with `top_p` [n] of the mass left (Holtzman et al. 2019), at least one token."""
    totals = masses.sum(1).tolist()
    needs = [
        total if p >= 1 else min(max(math.ceil(p * total), 1), total)
        for p, total in zip(top_p, totals, strict=True)
    ]
    _keep_prefix(x, bins, masses, masses, needs)


def _keep_prefix(
    x: torch.Tensor, bins: torch.Tensor, masses: torch.Tensor, weights: torch.Tensor, needs: Sequence[int]
) -> None:
    """Keep, per row, the shortest prefix of the order whose `weights` sum to the row's `needs`, in place.

    needs: [n], from 1 to the sum of the row's weights.

    A weighted selection without a sort: a histogram finds the bin in which the sum is reached, and only that
    bin is sorted. Sums are of integers, so this is what sorting the whole row would give.
    """
    reached = weights.new_zeros(len(x), NUM_BINS).scatter_add_(1, bins, weights).cumsum_(1)
    need = torch.tensor(needs, device=x.device)[:, None]
    edges = (reached < need).sum(1, keepdim=True)
    before = torch.nn.functional.pad(reached, (1, 0)).gather(1, edges)

    rows, ids = (bins == edges).nonzero(as_tuple=True)  # by row, then id
    order = np.lexsort((-x[rows, ids].float().cpu().numpy(), rows.cpu().numpy()))  # stable: ties by id
    ids = ids[torch.from_numpy(order).to(x.device)]
    weight = weights[rows, ids]
    ahead = weight.cumsum(0) - weight  # over all rows; wraps around, and back in the difference
    firsts = torch.searchsorted(rows, torch.arange(len(x), device=x.device))
    drop = ahead - ahead[firsts][rows] >= (need - before)[rows, 0]
    masses[rows[drop], ids[drop]] = 0
    masses.masked_fill_(bins > edges, 0)


def top_tokens(x: torch.Tensor, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Values and ids [n, k] of the k largest logits of each row, largest first, ties by lower id.

    `torch.topk` picks any of the tokens that tie for the last place. So k + 1 are taken, and a row whose tie
    crosses place k is sorted again from all of its candidates.
    """
    top, columns = x.topk(min(k + 1, x.shape[1]), dim=1)
    values, ids = top.float().cpu().numpy(), columns.cpu().numpy()
    order = np.lexsort((ids, -values), axis=1)[:, :k]
    values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    if 0 < k < x.shape[1]:
        for row in (top[:, k - 1] == top[:, k]).nonzero()[:, 0].tolist():
            candidates = (x[row] >= top[row, k - 1]).nonzero()[:, 0]
            candidates = candidates[x[row, candidates].argsort(descending=True, stable=True)][:k]
            values[row], ids[row] = x[row, candidates].float().cpu().numpy(), candidates.cpu().numpy()
    return values, ids


def draw(masses: torch.Tensor, uniforms: NDArray[np.float64]) -> list[int]:
    """Per row, the first token by id whose cumulative mass exceeds `uniforms` [n] times the row's total.

    masses: int64 [n, V] with a positive sum in every row; uniforms: in (0, 1), multiples of 2**-53. The
    search goes over sums of blocks first, then over the tokens of one block.
    """
    size = masses.shape[1]
    whole = size - size % BLOCK
    sums = masses[:, :whole].view(len(masses), whole // BLOCK, BLOCK).sum(2)
    rest = masses[:, whole:].sum(1, keepdim=True)
    reached = torch.cat((torch.zeros_like(rest), sums, rest), 1).cumsum_(1).cpu().numpy()
    scaled = np.ldexp(uniforms, 53).astype(np.int64).tolist()
    targets = [u * total >> 53 for u, total in zip(scaled, reached[:, -1].tolist(), strict=True)]
    target = np.array(targets)[:, None]
    block = (reached[:, 1:] <= target).sum(1, keepdims=True)
    starts = torch.from_numpy(block * BLOCK).to(masses.device)
    ids = starts + torch.arange(BLOCK, device=masses.device)
    inside = masses.gather(1, ids.clamp(max=size - 1)).cpu().numpy().cumsum(1)
    steps = (inside <= target - np.take_along_axis(reached, block, 1)).sum(1, keepdims=True)
    token_ids: list[int] = (block * BLOCK + steps)[:, 0].tolist()
    return token_ids
