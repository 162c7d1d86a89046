"""Which weights of a model are divided over ranks, and how: by transformers' plan and a table of ours.

Plans have transformers' words: "colwise" divides a linear layer's outputs (the rows of its weight), "rowwise" its
inputs, "packed_colwise" the outputs of two layers that lie one below the other. Those of ours are:

- "qkv_colwise": the outputs of a projection to queries, keys and values, one below the other
- "groups_colwise": the same by heads of keys: their queries, the key, the value, then those of the next
- "gathered": a norm over what is divided; it gets all ranks' inputs, and gives each rank its part

Embedding and output layer are divided by vocabulary in every model, so no plan needs to name them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pagewire.workers.errors import LoadError
from pagewire.workers.module.text_base import base_path

Plan = dict[str, str]
"""Styles by the names of modules or parameters, within the base model; "*" stands for a layer's number."""

STYLES = {"colwise", "rowwise", "packed_colwise", "qkv_colwise", "groups_colwise", "gathered"}
WHOLE = {"moe_tp_experts", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicated"}
"""Styles of what every rank has as a whole, or whose parts have styles of their own."""
BY_VOCABULARY = {"colwise_gather_output", "embedding_rowwise"}


def _linears(path: str, columns: Iterable[str], rows: Iterable[str]) -> Plan:
    """The plan of linear layers in a module: those that divide outputs, and those that divide inputs."""
    return {f"{path}.{name}": "colwise" for name in columns} | {f"{path}.{name}": "rowwise" for name in rows}


def _gated(path: str) -> Plan:
    return _linears(path, ("gate_proj", "up_proj"), ("down_proj",))


def _packed(path: str) -> Plan:
    return {f"{path}.gate_up_proj": "packed_colwise", f"{path}.down_proj": "rowwise"}


ATTENTION = _linears("layers.*.self_attn", ("q_proj", "k_proj", "v_proj"), ("o_proj",))
LATENT_ATTENTION = _linears("layers.*.self_attn", ("q_proj", "q_b_proj", "kv_b_proj"), ("o_proj",))
NORMED_ATTENTION = ATTENTION | {
    "layers.*.self_attn.q_norm": "gathered",
    "layers.*.self_attn.k_norm": "gathered",
}
NORMS_BY_HEAD = {"layers.*.self_attn.q_norm": "colwise", "layers.*.self_attn.k_norm": "colwise"}
SHARED_EXPERTS = _gated("layers.*.mlp.shared_experts")
SHARED_MLP = {
    "layers.*.shared_mlp.input_linear": "packed_colwise",
    "layers.*.shared_mlp.output_linear": "rowwise",
}

LFM2 = _linears(
    "layers.*.self_attn", ("q_proj", "k_proj", "v_proj", "g_proj"), ("o_proj", "out_proj")
) | _linears("layers.*.feed_forward", ("w1", "w3"), ("w2",))
# Transformers' plan leaves states to every rank as a whole. Ours divides them: see `workers/ranks/mixers.py`.
DELTA_RULE = {
    f"layers.*.linear_attn.{name}": "replicated"
    for name in (
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
        "in_proj_qkvz",
        "in_proj_ba",
        "out_proj",
    )
}

TABLE: dict[str, Plan] = {
    "afmoe": ATTENTION
    | {"layers.*.self_attn.gate_proj": "colwise"}
    | _gated("layers.*.mlp")
    | SHARED_EXPERTS,
    "axk1": LATENT_ATTENTION,
    "bamba": ATTENTION | _gated("layers.*.feed_forward"),
    "biogpt": _linears("layers.*.self_attn", ("q_proj", "k_proj", "v_proj"), ("out_proj",))
    | _linears("layers.*", ("fc1",), ("fc2",)),
    "bitnet": ATTENTION
    | _gated("layers.*.mlp")
    | {"layers.*.self_attn.attn_sub_norm": "gathered", "layers.*.mlp.ffn_sub_norm": "gathered"},
    "bloom": _linears("h.*.self_attention", ("query_key_value",), ("dense",))
    | _linears("h.*.mlp", ("dense_h_to_4h",), ("dense_4h_to_h",)),
    "cohere": NORMS_BY_HEAD,
    "cohere2_moe": SHARED_EXPERTS,
    "ctrl": _linears("h.*.multi_head_attention", ("Wq", "Wk", "Wv"), ("dense",))
    | _linears("h.*.ffn", ("0",), ("2",)),
    "deepseek_v3": LATENT_ATTENTION,
    "falcon": {"h.*.self_attention.query_key_value": "groups_colwise", "h.*.self_attention.dense": "rowwise"}
    | _linears("h.*.mlp", ("dense_h_to_4h",), ("dense_4h_to_h",)),
    "flex_olmo": NORMED_ATTENTION,
    "glm": _packed("layers.*.mlp"),
    "glm4": _packed("layers.*.mlp"),
    "glm4_moe_lite": LATENT_ATTENTION | SHARED_EXPERTS,
    "gpt2": {"h.*.attn.c_attn": "qkv_colwise", "h.*.attn.c_proj": "rowwise"}
    | _linears("h.*.mlp", ("c_fc",), ("c_proj",)),
    "gpt_bigcode": {"h.*.attn.c_attn": "qkv_colwise", "h.*.attn.c_proj": "rowwise"}
    | _linears("h.*.mlp", ("c_fc",), ("c_proj",)),
    "gpt_neo": _linears("h.*.attn.attention", ("q_proj", "k_proj", "v_proj"), ("out_proj",))
    | _linears("h.*.mlp", ("c_fc",), ("c_proj",)),
    "gptj": _linears("h.*.attn", ("q_proj", "k_proj", "v_proj"), ("out_proj",))
    | _linears("h.*.mlp", ("fc_in",), ("fc_out",)),
    "gpt_oss": ATTENTION | {"layers.*.self_attn.sinks": "colwise"} | _packed("layers.*.mlp.experts"),
    "granitemoe": ATTENTION,
    "granitemoe_swa": SHARED_MLP,
    "granitemoehybrid": ATTENTION | SHARED_MLP,
    "granitemoeshared": ATTENTION | SHARED_MLP,
    "hunyuan_v1_dense": ATTENTION | _gated("layers.*.mlp"),
    "hunyuan_v1_moe": ATTENTION | _gated("layers.*.mlp.shared_mlp"),
    "jais": {"h.*.attn.c_attn": "qkv_colwise", "h.*.attn.c_proj": "rowwise"}
    | _linears("h.*.mlp", ("c_fc", "c_fc2"), ("c_proj",)),
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "lfm3": LFM2,
    "llama4_text": {
        "layers.*.feed_forward.experts.gate_up_proj": "packed_colwise",
        "layers.*.feed_forward.experts.down_proj": "rowwise",
    },
    "minimax_m2": NORMED_ATTENTION,
    "minimax_m3_vl_text": ATTENTION | _packed("layers.*.mlp") | _packed("layers.*.mlp.shared_experts"),
    "modernbert-decoder": _linears("layers.*.attn", ("q_proj", "k_proj", "v_proj"), ("Wo",))
    | {"layers.*.mlp.Wi": "packed_colwise", "layers.*.mlp.Wo": "rowwise"},
    "mpt": {"blocks.*.attn.Wqkv": "qkv_colwise", "blocks.*.attn.out_proj": "rowwise"}
    | _linears("blocks.*.ffn", ("up_proj",), ("down_proj",)),
    "nemotron_h": _linears(
        "layers.*.mixer", ("q_proj", "k_proj", "v_proj", "up_proj"), ("o_proj", "down_proj")
    )
    | _linears("layers.*.mixer.shared_experts", ("up_proj",), ("down_proj",)),
    "olmo2": NORMED_ATTENTION,
    "olmo3": NORMED_ATTENTION,
    "olmoe": NORMED_ATTENTION,
    "opt": _linears("decoder.layers.*.self_attn", ("q_proj", "k_proj", "v_proj"), ("out_proj",))
    | _linears("decoder.layers.*", ("fc1",), ("fc2",)),
    "persimmon": _linears("layers.*.self_attn", ("query_key_value",), ("dense",))
    | _linears("layers.*.mlp", ("dense_h_to_4h",), ("dense_4h_to_h",)),
    "phi3": {"layers.*.self_attn.qkv_proj": "qkv_colwise", "layers.*.self_attn.o_proj": "rowwise"}
    | _packed("layers.*.mlp"),
    "phimoe": ATTENTION,
    "qwen2_moe": _gated("layers.*.mlp.shared_expert"),
    "qwen3_5_moe_text": DELTA_RULE,
    "qwen3_5_text": DELTA_RULE,
    "qwen3_next": DELTA_RULE,
    "stablelm": ATTENTION
    | _gated("layers.*.mlp")
    | {"layers.*.self_attn.q_layernorm.norms": "colwise", "layers.*.self_attn.k_layernorm.norms": "colwise"},
    "step3p5": ATTENTION | {"layers.*.self_attn.g_proj": "colwise"} | _gated("layers.*.mlp") | SHARED_EXPERTS,
    "youtu": LATENT_ATTENTION,
}
"""By model type: families without a plan, and what plans leave to every rank as a whole."""

UNDIVIDED = {
    "codegen": "its queries, values and keys lie in four blocks, which its module takes apart by their number",
    "dbrx": "the experts of a layer are one matrix, of which every rank would have the whole",
}
"""By model type: why a family cannot be divided."""


def plan_of(causal: Any) -> Plan:
    """The plan of a causal module, by the full names of its modules and parameters.

    Raises:
        LoadError: the family cannot be divided, or transformers' plan has a style that is not served.
    """
    config = causal.config.get_text_config()
    if (reason := UNDIVIDED.get(config.model_type)) is not None:
        raise LoadError(f"{reason}; use pipeline_parallel_size, or one rank")
    is_base = not hasattr(causal, causal.base_model_prefix)
    prefix = "" if is_base else f"{base_path(causal)}."
    others = "" if is_base else f"{causal.base_model_prefix}."  # with the names of what is not for texts, too
    parts = dict(
        causal.named_children()
    )  # Llama 4's plan has each name without that of the base model as well
    plan = {
        name: style
        for name, style in (getattr(causal, "_tp_plan", None) or {}).items()
        if name.partition(".")[0] in parts and (name.startswith(prefix) or not name.startswith(others))
    }
    plan |= {f"{prefix}{name}": style for name, style in TABLE.get(config.model_type, {}).items()}
    for name, style in plan.items():
        outside = "*" not in name and style in BY_VOCABULARY
        if style not in STYLES | WHOLE and not outside:
            raise LoadError(
                f"{type(causal).__name__} cannot be divided over several ranks: its plan has the style "
                f"{style!r} for {name}, which is not served; use tensor_parallel_size=1"
            )
    return {name: style for name, style in plan.items() if style in STYLES}


def style_of(plan: Plan, name: str) -> str | None:
    """The style of a module or parameter; None if every rank has it as a whole."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name)) or plan.get(name)
