"""Methods of transformers' modules that are ours within a step; outside of one they stay what they are.

Most families ask for a function of attention, which `attention.py` registers. Those that compute attention
themselves are listed here, each with a few lines that call ours, and so are products that call no linear layer. The
proof at load compares the two, as for every model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from pagewire.workers.module import recurrences
from pagewire.workers.module.attention import current_step, is_in_step
from pagewire.workers.module.recurrences import replace_functions


@cache
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slopes float32 [H] of Press et al. 2022 ("Train Short, Test Long").

    They are powers of 2 ** (-8 / n), n being the next power of 2. Even powers come first where n is not H.
    """
    n = 1 << math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (torch.arange(1, n + 1, device=device) * (-8.0 / n))
    return slopes if n == num_heads else torch.cat([slopes[1::2], slopes[::2]])[:num_heads]


def own_slopes(module: Any, num_heads: int, device: torch.device) -> Tensor:
    """The slopes float32 [num_heads] of the heads that this rank has of an attention module."""
    first = getattr(module, "first_head", 0)
    return alibi_slopes(getattr(module, "all_heads", num_heads), device)[first : first + num_heads]


def replace_methods(causal: Any) -> None:
    """Replace the methods of a module and of those within it that `METHODS` has."""
    needs_no_mask = False
    replace_functions(causal)
    share_blocks(causal)
    for module in list(causal.modules()):
        if (found := METHODS.get(type(module).__name__)) is not None:
            name, ours = found
            if hasattr(module, "layer_id"):
                module.layer_idx = module.layer_id  # the name that all others have
            setattr(module, name, MethodType(_in_steps(getattr(type(module), name), ours), module))
            needs_no_mask |= type(module).__name__ in WITH_OWN_ATTENTION
        elif type(module).__name__ == "FalconLinear":
            module.__class__ = nn.Linear  # which rounds once where the other one rounds twice
    if needs_no_mask:
        # So that the name of its attention can be ours, for which transformers makes no mask.
        causal._can_set_attn_implementation = lambda: True
        if getattr(causal.config, "alibi", False):
            causal.set_attn_implementation("sdpa")  # Falcon's eager attention adds its bias twice


def share_blocks(causal: Any) -> None:
    """Make one module of the blocks in a module's layers that have the same weights, as Zamba's do."""
    first: dict[int, nn.Module] = {}
    for layer in list(causal.modules()):
        for name in ("shared_transf", "shared_transformer"):
            if (block := getattr(layer, name, None)) is not None:
                setattr(layer, name, first.setdefault(id(next(block.parameters())), block))


def _in_steps(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def method(module: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if is_in_step() else theirs)(module, *args, **kwargs)

    return method


def paged(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Our attention of query [1, Hq, T, D] to key, value [1, Hkv, T, D]: [1, T, Hq, D]. alibi: slopes [Hq]."""
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return current_step().attend(layer, q, k, v, scale, window=window, softcap=softcap, alibi=alibi)[None]


def heads_first(x: Tensor, num_heads: int) -> Tensor:
    """[1, T, H * D] as [1, H, T, D]."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def _gptj(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Of GPT-J and CodeGen."""
    return paged(module.layer_idx, query, key, value, 1 / module.scale_attn).transpose(1, 2), None


def _gpt_neo(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    """Of GPT-Neo, whose logits are not scaled."""
    window = module.config.window_size if module.attention_type == "local" else None
    return paged(module.layer_idx, query, key, value, 1.0, window).transpose(1, 2), None


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = own_slopes(module, module.num_heads, hidden_states.device)
    mixed = paged(module.layer_idx, query, key, value, module.inv_norm_factor, alibi=slopes)
    return residual + module.dense(mixed.flatten(2)), None


def _mpt(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    joined = module.Wqkv(hidden_states)
    if module.clip_qkv:
        joined = joined.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (heads_first(part, module.n_heads) for part in joined.chunk(3, -1))
    slopes = own_slopes(module, module.n_heads, hidden_states.device)
    mixed = paged(module.layer_idx, query, key, value, module.softmax_scale, alibi=slopes)
    return module.out_proj(mixed.flatten(2)), None


def _falcon(
    module: Any, hidden_states: Tensor, alibi: Tensor | None, *_: Any, position_embeddings: Any, **__: Any
) -> tuple[Tensor, None]:
    """Of all Falcon models: several keys with their queries, one key for all queries, or one for each."""
    groups = module.num_kv_heads
    joined = module.query_key_value(hidden_states).unflatten(-1, (groups, -1, module.head_dim))
    parts = joined[..., :-2, :], joined[..., -2:-1, :], joined[..., -1:, :]
    query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
    slopes = None
    if alibi is None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        slopes = own_slopes(module, module.num_heads, hidden_states.device) * module.inv_norm_factor
    mixed = paged(module.layer_idx, query, key, value, module.inv_norm_factor, alibi=slopes)
    return module.dense(mixed.flatten(2)), None


def _zamba_attention(module: Any, hidden_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
    """Of Zamba and Zamba2, whose layers share attention, and tell it their numbers."""
    module.layer_idx = layer_idx
    return type(module).forward(module, hidden_states, layer_idx, *args, **kwargs)


def _dbrx_expert(module: Any, x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
    """An expert of DBRX by calls of `F.linear`, which can be batch-invariant as `Tensor.matmul` cannot."""
    return F.linear(module.activation_fn(F.linear(x, w1)) * F.linear(x, v1), w2.T)


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "BloomAttention": ("forward", _bloom),
    "CodeGenAttention": ("_attn", _gptj),
    "DbrxExpertGLU": ("forward", _dbrx_expert),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _gptj),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "MptAttention": ("forward", _mpt),
    "Zamba2Attention": ("forward", _zamba_attention),
    "ZambaAttention": ("forward", _zamba_attention),
    **recurrences.METHODS,
}
"""By the class of a module: the name of its method, and ours in its place."""
WITH_OWN_ATTENTION = {
    "BloomAttention",
    "CodeGenAttention",
    "FalconAttention",
    "GPTJAttention",
    "GPTNeoSelfAttention",
}
"""Of these, the modules of models for which transformers makes masks, as it does not know our attention there."""
