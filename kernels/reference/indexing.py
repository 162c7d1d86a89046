"""The scores of an indexer's keys in plain PyTorch: the oracle of kernels. See `Kernels.index_scores`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.data.paging import AttentionBatch


def index_scores(
    q: Tensor, weights: Tensor, scale: float, index: Tensor, batch: AttentionBatch, rows: range
) -> Tensor:
    """See `Kernels.index_scores`. All keys of a request are gathered for each of its tokens."""
    starts, lengths = batch.query_start_loc.long(), batch.seq_lens.long()
    scores = torch.full((len(q), batch.max_seq_len), -torch.inf, device=q.device)
    requests = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), starts.diff())
    tokens = torch.arange(len(requests), device=q.device)
    places = torch.arange(batch.max_seq_len, device=q.device)
    positions = (lengths[requests] - starts[requests + 1] + tokens)[:, None]
    seen = places <= positions
    blocks = batch.block_table[requests][:, places // index.shape[1]].long()
    keys = index[torch.where(seen, blocks, 0), places % index.shape[1]]
    products = torch.einsum("thd,tkd->thk", q[: len(requests)].float(), keys.float()).mul_(scale).relu_()
    of_keys = (products * weights[: len(requests), :, None]).sum(1)
    scores[: len(requests)] = of_keys.masked_fill(~seen, -torch.inf)
    return scores[rows.start : rows.stop]
