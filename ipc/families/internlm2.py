"""InternLM 2: a Llama whose queries, keys and values are one tensor, the heads of each key together."""

from __future__ import annotations

from typing import Any

from pagewire.ipc.families.family import QKV, Config, Family, Split, by_group, llama


def _settings(values: Config) -> dict[str, Any]:
    return llama(values, attention_bias=bool(values.get("bias", True)))


INTERNLM2 = Family(
    "InternLM 2",
    frozenset({"InternLM2ForCausalLM"}),
    frozenset({"internlm2"}),
    _settings,
    layer={
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wqkv": Split(QKV, by_group),
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    },
    top={"model.tok_embeddings": "model.embed_tokens", "output": "lm_head"},
)
