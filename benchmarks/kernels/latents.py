"""Attention to latents of DeepSeek's sizes: one new token for each request, drafts, and prompts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagewire.kernels.cuda import attention, latents
from pagewire.kernels.cuda.launch import KernelLauncher
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.data.paging import Cache

from .attention import BLOCK_SIZE, equal_requests
from .case import Case, Extent, distance, num_copies

SIZE = 576
HEADS = (16, 128)
"""As of a rank of eight, or of DeepSeek-V2-Lite; and as of DeepSeek-V3."""
BATCHES = {
    Extent.FULL: [(n, 1, length) for n in (1, 8, 64) for length in (4096, 32768)]
    + [(64, 4, 4096), (1, 2048, 2048), (1, 2048, 32768)],
    Extent.QUICK: [(1, 1, 32768), (64, 1, 4096), (64, 4, 4096), (1, 2048, 2048)],
    Extent.SMALL: [(2, 1, 40)],
}
"""Requests, and of each new tokens and all."""


def latent_cases(launcher: KernelLauncher, on: str, extent: Extent) -> Iterator[Case]:
    """Every batch with each number of heads."""
    for requests, queries, length in BATCHES[extent]:
        for heads in HEADS:
            yield latent_case(launcher, on, heads, requests, queries, length)


def latent_case(
    launcher: KernelLauncher, on: str, heads: int, requests: int, queries: int, length: int
) -> Case:
    """Requests with `queries` new tokens of `length` in all."""
    rank, pages = latents.LATENTS[SIZE], -(-length // BLOCK_SIZE)
    cache_bytes = requests * length * SIZE * 2
    copies, tokens = num_copies(cache_bytes), requests * queries
    pool = torch.randn(copies, requests * pages, 1, BLOCK_SIZE, SIZE, device=on).bfloat16()
    q = torch.randn(copies, tokens, heads, SIZE, device=on).bfloat16()
    out = torch.empty(tokens, heads, rank, dtype=q.dtype, device=on)
    table = torch.randperm(requests * pages, device=on).int().view(requests, pages)
    batch = equal_requests(queries, length, table)
    workspace = attention.Workspace.allocate(launcher.multiprocessors, on)
    caches, scale = [Cache.of_keys(k, rank) for k in pool], SIZE**-0.5

    def run(i: int) -> Tensor:
        return latents.attend(launcher, workspace, q[i], caches[i], batch, scale, out=out)

    def error() -> float:
        found, worst = run(0).clone(), 0.0
        for request in {0, requests - 1}:
            keys = exchange_chunks(pool[0, table[request].long()]).flatten(0, 2)[:length].double()
            for query in {0, queries - 1}:
                seen, row = length - queries + query + 1, request * queries + query
                weights = torch.softmax(q[0, row].double() @ keys[:seen].T * scale, 1)
                worst = max(worst, distance(found[row], weights @ keys[:seen, :rank]))
        return worst

    pairs = requests * (queries * (length - queries) + queries * (queries + 1) // 2)
    num_bytes = cache_bytes + tokens * heads * (SIZE + rank) * 2
    flops = 2 * pairs * heads * (SIZE + rank)
    name = f"latents {requests} x {queries} of {length}, {heads} heads"
    return Case(name, num_bytes, flops, copies, run, error, 2e-2)
