"""Keys and values on their way into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagewire.kernels.cuda import kv
from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.data.layer import Norm
from pagewire.kernels.data.paging import Cache, token_view
from pagewire.kernels.reference.kernels import reference

from .attention import BLOCK_SIZE, LLAMA, SMALL, Shape
from .case import Case, Extent, Run, distance, num_copies


def write_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """QKV rows of 64 and 8,192 tokens: rotated, written, also with the norm of heads, also as fp8."""
    shape = SMALL if extent is Extent.SMALL else LLAMA
    for tokens in (24,) if extent is Extent.SMALL else (64, 8192):
        for kept, normed in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float8_e4m3fn, False)):
            yield _write_case(launcher, on, tokens, kept, normed, shape)


def _write_case(
    launcher: KernelLauncher, on: str, tokens: int, kept: torch.dtype, normed: bool, shape: Shape
) -> Case:
    read = tokens * (shape.heads + 2 * shape.kv_heads) * shape.size * 2
    written = tokens * shape.size * (2 * shape.heads + 2 * shape.kv_heads * kept.itemsize)
    copies, pages = num_copies(read + written), -(-tokens // BLOCK_SIZE)
    widths = [shape.heads, shape.kv_heads, shape.kv_heads]
    qkv = torch.randn(copies, tokens, sum(widths), shape.size, device=on).bfloat16()
    pool = (copies, pages, shape.kv_heads, BLOCK_SIZE, shape.size)
    k_cache, v_cache = (torch.zeros(pool, device=on).to(kept) for _ in range(2))
    angles = torch.rand(tokens, shape.size, device=on) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    caches = [Cache(*pair) for pair in zip(k_cache, v_cache, strict=True)]
    slots = torch.randperm(pages * BLOCK_SIZE, device=on)[:tokens]
    weight = torch.rand(shape.size, device=on).bfloat16() + 0.5
    head_norms = 2 * (Norm(weight, 1e-6, 0.0),) if normed else None

    def run(i: int) -> None:
        q, k, v = torch.split(qkv[i], widths, 1)
        kv.write_kv(launcher, q, k, v, caches[i], slots, (cos, sin), head_norms)

    def error() -> float:
        q, k, v = (x.double() for x in torch.split(qkv[0], widths, 1))
        if normed:
            q, k = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double() for x in (q, k))
        reference.rotary(q, k, cos.double(), sin.double())
        run(0)
        rows = [
            token_view(exchange_chunks(cache[0]))[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
            for cache in (k_cache, v_cache)
        ]
        worst = max(distance(rows[0].float(), k), distance(rows[1].float(), v))
        return max(worst, distance(qkv[0, :, : shape.heads], q))

    def in_torch(i: int) -> None:
        q, k, v = torch.split(qkv[i], widths, 1)
        if normed:
            q, k = (reference.rms_norm(x, weight, 1e-6) for x in (q, k))
        reference.rotary(q, k, cos, sin)
        for heads, cache in ((k, k_cache), (v, v_cache)):
            token_view(cache[i])[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = heads.to(kept)

    name = f"write_kv {tokens} {str(kept).removeprefix('torch.')}{' normed' if normed else ''}"
    peers: dict[str, Run] = {"torch": in_torch} if kept == torch.bfloat16 else {}
    return Case(name, read + written, 0, copies, run, error, 5e-2 if kept.itemsize == 1 else 1e-2, peers)
