"""Log probabilities of tokens, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagewire.ipc.codec import Tensor
from pagewire.ipc.messages import LogprobRows


def logprob_rows(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> LogprobRows:
    """Log probability and rank of `token_ids[i]` under `logits[i]`, and the k most likely tokens.

    logits: [n, V], any float dtype. k: -1 means the whole vocabulary.
    """
    x = logits.float()
    k = x.shape[1] if k == -1 else min(k, x.shape[1])
    logprobs = torch.log_softmax(x, -1)
    ids = torch.tensor(token_ids, device=x.device)[:, None]
    top = torch.sort(x, stable=True, descending=True).indices[:, :k]
    columns = torch.cat((ids, top), 1)
    ranks = (x > x.gather(1, ids)).sum(1) + 1
    values = logprobs.gather(1, columns)
    return LogprobRows(
        Tensor("int32", columns.shape, columns.int().cpu().numpy().tobytes()),
        Tensor("float32", values.shape, values.cpu().numpy().tobytes()),
        Tensor("int32", ranks.shape, ranks.int().cpu().numpy().tobytes()),
    )
