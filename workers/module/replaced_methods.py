"""Methods of transformers' modules that are ours within a step; outside of one they stay what they are.

Most families ask for a function of attention, which `attention.py` registers. Those that compute attention
themselves are listed here, each with a few lines that call ours, and so are products that call no linear layer. The
proof at load compares the two, as for every model.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from pagewire.kernels.indexed import IndexedTokens
from pagewire.workers.module import recurrences
from pagewire.workers.module.indexed import index_tokens
from pagewire.workers.module.recurrences import in_steps, replace_functions
from pagewire.workers.module.structure import CHUNKED
from pagewire.workers.step.context import current_step


@cache
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slopes float32 [H] of Press et al. 2022 ("Train Short, Test Long").

    They are powers of 2 ** (-8 / n), n being the next power of 2. Even powers come first where n is not H.
    """
    n = 1 << math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (torch.arange(1, n + 1, device=device) * (-8.0 / n))
    return slopes if n == num_heads else torch.cat([slopes[1::2], slopes[::2]])[:num_heads]


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
            setattr(module, name, MethodType(in_steps(getattr(type(module), name), ours), module))
            needs_no_mask |= type(module).__name__ in WITH_MASK
        if type(module).__name__ in SELECTABLE:
            _make_selectable(module, causal.config.get_text_config())
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


def _make_selectable(experts: Any, config: Any) -> None:
    """Give experts of `SELECTABLE` the fields of those whose implementation transformers selects by name."""
    experts.config, experts.has_gate = config, True
    experts.is_transposed = SELECTABLE[type(experts).__name__]
    experts.has_bias = experts.has_post_expert_norm = False
    if not hasattr(type(experts), "_apply_gate"):
        experts._apply_gate = MethodType(_gated, experts)


def _gated(experts: Any, both: Tensor) -> Tensor:
    """What is between the two products of Llama 4's experts."""
    gate, up = both.chunk(2, dim=-1)
    return experts.act_fn(gate) * up  # type: ignore[no-any-return]


def paged(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Our attention of query [1, Hq, T, D] to key [1, Hkv, T, D], value [1, Hkv, T, Dv]: [1, T, Hq, Dv].

    window, alibi, chunk: see `LogitTerms`.
    """
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    step = current_step()
    return step.attend(layer, q, k, v, scale, window=window, softcap=softcap, alibi=alibi, chunk=chunk)[None]


def heads_first(x: Tensor, num_heads: int) -> Tensor:
    """[1, T, H * D] as [1, H, T, D]."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def query_key_value(module: Any, hidden_states: Tensor) -> list[Tensor]:
    """The projections [1, T, heads, D] of hidden states by a module that has a linear layer for each."""
    linears = (module.q_proj, module.k_proj, module.v_proj)
    return [linear(hidden_states).unflatten(-1, (-1, module.head_dim)) for linear in linears]


def _gptj(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Of GPT-J and CodeGen."""
    return paged(module.layer_idx, query, key, value, 1 / module.scale_attn).transpose(1, 2), None


def _gpt_neo(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    """Of GPT-Neo, whose logits are not scaled."""
    window = module.config.window_size if module.attention_type == "local" else None
    return paged(module.layer_idx, query, key, value, 1.0, window).transpose(1, 2), None


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = alibi_slopes(module.num_heads, hidden_states.device)
    mixed = paged(module.layer_idx, query, key, value, module.inv_norm_factor, alibi=slopes)
    return residual + module.dense(mixed.flatten(2)), None


def _mpt(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    joined = module.Wqkv(hidden_states)
    if module.clip_qkv:
        joined = joined.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (heads_first(part, module.n_heads) for part in joined.chunk(3, -1))
    slopes = alibi_slopes(module.n_heads, hidden_states.device)
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
        slopes = alibi_slopes(module.num_heads, hidden_states.device) * module.inv_norm_factor
    mixed = paged(module.layer_idx, query, key, value, module.inv_norm_factor, alibi=slopes)
    return module.dense(mixed.flatten(2)), None


def _zamba_attention(module: Any, hidden_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
    """Of Zamba and Zamba2, whose layers share attention, and tell it their numbers."""
    module.layer_idx = layer_idx
    return type(module).forward(module, hidden_states, layer_idx, *args, **kwargs)


def _diffllama(
    module: Any, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Of DiffLlama: the heads of its two halves, whose difference counts, attend to the values of both halves.

    A head and its partner in the other half are one head of twice the size here, with keys and values of both. A
    query of one half has zeros for the keys of the other.
    """
    from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

    query, key, value = (heads.transpose(1, 2) for heads in query_key_value(module, hidden_states))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    pairs = key.shape[1] // 2
    first, second = query.unflatten(1, (2, pairs, -1)).unbind(1)
    both = torch.stack([F.pad(first, (0, module.head_dim)), F.pad(second, (module.head_dim, 0))], 2)
    key, value = (torch.cat(x.chunk(2, 1), -1) for x in (key, value))
    mixed = paged(module.layer_idx, both.flatten(1, 3), key, value, module.scaling)
    halves = mixed.view(*mixed.shape[:2], pairs, 2, -1, mixed.shape[3])
    first, second = (half.flatten(2, 3) for half in halves.unbind(3))
    one, two = (
        (q * k).sum(dtype=torch.float32).exp().to(query.dtype)
        for q, k in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    )
    normed = module.groupnorm(first - (one - two + module.lambda_init) * second)
    return module.o_proj(((1 - module.lambda_init) * normed).flatten(2)), None


def _doge(
    module: Any, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Of Doge, where a key's bias depends on its value: as one more number of the key, by which queries have a 1.

    That is all up to `keep_window_size` tokens; of longer sequences queries drop the keys of least bias.
    """
    from transformers.models.doge.modeling_doge import apply_rotary_pos_emb

    query, key, value = query_key_value(module, hidden_states)
    bias = torch.exp(module.A * F.softplus(module.dt_proj(value.flatten(2)))) / module.scaling
    query, key = (x.transpose(1, 2) for x in (module.q_norm(query), module.k_norm(key)))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    query, key = F.pad(query, (0, 1), value=1.0), torch.cat([key, bias.transpose(1, 2)[..., None]], -1)
    mixed = paged(module.layer_idx, query, key, value.transpose(1, 2), module.scaling)
    return module.o_proj(mixed.flatten(2)), None


def _phimoe(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Of PhiMoE, which gives its window to the mask alone."""
    return type(module).forward(module, *args, sliding_window=module.config.sliding_window, **kwargs)


def _llama4(
    module: Any, hidden_states: Tensor, position_embeddings: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Of Llama 4: layers with rotary angles attend within a chunk, the others scale queries by their place."""
    query, key, value = query_key_value(module, hidden_states)
    config = module.config
    if module.use_rope:
        from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

        query, key = apply_rotary_emb(query, key, position_embeddings)
        if config.use_qk_norm:
            query, key = module.qk_norm(query), module.qk_norm(key)
    elif module.attn_temperature_tuning:
        stretches = torch.floor((current_step().places.float() + 1.0) / module.floor_scale)
        scales = torch.log1p(stretches) * module.attn_scale + 1.0
        query = (query * scales[:, None, None]).to(query.dtype)
    is_chunked = config.layer_types[module.layer_idx] == CHUNKED
    chunk = config.attention_chunk_size if is_chunked else None
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
    mixed = paged(module.layer_idx, query, key, value, module.scaling, chunk=chunk)
    return module.o_proj(mixed.flatten(2)), None


def _llama4_mixture(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Of Llama 4: a token's expert gets the token's state times its score, and no other expert runs."""
    rows = hidden_states.reshape(-1, module.hidden_dim)
    _, logits = module.router(rows)
    chosen, ids = logits.topk(module.top_k, dim=1)
    scores = torch.sigmoid(chosen.float()).to(rows.dtype)
    out, ones = module.shared_expert(rows), torch.ones(len(rows), 1, device=rows.device)
    for place in range(module.top_k):
        column = slice(place, place + 1)
        out = out + module.experts(rows * scores[:, column], ids[:, column], ones)
    return out, logits


def _selected_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Of `SELECTABLE`, as transformers runs the experts of other families."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    run = ALL_EXPERTS_FUNCTIONS[module.config._experts_implementation]
    return run(module, hidden, ids, weights)  # type: ignore[no-any-return]


def _dbrx_expert(module: Any, x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
    """An expert of DBRX by calls of `F.linear`, which can be batch-invariant as `Tensor.matmul` cannot."""
    return F.linear(module.activation_fn(F.linear(x, w1)) * F.linear(x, v1), w2.T)


def _without_mask(module: Any, *args: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Of indexed attention, which cuts its mask for the indexer; ours needs none."""
    device = kwargs["hidden_states"].device
    any_mask = None if module.indexer is None else torch.empty(1, 1, 1, 1, device=device)
    return type(module).forward(module, *args, attention_mask=any_mask, **kwargs)


def _indexer(rotation: str, at_end: bool = False) -> Callable[..., IndexedTokens]:
    """Of indexed attention. rotation: the name of a function in the family's module. at_end: see `index_tokens`."""

    def index(
        module: Any, hidden: Tensor, q_latent: Tensor, angles: Any, *_: Any, **__: Any
    ) -> IndexedTokens:
        rotate = getattr(sys.modules[type(module).__module__], rotation)
        return index_tokens(module, rotate, hidden, module.wq_b(q_latent), angles, at_end)

    return index


def _mistral_indexer(
    module: Any, hidden: Tensor, angles: Any, _: Any, positions: Tensor, **__: Any
) -> IndexedTokens:
    """Of Mistral Large 4, whose queries are scaled by their positions, and not rotated in every layer."""
    rotate = getattr(sys.modules[type(module).__module__], PAIRS) if module.use_rope else None
    queries = module.wq_b(module.q_input_norm(hidden)).unflatten(-1, (module.n_heads, module.head_dim))
    scaled = module.softmax_scaling(queries, positions, head_dim_first=False).flatten(2)
    return index_tokens(module, rotate, hidden, scaled, angles)


HALVES, PAIRS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"
WITH_MASK = {
    *("BloomAttention", "CodeGenAttention", "DiffLlamaAttention", "DogeAttention", "FalconAttention"),
    *("GPTJAttention", "GPTNeoSelfAttention", "Llama4TextAttention", "PhimoeAttention"),
}
"""Classes of modules whose families make masks, unless their attention is of another name."""
SELECTABLE = {"Llama4TextExperts": True, "Step3p7Experts": False}
"""Classes of experts that lack transformers' decorator, and whether their matrices lie transposed."""
METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "AXK2Attention": ("forward", _without_mask),
    "AXK2Indexer": ("forward", _indexer(HALVES)),
    "BloomAttention": ("forward", _bloom),
    "CodeGenAttention": ("_attn", _gptj),
    "DbrxExpertGLU": ("forward", _dbrx_expert),
    "DeepseekV32Attention": ("forward", _without_mask),
    "DeepseekV32Indexer": ("forward", _indexer(HALVES)),
    "Dots3NoteTextAttention": ("forward", _without_mask),
    "Dots3NoteTextIndexer": ("forward", _indexer(PAIRS)),
    "DiffLlamaAttention": ("forward", _diffllama),
    "DogeAttention": ("forward", _doge),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _gptj),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GlmMoeDsaAttention": ("forward", _without_mask),
    "GlmMoeDsaIndexer": ("forward", _indexer(PAIRS)),
    "HYV4Attention": ("forward", _without_mask),
    "HYV4Indexer": ("forward", _indexer(HALVES, at_end=True)),
    "Llama4TextAttention": ("forward", _llama4),
    "Llama4TextExperts": ("forward", _selected_experts),
    "Llama4TextMoe": ("forward", _llama4_mixture),
    "MistralLarge4TextAttention": ("forward", _without_mask),
    "MistralLarge4TextIndexer": ("forward", _mistral_indexer),
    "MptAttention": ("forward", _mpt),
    "PhimoeAttention": ("forward", _phimoe),
    "Step3p7Experts": ("forward", _selected_experts),
    "Zamba2Attention": ("forward", _zamba_attention),
    "ZambaAttention": ("forward", _zamba_attention),
    **recurrences.METHODS,
}
"""By the class of a module: the name of its method, and ours in its place."""
