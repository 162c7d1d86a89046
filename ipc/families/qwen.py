"""Qwen 1: a Qwen 2 whose queries, keys and values are one tensor."""

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
    "seq_length": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
    "layer_norm_epsilon": "rms_norm_eps",
    "kv_channels": "head_dim",
}


def _settings(values: Config) -> dict[str, Any]:
    if "visual" in values or "audio" in values:
        raise ValueError("Qwen-VL and Qwen-Audio are not served; take a Qwen model for text")
    demand(values, rotary_pct=1.0, no_bias=True, scale_attn_weights=True)
    # Up to seq_length positions, neither its NTK scaling nor its factor of log(n) for queries has an effect.
    dtype = "float16" if values.get("fp16") else "float32" if values.get("fp32") else "bfloat16"
    return module_settings(
        {"torch_dtype": dtype, **values},
        "qwen2",
        "Qwen2ForCausalLM",
        SETTINGS,
        intermediate_size=values["intermediate_size"] // 2,  # that of both halves of the MLP together
        num_key_value_heads=values["num_attention_heads"],
        hidden_act="silu",
        use_sliding_window=False,
    )


QWEN = Family(
    "Qwen 1",
    frozenset({"QWenLMHeadModel"}),
    frozenset({"qwen"}),
    _settings,
    layers="transformer.h",
    layer={
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_attn": Split(QKV, one_below_the_other),
        "attn.c_proj": "self_attn.o_proj",
        "mlp.w1": "mlp.up_proj",
        "mlp.w2": "mlp.gate_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    top={"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm"},
)
