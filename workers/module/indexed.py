"""What indexers of transformers make of the tokens of a step, see `pagewire.kernels.indexed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pagewire.kernels.indexed import IndexedTokens


def index_tokens(
    module: Any,
    rotate: Callable[..., tuple[Tensor, Tensor]] | None,
    hidden: Tensor,
    queries: Tensor,
    angles: tuple[Tensor, Tensor],
    at_end: bool = False,
) -> IndexedTokens:
    """What an indexer of transformers makes of hidden states [1, T, H] and its queries [1, T, heads * size].

    rotate: the family's rotation of queries and keys [1, T, heads, rope] by its cosines and sines, `angles`; None:
    nothing is rotated. at_end: the last elements of a head are rotated, not the first.
    """
    queries = queries.view(*queries.shape[:-1], module.n_heads, module.head_dim)
    norm = module.k_norm
    keys = norm(module.wk(hidden).to(norm.weight.dtype)).to(hidden.dtype).unsqueeze(2)
    if rotate is not None:
        rope, size = module.qk_rope_head_dim, module.head_dim
        turned = slice(size - rope, size) if at_end else slice(rope)
        rotated = rotate(queries[..., turned], keys[..., turned], *angles, unsqueeze_dim=2)
        queries, keys = queries.clone(), keys.clone()
        queries[..., turned], keys[..., turned] = rotated
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    return IndexedTokens(
        module.layer_idx, queries[0], keys[0, :, 0], weights[0], module.softmax_scale, module.index_topk
    )
