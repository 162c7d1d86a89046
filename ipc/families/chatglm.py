"""ChatGLM 2 and 3, and GLM-4 in the layout of its first release: transformers' GLM under other names."""

from __future__ import annotations

from typing import Any

from pagewire.ipc.families.family import (
    QKV,
    Config,
    Family,
    Split,
    demand,
    module_settings,
    one_below_the_other,
)

SETTINGS = {
    "padded_vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}
THETA = 10000.0  # of its rotary embedding, times rope_ratio


def _settings(values: Config) -> dict[str, Any]:
    if "vision_config" in values:
        raise ValueError("GLM-4V is not served; take a GLM-4 model for text")
    if "multi_query_attention" not in values:
        raise ValueError(
            "ChatGLM-6B of the first generation sees its prompt in both directions, which is not served; take "
            "ChatGLM 2 or 3"
        )
    demand(values, rmsnorm=True, post_layer_norm=True, apply_residual_connection_post_layernorm=False)
    demand(values, add_bias_linear=False, original_rope=True, pre_seq_len=None)
    queries = values["num_attention_heads"]
    return module_settings(
        {"eos_token_id": 2, "pad_token_id": None, **values},  # transformers' defaults are tokens of GLM-4
        "glm",
        "GlmForCausalLM",
        SETTINGS,
        num_key_value_heads=values["multi_query_group_num"] if values["multi_query_attention"] else queries,
        attention_bias=bool(values.get("add_qkv_bias", False)),
        rope_theta=THETA * values.get("rope_ratio", 1),
        partial_rotary_factor=0.5,
        hidden_act="silu",
    )


CHATGLM = Family(
    "ChatGLM",
    frozenset({"ChatGLMModel", "ChatGLMForConditionalGeneration"}),
    frozenset({"chatglm"}),
    _settings,
    layers="transformer.encoder.layers",
    layer={
        "self_attention.query_key_value": Split(QKV, one_below_the_other),
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.gate_up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    },
    top={
        "transformer.embedding.word_embeddings": "model.embed_tokens",
        "transformer.encoder.final_layernorm": "model.norm",
        "transformer.output_layer": "lm_head",
    },
)
