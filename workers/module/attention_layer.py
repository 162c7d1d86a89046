"""The attention layer of models of one's own: on the paged KV cache within a step, and in plain PyTorch elsewhere.

The two are compared when a model is loaded, as for every model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewire.workers.errors import LoadError
from pagewire.workers.module.replaced_methods import alibi_slopes, paged
from pagewire.workers.step.context import is_in_step


class Attention(nn.Module):
    """Causal attention of one layer, between the projections of queries, keys and values and that of the output.

    It has no weights. Each layer of a model that attends has one of its own.

    Args:
        layer_idx: number of the layer in the model, from 0.
        scale: factor of the logits; None: head size ** -0.5.
        window: how many tokens up to its own a token sees, that included; None: all.
        softcap: logits become softcap * tanh(logit / softcap); None: they stay.
        alibi: logits are biased by distance, with the slopes of Press et al. 2022.
    """

    def __init__(
        self,
        layer_idx: int,
        scale: float | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        alibi: bool = False,
    ) -> None:
        super().__init__()
        self.layer_idx, self.scale = layer_idx, scale
        self.window, self.softcap, self.alibi = window, softcap, alibi

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] to [1, T, Hq * Dv].

        Hq is a multiple of Hkv. Rotary embeddings are applied before.

        Raises:
            LoadError: there are several sequences, which a step gives as one.
        """
        if len(query) != 1:
            raise LoadError("it runs attention over several batches at once")
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        slopes = alibi_slopes(query.shape[1], query.device) if self.alibi else None
        if is_in_step():
            mixed = paged(self.layer_idx, query, key, value, scale, self.window, slopes, self.softcap)
        else:
            mixed = self._plain(query, key, value, scale, slopes)
        return mixed.flatten(2)

    def _plain(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, slopes: Tensor | None
    ) -> Tensor:
        """The same in plain PyTorch, with logits in float32: [1, T, Hq, Dv]."""
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        logits = query.float() @ key.float().transpose(-1, -2) * scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        places = torch.arange(query.shape[2], device=query.device)
        distances = places - places[:, None]
        if slopes is not None:
            logits = logits + slopes[:, None, None] * distances
        hidden = distances > 0 if self.window is None else (distances > 0) | (distances <= -self.window)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).to(value.dtype)
        return (weights @ value).transpose(1, 2)
