"""Jais: a GPT-2 with ALiBi, gated MLPs and factors, which `own_models.py` of the worker computes."""

from __future__ import annotations

from typing import Any

from pagewire.ipc.families.family import Config, Family, demand, module_settings


def _settings(values: Config) -> dict[str, Any]:
    demand(
        {"position_embedding_type": "learned", "activation_function": "gelu", **values},
        position_embedding_type="alibi",
        activation_function="swiglu",
    )
    demand(values, alibi_scaling=None, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    by_size = values.get("scale_qk_dot_by_d", values.get("mup_scale_qk_dot_by_d", False))
    logits = values.get("mup_output_alpha", 1.0) * values.get("mup_width_scale", 1.0)
    return module_settings(
        {"tie_word_embeddings": True, **values},
        "jais",
        "JAISLMHeadModel",
        activation_function="silu",
        embeddings_scale=values.get("embeddings_scale", values.get("mup_embeddings_scale", 1.0)),
        logits_scale=values.get("width_scale", logits),
        attention_scale=(values["n_embd"] // values["n_head"]) ** (-1.0 if by_size else -0.5),
    )


JAIS = Family(
    "Jais",
    frozenset({"JAISLMHeadModel"}),
    frozenset({"jais"}),
    _settings,
    layers="transformer.h",
    own_layers="transformer.h",
    unused=frozenset({"transformer.relative_pe.slopes"}),
)
