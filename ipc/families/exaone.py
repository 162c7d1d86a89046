"""EXAONE 3: a Llama under other names."""

from __future__ import annotations

from typing import Any

from pagewire.ipc.families.family import Config, Family, llama

SETTINGS = {
    "num_layers": "num_hidden_layers",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}


def _settings(values: Config) -> dict[str, Any]:
    return llama({"tie_word_embeddings": True, **values}, SETTINGS)


EXAONE = Family(
    "EXAONE 3",
    frozenset({"ExaoneForCausalLM"}),
    frozenset({"exaone"}),
    _settings,
    layers="transformer.h",
    layer={
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.attention.q_proj": "self_attn.q_proj",
        "attn.attention.k_proj": "self_attn.k_proj",
        "attn.attention.v_proj": "self_attn.v_proj",
        "attn.attention.out_proj": "self_attn.o_proj",
        "mlp.c_fc_0": "mlp.gate_proj",
        "mlp.c_fc_1": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    top={"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm"},
)
