"""The names of tensors in GGUF files of models whose layers keep states."""

from __future__ import annotations

from dataclasses import replace

from pagewire.workers.checkpoint.gguf_table import (
    ATTENTION,
    EXPERTS,
    LLAMA,
    SHARED,
    TOP,
    GGUFNames,
    JoinedTensors,
    TiledHeads,
)

LINEAR_ATTENTION = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
LINEAR_STATES = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
}
TILED = {
    **dict.fromkeys(("attn_qkv", "ssm_conv1d"), TiledHeads(after_keys=True)),
    **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), TiledHeads(single=True)),
    "attn_gate": TiledHeads(),
    "ssm_out": TiledHeads(columns=True),
}
"""In Qwen 3.5. The converter leaves the order of Qwen 3 Next as it is."""
QWEN35 = GGUFNames(
    LLAMA
    | LINEAR_ATTENTION
    | {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    },
    TOP,
    norms_plus_one=True,
    whole=LINEAR_STATES,
    tiled=TILED,
)

CONVOLUTIONS = ATTENTION | {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
LFM2 = GGUFNames(
    CONVOLUTIONS,
    TOP | {"token_embd_norm": "model.embedding_norm"},
    whole={"shortconv.conv.weight": "conv.conv.weight"},
)


def scanned(prefix: str) -> dict[str, str]:
    """The matrices of a layer of Mamba. prefix: the name of its mixer in transformers."""
    names = {"ssm_in": "in_proj", "ssm_out": "out_proj", "ssm_norm": "norm", "ssm_x": "x_proj"}
    return {name: f"{prefix}.{own}" for name, own in names.items()}


def states(prefix: str) -> dict[str, str]:
    """The other weights of a layer of Mamba."""
    names = {"ssm_a": "A_log", "ssm_d": "D", "ssm_conv1d.weight": "conv1d.weight"}
    names |= {"ssm_conv1d.bias": "conv1d.bias"}
    return {name: f"{prefix}.{own}" for name, own in names.items()}


def second_states(prefix: str) -> dict[str, str]:
    """Those of a layer of Mamba 2, whose steps have a bias alone."""
    return states(prefix) | {"ssm_dt.bias": f"{prefix}.dt_bias"}


BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
FEED_FORWARD = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
FINAL_NORM = TOP | {"output_norm": "model.final_layernorm"}
FALCON_H1 = GGUFNames(ATTENTION | FEED_FORWARD | scanned("mamba"), FINAL_NORM, whole=second_states("mamba"))
MAMBA = GGUFNames(
    scanned("mixer") | {"attn_norm": "norm", "ssm_dt": "mixer.dt_proj"},
    BACKBONE,
    layers="backbone.layers",
    whole=states("mixer"),
)

HYBRIDS: dict[str, GGUFNames] = {
    "qwen3_next": GGUFNames(
        LLAMA
        | SHARED
        | LINEAR_ATTENTION
        | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
        TOP,
        experts="mlp.experts",
        expert=EXPERTS,
        norms_plus_one=True,
        whole=LINEAR_STATES,
        joined={"attn_qkv": JoinedTensors("linear_attn.in_proj_qkvz.weight", "linear heads", "attn_gate")},
    ),
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": replace(
        QWEN35, layer={**QWEN35.layer, **SHARED}, experts="mlp.experts", expert=EXPERTS
    ),
    "lfm2": LFM2,
    "lfm2_moe": replace(
        LFM2,
        layer=CONVOLUTIONS | {"ffn_gate_inp": "feed_forward.gate"},
        experts="feed_forward.experts",
        expert={"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"},
        whole={**LFM2.whole, "exp_probs_b.bias": "feed_forward.expert_bias"},
    ),
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": replace(MAMBA, layer=scanned("mixer") | {"attn_norm": "norm"}, whole=second_states("mixer")),
    "falcon_h1": FALCON_H1,
    "bamba": replace(FALCON_H1, rotated=True),
    "granitemoehybrid": GGUFNames(
        ATTENTION
        | scanned("mamba")
        | {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
        },
        TOP,
        rotated=True,
        whole=second_states("mamba"),
        joined={
            "ffn_gate": JoinedTensors("shared_mlp.input_linear.weight", "halves", "ffn_up"),
            "ffn_gate_shexp": JoinedTensors("shared_mlp.input_linear.weight", "halves", "ffn_up_shexp"),
            "ffn_gate_exps": JoinedTensors("block_sparse_moe.input_linear.weight", "halves", "ffn_up_exps"),
            "ffn_down_exps": JoinedTensors("block_sparse_moe.output_linear.weight", "stack"),
        },
    ),
    "jamba": GGUFNames(
        ATTENTION
        | FEED_FORWARD
        | scanned("mamba")
        | {
            "ssm_dt": "mamba.dt_proj",
            "ssm_dt_norm": "mamba.dt_layernorm",
            "ssm_b_norm": "mamba.b_layernorm",
            "ssm_c_norm": "mamba.c_layernorm",
            "ffn_gate_inp": "feed_forward.router",
        },
        FINAL_NORM,
        experts="feed_forward.experts",
        expert=EXPERTS,
        whole=states("mamba"),
    ),
    "nemotron_h": GGUFNames(
        scanned("mixer")
        | {
            "attn_norm": "norm",
            "attn_q": "mixer.q_proj",
            "attn_k": "mixer.k_proj",
            "attn_v": "mixer.v_proj",
            "attn_output": "mixer.o_proj",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
            "ffn_gate_inp": "mixer.gate",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
        },
        BACKBONE,
        layers="backbone.layers",
        rotated=True,
        experts="mixer.experts",
        expert=EXPERTS,
        whole={**second_states("mixer"), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    ),
}
"""By transformers' name of the type."""
