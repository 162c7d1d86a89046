"""What the families' own code computes, in plain torch: an oracle that shares nothing with the tables.

Tensors are looked up by the names and in the layouts of the original checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

Tensors = Mapping[str, Tensor]
Fields = dict[str, Any]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def angles(num_tokens: int, size: int, theta: float) -> Tensor:
    """The angles [T, size / 2] of a rotary embedding."""
    return torch.outer(torch.arange(num_tokens).float(), theta ** -(torch.arange(0, size, 2).float() / size))


def rotate_halves(x: Tensor, theta: float = 10000.0) -> Tensor:
    """x [T, H, D], rotated: the first half of each head with the second (GPT-NeoX)."""
    turns = angles(len(x), x.shape[-1], theta)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1)


def rotate_pairs(x: Tensor, theta: float = 10000.0) -> Tensor:
    """x [T, H, D], rotated: each number of even place with the next one (GPT-J)."""
    turns = angles(len(x), x.shape[-1], theta)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """Causal attention of q [T, Hq, D] to k, v [T, Hkv, D]: [T, Hq * D]. bias: [Hq, T, T], added to the logits."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(later, -math.inf).softmax(-1), v).flatten(1)


def alibi(num_tokens: int, slopes: list[float]) -> Tensor:
    """The biases [H, T, T] of ALiBi: slope * (key - query)."""
    places = torch.arange(num_tokens).float()
    return torch.tensor(slopes)[:, None, None] * (places - places[:, None])


def split_heads(x: Tensor, size: int) -> Tensor:
    """[T, H * D] as [T, H, D]."""
    return x.unflatten(-1, (-1, size))


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated MLP with SiLU."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def llama(
    t: Tensors,
    config: Fields,
    ids: Tensor,
    *,
    norm: Callable[[Tensor, str], Tensor] | None = None,
    rotate: Callable[[Tensor], Tensor] = rotate_halves,
    head: Callable[[Tensor], Tensor] = lambda weight: weight,
    fused: bool = False,
    slopes: list[float] | None = None,
    embedding: float = 1.0,
    residual: float = 1.0,
    logits: float = 1.0,
) -> Tensor:
    """The models of Llama's names: logits [T, V]. fused: queries, keys and values are W_pack."""
    size, eps = config["hidden_size"] // config["num_attention_heads"], config["rms_norm_eps"]
    norm = norm or (lambda x, name: rms_norm(x, t[f"{name}.weight"], eps))
    x = embedding * t["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        normed = norm(x, f"{at}.input_layernorm")
        if fused:
            parts = F.linear(normed, t[f"{at}.self_attn.W_pack.weight"]).chunk(3, -1)
        else:
            parts = tuple(
                F.linear(normed, t[f"{at}.self_attn.{p}_proj.weight"], t.get(f"{at}.self_attn.{p}_proj.bias"))
                for p in "qkv"
            )
        q, k, v = (split_heads(part, size) for part in parts)
        bias = None if slopes is None else alibi(len(x), slopes)
        mixed = attend(rotate(q), rotate(k), v, bias=bias)
        out = F.linear(mixed, t[f"{at}.self_attn.o_proj.weight"], t.get(f"{at}.self_attn.o_proj.bias"))
        x = x + residual * out
        normed = norm(x, f"{at}.post_attention_layernorm")
        x = x + residual * gated(normed, *(t[f"{at}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")))
    output = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return logits * F.linear(norm(x, "model.norm"), head(output))


def orion(t: Tensors, config: Fields, ids: Tensor) -> Tensor:
    """Llama with LayerNorms."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], config["rms_norm_eps"])

    return llama(t, config, ids, norm=norm)


def minicpm(t: Tensors, config: Fields, ids: Tensor) -> Tensor:
    """Llama with factors."""
    return llama(
        t,
        config,
        ids,
        embedding=config["scale_emb"],
        residual=config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        logits=config["dim_model_base"] / config["hidden_size"],
    )


def exaone(t: Tensors, config: Fields, ids: Tensor) -> Tensor:
    """EXAONE 3."""
    size, eps = config["hidden_size"] // config["num_attention_heads"], config["layer_norm_epsilon"]
    x = t["transformer.wte.weight"][ids]
    for layer in range(config["num_layers"]):
        at = f"transformer.h.{layer}"
        normed = rms_norm(x, t[f"{at}.ln_1.weight"], eps)
        q, k, v = (
            split_heads(F.linear(normed, t[f"{at}.attn.attention.{p}_proj.weight"]), size) for p in "qkv"
        )
        mixed = attend(*(rotate_halves(part, config["rope_theta"]) for part in (q, k)), v)
        x = x + F.linear(mixed, t[f"{at}.attn.attention.out_proj.weight"])
        normed = rms_norm(x, t[f"{at}.ln_2.weight"], eps)
        x = x + gated(normed, *(t[f"{at}.mlp.{p}.weight"] for p in ("c_fc_0", "c_fc_1", "c_proj")))
    return F.linear(rms_norm(x, t["transformer.ln_f.weight"], eps), t["transformer.wte.weight"])


def internlm2(t: Tensors, config: Fields, ids: Tensor) -> Tensor:
    """InternLM 2: the rows of wqkv are [key head, its queries + key + value, D]."""
    groups = config["num_key_value_heads"]
    size, eps = config["hidden_size"] // config["num_attention_heads"], config["rms_norm_eps"]
    x = t["model.tok_embeddings.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        normed = rms_norm(x, t[f"{at}.attention_norm.weight"], eps)
        packed = F.linear(normed, t[f"{at}.attention.wqkv.weight"]).view(len(x), groups, -1, size)
        q, k, v = packed[:, :, :-2].flatten(1, 2), packed[:, :, -2], packed[:, :, -1]
        x = x + F.linear(attend(rotate_halves(q), rotate_halves(k), v), t[f"{at}.attention.wo.weight"])
        normed = rms_norm(x, t[f"{at}.ffn_norm.weight"], eps)
        x = x + gated(normed, *(t[f"{at}.feed_forward.{p}.weight"] for p in ("w1", "w3", "w2")))
    return F.linear(rms_norm(x, t["model.norm.weight"], eps), t["output.weight"])


def qwen(t: Tensors, config: Fields, ids: Tensor) -> Tensor:
    """Qwen 1: the gate of its MLP is w2."""
    size, eps = config["kv_channels"], config["layer_norm_epsilon"]
    x = t["transformer.wte.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer.h.{layer}"
        normed = rms_norm(x, t[f"{at}.ln_1.weight"], eps)
        packed = F.linear(normed, t[f"{at}.attn.c_attn.weight"], t[f"{at}.attn.c_attn.bias"])
        q, k, v = (split_heads(part, size) for part in packed.chunk(3, -1))
        theta = config["rotary_emb_base"]
        mixed = attend(rotate_halves(q, theta), rotate_halves(k, theta), v)
        x = x + F.linear(mixed, t[f"{at}.attn.c_proj.weight"])
        normed = rms_norm(x, t[f"{at}.ln_2.weight"], eps)
        x = x + gated(normed, *(t[f"{at}.mlp.{p}.weight"] for p in ("w2", "w1", "c_proj")))
    return F.linear(rms_norm(x, t["transformer.ln_f.weight"], eps), t["lm_head.weight"])


def chatglm(t: Tensors, config: Fields, ids: Tensor) -> Tensor:
    """ChatGLM 2 and 3, GLM-4: pairs within the first half of each head are rotated."""
    size, eps = config["kv_channels"], config["layernorm_epsilon"]
    queries = config["num_attention_heads"]
    keys = config["multi_query_group_num"] if config["multi_query_attention"] else queries
    theta = 10000.0 * config.get("rope_ratio", 1)

    def rotate(x: Tensor) -> Tensor:
        return torch.cat([rotate_pairs(x[..., : size // 2], theta), x[..., size // 2 :]], -1)

    x = t["transformer.embedding.word_embeddings.weight"][ids]
    for layer in range(config["num_layers"]):
        at = f"transformer.encoder.layers.{layer}"
        normed = rms_norm(x, t[f"{at}.input_layernorm.weight"], eps)
        name = f"{at}.self_attention.query_key_value"
        packed = F.linear(normed, t[f"{name}.weight"], t.get(f"{name}.bias"))
        parts = packed.split([queries * size, keys * size, keys * size], -1)
        q, k, v = (split_heads(part, size) for part in parts)
        x = x + F.linear(attend(rotate(q), rotate(k), v), t[f"{at}.self_attention.dense.weight"])
        normed = rms_norm(x, t[f"{at}.post_attention_layernorm.weight"], eps)
        gate, up = F.linear(normed, t[f"{at}.mlp.dense_h_to_4h.weight"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, t[f"{at}.mlp.dense_4h_to_h.weight"])
    x = rms_norm(x, t["transformer.encoder.final_layernorm.weight"], eps)
    return F.linear(x, t["transformer.output_layer.weight"])


def jais(t: Tensors, config: Fields, ids: Tensor) -> Tensor:
    """Jais: GPT-2's transposed matrices, ALiBi, a second matrix of the MLP, and factors."""
    size, eps = config["n_embd"] // config["n_head"], config["layer_norm_epsilon"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)

    x = config["mup_embeddings_scale"] * t["transformer.wte.weight"][ids]
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        parts = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, -1)
        q, k, v = (split_heads(part, size) for part in parts)
        bias = alibi(len(x), [2**-2, 2**-4, 2**-6, 2**-8])
        x = x + linear(attend(q, k, v, 1 / size, bias), f"{at}.attn.c_proj")
        normed = norm(x, f"{at}.ln_2")
        gated_states = linear(normed, f"{at}.mlp.c_fc") * F.silu(linear(normed, f"{at}.mlp.c_fc2"))
        x = x + linear(gated_states, f"{at}.mlp.c_proj")
    scale = config["mup_output_alpha"] * config["mup_width_scale"]
    return scale * F.linear(norm(x, "transformer.ln_f"), t["transformer.wte.weight"])
