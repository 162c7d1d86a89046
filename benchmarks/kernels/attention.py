"""Attention: one new token for each request, prompts, and whole prompts of encoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cuda import attention
from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.data.paging import WHOLE, AttentionBatch, Cache, LogitTerms

from .case import Case, Extent, Run, distance, num_copies

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """Attention heads, as of Llama-3-8B."""

    heads: int = 32
    kv_heads: int = 8
    size: int = 128


LLAMA = Shape()


def equal_requests(queries: int, length: int, table: Tensor) -> AttentionBatch:
    """A batch of requests with as many new tokens and as many tokens in all. table: int32 [R, pages]."""
    on, requests = table.device, len(table)
    return AttentionBatch(
        torch.arange(0, requests * queries + 1, queries, dtype=torch.int32, device=on),
        torch.full((requests,), length, dtype=torch.int32, device=on),
        table,
        torch.full((requests * queries,), -1, dtype=torch.int64, device=on),
        queries,
        length,
    )


def attention_case(
    launcher: KernelLauncher,
    on: str,
    name: str,
    queries: int,
    contexts: int,
    requests: int,
    kept: torch.dtype,
    shape: Shape,
    whole: bool = False,
) -> Case:
    """Requests with `queries` new tokens each, behind `contexts` tokens in the cache.

    whole: a token sees those behind it, too.
    """
    length = queries + contexts
    pages = -(-length // BLOCK_SIZE)
    cache_bytes = 2 * requests * length * shape.kv_heads * shape.size * kept.itemsize
    io_bytes = 2 * requests * queries * shape.heads * shape.size * 2
    pairs = requests * (queries * contexts + (queries**2 if whole else queries * (queries + 1) // 2))
    copies = num_copies(cache_bytes)
    pool = (copies, requests * pages, shape.kv_heads, BLOCK_SIZE, shape.size)
    k, v = (torch.empty(pool, dtype=torch.bfloat16, device=on).normal_().to(kept) for _ in range(2))
    q = torch.randn(copies, requests * queries, shape.heads, shape.size, device=on).bfloat16()
    table = torch.randperm(requests * pages, device=on).int().view(requests, pages)
    batch = equal_requests(queries, length, table)
    workspace = attention.Workspace.allocate(launcher.multiprocessors, on)
    caches = [Cache(*pair) for pair in zip(k, v, strict=True)]
    out, scale, terms = torch.empty_like(q[0]), shape.size**-0.5, LogitTerms(future=WHOLE if whole else 0)

    def run(i: int, warpgroups: bool = True, invariant: bool = False) -> Tensor:
        call = partial(attention.paged_attention, launcher, workspace, q[i], caches[i], batch, scale, terms)
        return call(out, warpgroups=warpgroups, invariant=invariant)

    def error() -> float:
        found, worst = run(0).clone(), 0.0
        for request in {0, requests // 2, requests - 1}:
            row = slice(request * queries, (request + 1) * queries)
            keys, values = (
                exchange_chunks(cache[0, table[request].long()])
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                .double()
                for cache in (k, v)
            )
            some = torch.randperm(queries, device=on)[:64]  # float64 of all would take too long
            for head in range(shape.heads):
                of = head * shape.kv_heads // shape.heads
                logits = q[0, row][some, head].double() @ keys[of].T * scale
                hidden = torch.arange(length, device=on) > (contexts + some)[:, None] + terms.future
                truth = torch.softmax(logits.masked_fill(hidden, -torch.inf), 1) @ values[of]
                worst = max(worst, distance(found[row][some, head], truth))
        return worst

    peers: dict[str, Run] = {}
    if queries > 1 and attention.has_warpgroups(launcher.capability, q.dtype, kept, shape.size):
        peers["no warpgroups"] = partial(run, warpgroups=False)
    if not whole:
        peers["in any batch"] = partial(run, invariant=True)
    if kept == torch.bfloat16 and contexts in (0, length - 1) and length % BLOCK_SIZE == 0:
        dense = (copies, requests, shape.kv_heads, length, shape.size)
        heads = q.view(copies, requests, queries, shape.heads, shape.size).transpose(2, 3)
        peers["torch"] = _torch_attention(heads, k.view(dense), v.view(dense), contexts == 0 and not whole)
    if queries == 1 and kept == torch.bfloat16 and (flashinfer := _flashinfer()) is not None:
        peers["flashinfer"] = _flashinfer_decode(flashinfer, q, k, v, table, length, shape)
    num_bytes, flops = cache_bytes + io_bytes, 4 * pairs * shape.heads * shape.size
    return Case(name, num_bytes, flops, copies, run, error, 2e-2, peers)


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Run:
    """PyTorch's attention over copies of queries, keys and values [copies, requests, heads, tokens, size]."""

    def run(i: int) -> Tensor:
        return functional.scaled_dot_product_attention(q[i], k[i], v[i], is_causal=is_causal, enable_gqa=True)

    return run


def _flashinfer() -> Any:
    try:
        import flashinfer  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return flashinfer


def _flashinfer_decode(
    flashinfer: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: int, shape: Shape
) -> Run:
    requests, pages = table.shape
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "HND", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(0, requests * pages + 1, pages, dtype=torch.int32, device=q.device),
        table.flatten(),
        torch.full((requests,), (length - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=q.device),
        shape.heads,
        shape.kv_heads,
        shape.size,
        BLOCK_SIZE,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda i: wrapper.run(q[i], (k[i], v[i]))


SMALL = Shape(4, 2, 64)
DECODE = {
    Extent.FULL: [(requests, length) for requests in (1, 8, 64, 256) for length in (512, 4096, 32768)],
    Extent.QUICK: [(8, 32768), (64, 4096)],
    Extent.SMALL: [(3, 64)],
}
"""Requests, and keys of each."""
NARROW_DECODE = {(64, 4096), (3, 64)}
"""Those that are also measured over fp8."""
PREFILL = {
    Extent.FULL: [(queries, context) for queries in (512, 2048, 8192) for context in (0, 30720)],
    Extent.QUICK: [(2048, 0), (2048, 30720)],
    Extent.SMALL: [(32, 0), (32, 50)],
}
"""Queries, and keys in front of them."""
ENCODERS = {
    Extent.FULL: [(64, 128), (256, 128), (32, 512), (1, 8192)],
    Extent.QUICK: [(64, 128)],
    Extent.SMALL: [(2, 48)],
}
"""Prompts, and tokens of each."""


def decode_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """One new token per request."""
    shape = SMALL if extent is Extent.SMALL else LLAMA
    for requests, length in DECODE[extent]:
        for kept in (torch.bfloat16, torch.float8_e4m3fn):
            if kept != torch.bfloat16 and (requests, length) not in NARROW_DECODE:
                continue
            name = f"decode {requests} x {length} {str(kept).removeprefix('torch.')}"
            yield attention_case(launcher, on, name, 1, length - 1, requests, kept, shape)


def prefill_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """One request's prompt, alone or after a long context."""
    shape = SMALL if extent is Extent.SMALL else LLAMA
    for queries, context in PREFILL[extent]:
        name = f"prefill {queries} after {context}"
        yield attention_case(launcher, on, name, queries, context, 1, torch.bfloat16, shape)


def encoder_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """Whole prompts of an encoder with the heads of BERT-base."""
    shape = Shape(2, 2, 64) if extent is Extent.SMALL else Shape(12, 12, 64)
    for requests, length in ENCODERS[extent]:
        name = f"encoder {requests} x {length}"
        yield attention_case(launcher, on, name, length, 0, requests, torch.bfloat16, shape, whole=True)
