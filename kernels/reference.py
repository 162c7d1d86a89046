"""Every kernel in plain PyTorch: the oracle of the tests, and the implementation where there is no compiler.

Attention and norms accumulate in float32 (float64 for float64 tensors).
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels import kv_codes
from pagewire.kernels.deltas import adapt_with
from pagewire.kernels.elementwise import elementwise
from pagewire.kernels.integers import Integers
from pagewire.kernels.integers import quantise as quantise
from pagewire.kernels.layer import Angles, HeadNorms
from pagewire.kernels.paging import CAUSAL, AttentionBatch, Cache, LogitTerms, check_scales, token_view
from pagewire.kernels.reference_bias import apply_terms, attend_at_once
from pagewire.kernels.reference_encoder import activate_each as activate_each
from pagewire.kernels.reference_encoder import encoder as encoder
from pagewire.kernels.reference_encoder import gelu_and_mul as gelu_and_mul
from pagewire.kernels.reference_encoder import layer_norm as layer_norm
from pagewire.kernels.weight import Linear, UnpackedLinear, Weight, check_rows


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gather(cache: Tensor, blocks: Tensor, length: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """The first `length` rows of a request, [num_heads, length, size]: KV heads repeated for their query heads."""
    tokens = token_view(cache)[blocks.long()].flatten(0, 1)[:length]
    tokens = kv_codes.dequantise(tokens, dtype) if cache.dtype == kv_codes.DTYPE else tokens.to(dtype)
    return tokens.transpose(0, 1).repeat_interleave(num_heads // cache.shape[1], dim=0)


QUERIES, KEYS = 16, 256  # shape of every product in attention; tiles are counted from position 0


def paged_attention(
    q: Tensor,
    cache: Cache,
    batch: AttentionBatch,
    scale: float,
    terms: LogitTerms = CAUSAL,
    out: Tensor | None = None,
) -> Tensor:
    """See `pagewire.kernels.attention.paged_attention`.

    PyTorch's products and sums may have other bits for other shapes. So all are of one shape, 16 queries by 256
    keys, with zeros where a request has none. On a GPU so small products take long; there an encoder's prompts are
    attended to at once, each by itself.
    """
    at_once = terms.future > 0 and q.device.type != "cpu" and terms.softcap is None and terms.sinks is None
    check_scales(cache)
    dtype = _accumulation_dtype(q)
    num_heads, block_size = q.shape[1], cache.k.shape[2]
    if out is None:
        out = q.new_empty(q.shape[0], num_heads, kv_codes.head_size(cache.v))
    out.zero_()
    starts = batch.query_start_loc.tolist()
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        first = seq_len - (rows.stop - rows.start)
        if first == seq_len:
            continue
        blocks = batch.block_table[request, : -(-seq_len // block_size)]
        gathered = (_gather(x, blocks, seq_len, num_heads, dtype) for x in (cache.k, cache.v))
        k, v = (x if by == 1 else x * by for x, by in zip(gathered, cache.scales, strict=True))
        if terms.window is not None:  # what no query sees may hold anything, and 0 x NaN is NaN
            v[:, : max(0, first - terms.window + 1)] = 0
        if at_once:
            out[rows] = attend_at_once(q[rows].to(dtype), k, v, scale, terms).to(out.dtype)
            continue
        tiles = list(zip(_tiles(k), _tiles(v), strict=True))
        queries = q[rows].to(dtype).transpose(0, 1) * scale
        for begin in range(first // QUERIES * QUERIES, seq_len, QUERIES):
            start, stop = max(begin, first), min(begin + QUERIES, seq_len)
            block = _padded(queries[:, start - first : stop - first], QUERIES, start - begin)
            positions = torch.arange(begin, begin + QUERIES, device=q.device)[:, None]
            num_tiles = -(-min(stop + terms.future, seq_len) // KEYS)
            attended = _attend(block, tiles[:num_tiles], positions, seq_len, terms)
            real = attended[:, start - begin : stop - begin].transpose(0, 1)
            out[rows][start - first : stop - first] = real.to(out.dtype)
    return out


def _attend(
    q: Tensor, tiles: list[tuple[Tensor, Tensor]], positions: Tensor, seq_len: int, terms: LogitTerms
) -> Tensor:
    """The outputs [heads, QUERIES, Dv] of queries at positions [QUERIES, 1]; tiles: keys and values, from 0 on."""
    logits = []
    for i, (k, _) in enumerate(tiles):
        keys = torch.arange(i * KEYS, (i + 1) * KEYS, device=q.device)
        logits.append(apply_terms(terms, q @ k.transpose(1, 2), positions, keys, seq_len))
    largest_logit = torch.stack([tile.amax(-1, keepdim=True) for tile in logits]).amax(0)
    total = torch.zeros_like(largest_logit)
    if terms.sinks is not None:
        sinks = terms.sinks.to(q.dtype)[:, None, None]
        largest_logit = largest_logit.maximum(sinks)
        total = elementwise(torch.exp, sinks - largest_logit)
    attended = q.new_zeros(*q.shape[:2], tiles[0][1].shape[2])
    for tile, (_, v) in zip(logits, tiles, strict=True):
        probabilities = elementwise(torch.exp, tile - largest_logit)
        total = total + probabilities.sum(-1, keepdim=True)
        attended = attended + probabilities @ v
    return attended / total


def _tiles(x: Tensor) -> Iterator[Tensor]:
    """The rows of x [heads, n, D] as tensors [heads, KEYS, D], the last one with zeros behind them."""
    for start in range(0, x.shape[1], KEYS):
        yield _padded(x[:, start : start + KEYS], KEYS, 0)


def _padded(x: Tensor, size: int, before: int) -> Tensor:
    """A copy of x [heads, n, D] as [heads, size, D], with `before` zero rows before it, the others behind."""
    padded = x.new_zeros(x.shape[0], size, x.shape[2])
    padded[:, before : before + x.shape[1]] = x
    return padded


def _as_stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as a cache of `dtype` holds them."""
    if dtype == kv_codes.DTYPE:
        return kv_codes.quantise(x)
    if dtype.itemsize > 1:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)


def store_kv(k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
    """See `pagewire.kernels.attention.store_kv`."""
    check_scales(cache)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    blocks, offsets = slots // cache.k.shape[2], slots % cache.k.shape[2]
    for stored, rows, scale in ((cache.k, k, cache.scales.k), (cache.v, v, cache.scales.v)):
        token_view(stored)[blocks, offsets] = _as_stored(rows[kept], stored.dtype, scale)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """See `pagewire.kernels.layers.rms_norm`."""
    dtype = _accumulation_dtype(x)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    result = normed.to(x.dtype) * weight if offset == 0.0 else normed * (weight.to(dtype) + offset)
    return result.to(x.dtype) if out is None else out.copy_(result)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """See `pagewire.kernels.layers.add_rms_norm`."""
    residual += x
    return rms_norm(residual, weight, eps, offset=offset)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `pagewire.kernels.layers.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return elementwise(functional.silu, gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See `pagewire.kernels.layers.gelu_tanh_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return elementwise(functional.gelu, gate, approximate="tanh") * up


def clamped_swiglu(x: Tensor) -> Tensor:
    """See `pagewire.kernels.layers.clamped_swiglu`."""
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * elementwise(torch.sigmoid, gate * 1.702))


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `pagewire.kernels.layers.rotary`."""
    for x in (q, k):
        rotated = x[..., : cos.shape[-1]]
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        rotated.copy_(rotated * cos[:, None] + turned * sin[:, None])


class HeadKernels(Protocol):
    """The kernels for heads that an implementation has one by one; see `pagewire.kernels.dispatch.Kernels`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor: ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def store_kv(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None: ...


def rotate_and_store_with(
    kernels: HeadKernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles,
    head_norms: HeadNorms | None,
    cache: Cache,
    slot_mapping: Tensor,
) -> Tensor:
    """See `pagewire.kernels.dispatch.Kernels.rotate_and_store`: one kernel after another."""
    if head_norms is not None:
        q, k = (
            kernels.rms_norm(heads, norm.weight, norm.eps, offset=norm.offset)
            for heads, norm in zip((q, k), head_norms, strict=True)
        )
    kernels.rotary(q, k, *angles)
    kernels.store_kv(k, v, cache, slot_mapping)
    return q


rotate_and_store = partial(rotate_and_store_with, sys.modules[__name__])


def largest(x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `pagewire.kernels.sampling.largest`."""
    if allowed is not None:
        x = only_allowed(x, allowed)
    values = x.amax(1)
    # argmax of a comparison is the first True; argmax of 16-bit floats is slow on CPUs.
    return values.float(), (x == values[:, None]).to(torch.uint8).argmax(1)


def only_allowed(x: Tensor, allowed: Tensor) -> Tensor:
    """See `pagewire.kernels.sampling.only_allowed`."""
    bits = allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=x.device) & 1
    return x.float().masked_fill(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf)


FRACTION_BITS = 44
"""Bits of the fraction of a token's mass."""

LOG2_E = 1.44269504
LN_2 = (0.693359375, -2.12194440e-4)  # in two parts: the first has so few bits that its products are exact
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def fixed_point_probabilities(depths: Tensor) -> Tensor:
    """See `pagewire.kernels.sampling.fixed_point_probabilities`."""
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


ROWS = 16  # rows of every product in `linear`


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `pagewire.kernels.linear.linear`. On a GPU a row's bits may depend on the number of rows."""
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    num_rows = len(rows)
    # PyTorch sums in an order that depends on the number of rows, so there are always as many.
    blocks = functional.pad(rows, (0, 0, 0, -num_rows % ROWS)).view(-1, ROWS, x.shape[-1])
    out = x.new_empty(len(blocks), ROWS, len(weight))
    for block, result in zip(blocks, out, strict=True):
        result.copy_(functional.linear(block, weight, bias))
    return out.flatten(0, 1)[:num_rows].view(*x.shape[:-1], len(weight))


CODES = 127
"""The largest code of an activation; codes are symmetric around 0."""
LEAST_SHARED = 32
"""Columns of a row that share a scale, at least."""


adapt = partial(adapt_with, linear)


def quantised_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """The product with a weight whose scheme is `Integers`, to the bits of every compiled kernel.

    The rows of x are quantised as well. Where the weight has groups, the largest |x| of every 256 columns (128
    where groups are larger than 32), the first of equal ones, is an outlier: it is multiplied as it is, and counts
    as 0 in its group. A group of max(32, `scheme.group`) columns of a row, or the whole row where the weight has no
    groups, becomes `code = rint(t)` with `t = x * (127 / max|x|)` and the scale `max|x| / 127`, in float32. With S
    and P, the sums of `code * (value - zero)` and of `code` over one of the weight's groups, and the groups in
    ascending order:

        y = fma(float(S), scale_x * scale_w, y)
        y = fma(float(P) * scale_x, offset_w, y)      where the weight has offsets

    S and P are exact. Outliers follow in ascending order, each as a group of one column with S = value - zero, P =
    1 and scale_x = x. Where the weight has no groups there are finer codes instead, `rint((t - code) * 254)`, which
    follow with the scale divided by 254. Then the bias is added, and the sum is rounded to the dtype. A NaN or an
    infinity in a row makes the row's outputs NaN.

    Args:
        x: [..., K], of the weight's dtype.
        weight: [N, K].
        bias: [N], of the same dtype.

    Returns:
        [..., N].
    """
    scheme = weight.scheme
    assert isinstance(scheme, Integers)
    num_out, num_in = weight.shape
    rows = x.reshape(-1, num_in).float()
    y = torch.zeros(len(rows), num_out, device=x.device)
    if scheme.group is None:
        codes, row_scales, finer = _quantised_rows(rows, num_in)
        y = _add_groups(y, codes, row_scales, weight)
        y = _add_groups(y, finer, row_scales / torch.full_like(row_scales, 2 * CODES), weight)
    else:
        outliers, at = _outliers(rows, 256 if scheme.group <= LEAST_SHARED else 128)
        codes, row_scales, _ = _quantised_rows(rows.scatter(1, at, 0.0), max(LEAST_SHARED, scheme.group))
        y = _add_groups(y, codes, row_scales, weight)
        y = _add_outliers(y, outliers, at, weight)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], num_out)


def _outliers(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """An outlier of each block of columns of rows [M, K], NaN if not finite, and their columns: both [M, n]."""
    magnitude = rows.abs().nan_to_num(torch.inf, posinf=torch.inf)
    blocks = torch.unflatten(
        functional.pad(magnitude, (0, -rows.shape[1] % block), value=-1.0), 1, (-1, block)
    )
    at = blocks.argmax(-1) + torch.arange(blocks.shape[1], device=rows.device) * block
    outliers = rows.gather(1, at)
    return torch.where(outliers.isfinite(), outliers, torch.nan), at


def _quantised_rows(rows: Tensor, shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes float64 [M, K] of rows float32 [M, K], their scales, and their finer codes.

    shared: columns that have one scale. scales: [M, K / shared], rounded up.
    """
    num_in = rows.shape[1]
    groups = torch.unflatten(functional.pad(rows, (0, -num_in % shared)), 1, (-1, shared))
    largest = groups.abs().amax(-1, keepdim=True)  # NaN where there is one
    # A tensor: PyTorch divides by numbers, and numbers by tensors, otherwise.
    most = torch.full_like(largest, CODES)
    inverse = torch.where(largest > 0, most / largest, 0.0).clamp(max=torch.finfo(torch.float32).max)
    exact = torch.where(largest.isfinite(), groups * inverse, 0.0)
    codes, scales = exact.round(), torch.where(largest.isfinite(), largest / most, torch.nan)
    finer = ((exact - codes) * (2 * CODES)).round()
    return codes.double().flatten(1)[:, :num_in], scales[..., 0], finer.double().flatten(1)[:, :num_in]


def _add_groups(y: Tensor, codes: Tensor, row_scales: Tensor, weight: Weight) -> Tensor:
    """y [M, N] with the products of a weight's groups added; codes and scales: see `_quantised_rows`."""
    scheme = weight.scheme
    assert isinstance(scheme, Integers)
    _, scales, *offsets = weight.parts
    group = scheme.group or weight.shape[1]
    values = scheme.values(weight.parts).double() - scheme.zero
    shared = max(LEAST_SHARED, group)
    for start in range(0, weight.shape[1], group):
        of_group, i = slice(start, start + group), start // group
        row_codes, row_scale = codes[:, of_group], row_scales[:, start // shared, None]
        sums = row_codes @ values[:, of_group].T  # exact in float64
        y = _fma(sums.float(), row_scale * scales[:, i].float(), y)
        if offsets:
            y = _fma(row_codes.sum(1, keepdim=True).float() * row_scale, offsets[0][:, i].float(), y)
    return y


def _add_outliers(y: Tensor, outliers: Tensor, at: Tensor, weight: Weight) -> Tensor:
    """y [M, N] with the products of outliers added; see `_outliers`."""
    scheme = weight.scheme
    assert isinstance(scheme, Integers) and scheme.group is not None
    _, scales, *offsets = weight.parts
    values = scheme.values(weight.parts).float() - scheme.zero
    for outlier, columns in zip(torch.split(outliers, 1, 1), at.T, strict=True):
        groups = columns // scheme.group
        y = _fma(values.T[columns], outlier * scales.T[groups].float(), y)
        if offsets:
            y = _fma(outlier, offsets[0].T[groups].float(), y)
    return y


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` in float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which float32's rounding cannot tell from the
    exact sum (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, other = a.double() * b.double(), c.double()
    total = product + other
    back = total - product
    error = (product - (total - back)) + (other - back)
    bits = total.view(torch.int64)
    even = (error.abs() > 0) & (bits & 1 == 0)  # false for NaN
    away = (error > 0) == (total > 0)
    return torch.where(even, torch.where(away, bits + 1, bits - 1), bits).view(torch.float64).float()


class UnpackedQuantisedLinear:
    """`quantised_linear` over a weight that stays as it is."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        check_rows(x, self.in_features, self.dtype)
        return quantised_linear(x, self._weight, self._bias)


def pack(weight: Weight, bias: Tensor | None = None) -> Linear:
    """See `pagewire.kernels.linear.pack`. The weight is kept as it is, dense or quantised."""
    if isinstance(weight.scheme, Integers):
        return UnpackedQuantisedLinear(weight, bias)
    return UnpackedLinear(linear, weight, bias)


def dense(weight: Weight) -> Tensor:
    """See `pagewire.kernels.quantising.dense`."""
    return weight.dense()


def experts(experts: object) -> None:
    """None: in plain PyTorch experts are called one by one."""


def route(logits: Tensor, num_chosen: int, *, normalised: bool, rounded: bool) -> tuple[Tensor, Tensor]:
    """See `pagewire.kernels.experts.route`."""
    weights, ids = torch.softmax(logits.float(), -1).topk(num_chosen)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights.to(logits.dtype).float() if rounded else weights


def add_gated(out: Tensor, x: Tensor, gate: Tensor) -> None:
    """See `pagewire.kernels.experts.add_gated`."""
    out += elementwise(torch.sigmoid, gate) * x


def stack(input_norm: object, layers: object) -> None:
    """None: in plain PyTorch the kernels of a stack are called one by one."""
