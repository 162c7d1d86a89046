"""Runs the attention of a Hugging Face module on the paged KV cache.

`attend` is registered in transformers' `AttentionInterface` under `NAME`. It takes the step's metadata from
`current_step`, so a module need not hand anything down to its layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.indexed import IndexedTokens
from pagewire.workers.errors import LoadError
from pagewire.workers.step.context import current_step

NAME = "pagewire"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: IndexedTokens | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls.

    query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv]; returns [1, T, Hq, Dv]. Keys and values may be
    latents, see `latent.py`. position_bias: by distance float32 [Hq, 2 R], see `LogitTerms.relative_bias`.

    Raises:
        LoadError: the model builds a mask of its own, or runs several batches at once.
    """
    if attention_mask is not None and indices is None:
        raise LoadError("it builds its own attention mask or bias")
    if len(query) != 1:
        raise LoadError("it runs attention over several batches at once")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if not q.dtype == k.dtype == v.dtype:  # norms of some models leave queries and keys in float32
        q, k = q.to(v.dtype), k.to(v.dtype)
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer: Any = getattr(module, "layer_idx", -1)  # some encoders do not number their layers
    heads: Any = getattr(module, "latent_heads", None)
    if heads is not None:
        nope = heads.sizes.nope
        q = torch.cat([heads.queries(q[..., :nope]), q[..., nope:]], 2)
    out = current_step().attend(
        layer,
        q,
        k,
        v,
        scale,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        index=indices,
        relative_bias=position_bias,
    )
    return (out if heads is None else heads.outputs(out))[None], None


def register() -> None:
    """Register `attend` with transformers under `NAME`, without a mask function."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
