"""How routers choose experts, in plain PyTorch; `pagewire.kernels.data.routing` says what the numbers mean."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.data.routing import ExpertGroups, Routing


def choose(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts and their weights, see `pagewire.kernels.reference.kernels.Kernels.route`, of logits [T, E].

    bias: float32 [E], or None.
    """
    routing.check(logits.shape[1])
    logits = logits.float()
    scores = scores_of(logits, routing)
    by = logits if routing.by_logits else scores
    ids = for_choice(by, bias, routing.groups).topk(routing.num_chosen).indices
    weights = scores.gather(1, ids) if routing.margin == 0 else near_shares(logits, ids, routing.margin)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    return ids, (weights * routing.factor).to(routing.dtype).float()


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """The scores [T, E] of logits float32 [T, E]."""
    return elementwise(torch.sigmoid, logits) if routing.sigmoid else torch.softmax(logits, -1)


def for_choice(scores: Tensor, bias: Tensor | None, groups: ExpertGroups | None) -> Tensor:
    """What experts are chosen by, [T, E], of their scores or logits [T, E]; -inf in groups that are left out."""
    if bias is not None:
        scores = scores + bias
    if groups is None:
        return scores
    in_groups = scores.view(len(scores), groups.count, -1)
    kept = in_groups.topk(groups.best).values.sum(-1).topk(groups.kept).indices
    left_out = torch.ones(in_groups.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, kept, False)
    return in_groups.masked_fill(left_out[..., None], -torch.inf).flatten(1)


def near_shares(logits: Tensor, ids: Tensor, margin: float) -> Tensor:
    """The scores [T, C] of chosen experts int64 [T, C] where `Routing.margin` is above 0."""
    left, shares = logits, []
    for column in ids.unbind(1):
        chosen = column[:, None]
        own = logits.gather(1, chosen)
        is_far = (own - logits) / logits.abs().maximum(own) > margin
        shares.append(torch.softmax(left.masked_fill(is_far, -torch.inf), -1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(shares, 1)
