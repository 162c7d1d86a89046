"""Families with the weights of a module that transformers has, under the same names."""

from __future__ import annotations

import math
from typing import Any

from pagewire.ipc.families.family import Config, Family, demand, llama, module_settings


def _aquila(values: Config) -> dict[str, Any]:
    return llama(values)


def _xverse(values: Config) -> dict[str, Any]:
    demand(values, num_experts=None)
    return llama(values)


def _internlm(values: Config) -> dict[str, Any]:
    rotary = values.get("rotary") or {}
    theta = {"rope_theta": rotary["base"]} if "base" in rotary else {}
    # Its other type, "dynamic", differs only beyond max_position_embeddings.
    return llama(values, attention_bias=bool(values.get("bias", True)), **theta)


def _orion(values: Config) -> dict[str, Any]:
    """A Llama whose norms are LayerNorms, which is what StableLM has."""
    return module_settings(
        values,
        "stablelm",
        "StableLmForCausalLM",
        {"rms_norm_eps": "layer_norm_eps"},
        num_key_value_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        partial_rotary_factor=1.0,
        use_qkv_bias=False,
        use_parallel_residual=False,
        qk_layernorm=False,
    )


def _minicpm(values: Config) -> dict[str, Any]:
    """A Llama with factors of embedding, residual and logits, which is what Granite has."""
    demand(values, num_experts=0, sparse_config=None)
    size, layers = values["hidden_size"], values["num_hidden_layers"]
    return module_settings(
        {"tie_word_embeddings": True, **values},
        "granite",
        "GraniteForCausalLM",
        num_key_value_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        embedding_multiplier=values.get("scale_emb", 1),
        residual_multiplier=values.get("scale_depth", 1) / math.sqrt(layers),
        attention_multiplier=(size // values["num_attention_heads"]) ** -0.5,
        logits_scaling=size / values.get("dim_model_base", 1),
    )


def _kimi(values: Config) -> dict[str, Any]:
    return module_settings(values, "deepseek_v3", "DeepseekV3ForCausalLM")


AQUILA = Family("Aquila", frozenset({"AquilaModel", "AquilaForCausalLM"}), frozenset({"aquila"}), _aquila)
XVERSE = Family("Xverse", frozenset({"XverseForCausalLM"}), frozenset({"xverse"}), _xverse)
INTERNLM = Family("InternLM", frozenset({"InternLMForCausalLM"}), frozenset({"internlm"}), _internlm)
ORION = Family("Orion", frozenset({"OrionForCausalLM"}), frozenset({"orion"}), _orion)
MINICPM = Family("MiniCPM", frozenset({"MiniCPMForCausalLM"}), frozenset({"minicpm"}), _minicpm)
KIMI = Family("Kimi K2", frozenset(), frozenset({"kimi_k2"}), _kimi)
