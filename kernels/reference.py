"""Every kernel in plain PyTorch: what the other implementations are tested against, and run without.

Attention and norms accumulate in float32 (float64 for float64 tensors).
"""

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.paging import AttentionBatch, token_view
from pagewire.kernels.weight import Linear, UnpackedLinear, Weight


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gather(cache: Tensor, blocks: Tensor, length: int, num_heads: int) -> Tensor:
    """The first `length` rows of a request, [num_heads, length, size]: KV heads repeated for their query heads."""
    tokens = token_view(cache)[blocks.long()].flatten(0, 1)[:length]
    return tokens.transpose(0, 1).repeat_interleave(num_heads // cache.shape[1], dim=0)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `pagewire.kernels.attention.paged_attention`."""
    dtype = _accumulation_dtype(q)
    num_heads, block_size = q.shape[1], k_cache.shape[2]
    if out is None:
        out = q.new_empty(q.shape[0], num_heads, v_cache.shape[3])
    out.zero_()
    starts = batch.query_start_loc.tolist()
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        query_len = rows.stop - rows.start
        if query_len == 0:
            continue
        blocks = batch.block_table[request, : -(-seq_len // block_size)]
        k = _gather(k_cache, blocks, seq_len, num_heads).to(dtype)
        v = _gather(v_cache, blocks, seq_len, num_heads).to(dtype)

        logits = q[rows].to(dtype).transpose(0, 1) @ k.transpose(1, 2) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        key_position = torch.arange(seq_len, device=q.device)
        query_position = torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
        if alibi is not None:
            logits = logits + alibi.to(dtype)[:, None, None] * (key_position - query_position)
        hidden = key_position > query_position
        if window is not None:
            hidden |= key_position <= query_position - window
        logits = logits.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.to(dtype)[:, None, None].expand(-1, query_len, 1)
            logits = torch.cat([logits, sink], dim=-1)
        probabilities = torch.softmax(logits, dim=-1)[..., :seq_len]
        # Not a matrix product with zeros in it: 0 x NaN is NaN.
        seen = ~hidden.all(dim=0)
        values = probabilities[..., seen] @ v[:, seen]
        out[rows] = values.transpose(0, 1).to(out.dtype)
    return out


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `pagewire.kernels.attention.store_kv`."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    blocks, offsets = slots // k_cache.shape[2], slots % k_cache.shape[2]
    token_view(k_cache)[blocks, offsets] = k[kept]
    token_view(v_cache)[blocks, offsets] = v[kept]


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
    return functional.silu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See `pagewire.kernels.layers.gelu_tanh_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `pagewire.kernels.layers.rotary`."""
    for x in (q, k):
        rotated = x[..., : cos.shape[-1]]
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        rotated.copy_(rotated * cos[:, None] + turned * sin[:, None])


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


ROWS = 16  # of one product


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


def pack(weight: Weight, bias: Tensor | None = None) -> Linear:
    """See `pagewire.kernels.linear.pack`. The weight is kept dense."""
    return UnpackedLinear(linear, weight, bias)


def stack(input_norm: object, layers: object) -> None:
    """There is no implementation of a whole stack in plain PyTorch: its kernels are called one by one."""
