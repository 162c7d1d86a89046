"""Tiny configurations of every model type of transformers, made of its defaults by the names of their sizes."""

from __future__ import annotations

from typing import Any

from tests.workers.architectures import (
    ARCHITECTURES,
    COMMON,
    GEMMA4,
    LLAMA4,
    VOCAB_SIZE,
    WINDOWED,
)

SIZES: dict[str, Any] = COMMON | {
    **dict.fromkeys(("d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(
        ("n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "d_inner"), 96
    ),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_linear_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "dim_head", "d_kv"), 16),
    **dict.fromkeys(("n_positions", "n_ctx", "max_sequence_length", "seq_length", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 36),
    **dict.fromkeys(("shared_expert_intermediate_size", "ffn_hidden_size"), 36),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("index_topk", "state_size", "mamba_d_state", "ssm_state_size"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "conv_dim"), 16),
    **dict.fromkeys(("image_size", "crop_size"), 28),
    **dict.fromkeys(("vocab_size_per_layer_input", "text_vocab_size"), VOCAB_SIZE),
    "hidden_size_per_layer_input": 8,
    "patch_size": 14,
    "out_hidden_size": 64,
    "projection_dim": 64,
    "sliding_window": 7,
}
SPECIAL = ("image", "video", "audio", "vision", "boi", "eoi", "boa", "eoa")
"""Beginnings of the names of tokens that stand for media; they are the vocabulary's last ones."""
MROPE = (
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "glm4v_text",
    "glm4v_moe_text",
    "glm_ocr_text",
    "paddleocr_vl_text",
)
"""Types of text models whose angles are of height, width and time."""
OTHERS: dict[str, dict[str, Any]] = {  # what the names do not tell
    "chameleon": {
        "num_key_value_heads": 4,
        "vocabulary_map": {"<image>": VOCAB_SIZE - 1, "IMGIMGAZ": VOCAB_SIZE - 2, "IMGIMGBZ": VOCAB_SIZE - 3},
    },
    "chameleon_vqgan": {
        "embed_dim": 16,
        "latent_channels": 16,
        "num_embeddings": 2,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
    },
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in WINDOWED}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 36, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": GEMMA4
    | {"intermediate_size": 96, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 5},
    "llama4_text": LLAMA4 | {"num_experts_per_tok": 2, "interleave_moe_layer_step": 1, "use_qk_norm": False},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 0.5,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8, "num_key_value_heads": 4, "num_layers": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 16)},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "step3p5": {  # heads of two numbers and angles, and layers with limits and without
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_sliding_attention_heads": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        "moe_router_scaling_factor": 1.5,
        "share_expert_dim": 40,
        "sliding_window": 7,
        "swiglu_limits": [0.0, 0.0, 0.25, 0.25],
        "swiglu_limits_shared": [0.25, 0.0, 0.0, 0.25],
    },
    "xmod": {"default_language": "en_XX"},
    "xlm": {"n_words": VOCAB_SIZE, "emb_dim": 64},
    "zaya": {"num_experts_per_tok": 1},
}
KNOWN = {architecture.name: architecture for architecture in reversed(ARCHITECTURES)}
NUM_TEXT_TOKENS = VOCAB_SIZE - 28  # those before the tokens that stand for media
MAX_PARAMETERS = 80_000_000


def shrunk(model_type: str) -> Any:
    """The tiny configuration of a model type, by `ARCHITECTURES` where it stands there."""
    from transformers import AutoConfig

    if model_type in KNOWN:
        return KNOWN[model_type].config()
    return AutoConfig.for_model(model_type, **small(model_type, AutoConfig.for_model(model_type).to_dict()))


def kinds_within(layer_types: Any) -> int:
    """The number of first layers among which there is each kind, at least 2; 0 if that is unknown or over 8."""
    if not isinstance(layer_types, list | tuple):
        return 0
    last = max((layer_types.index(kind) for kind in set(layer_types)), default=8)
    return max(2, last + 1) if last < 8 else 0


def small(model_type: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """The fields of a default configuration that have other values in a tiny one, those of parts included."""
    unset = {"sliding_window"} if defaults.get("sliding_window") is None else set()
    fields = {name: SIZES[name] for name in defaults.keys() - unset if name in SIZES}
    if defaults.get("head_dim") == defaults.get("qk_rope_head_dim") is not None:
        fields["head_dim"] = SIZES["qk_rope_head_dim"]  # of what has angles
    if "kv_lora_rank" in defaults:
        fields["num_key_value_heads"] = SIZES["num_attention_heads"]  # all read one latent state
    if num_layers := kinds_within(defaults.get("layer_types")):
        fields["num_hidden_layers"] = num_layers
    tokens = [name for name in defaults if name.startswith(SPECIAL) and "token" in name]
    numbered = [name for name in tokens if type(defaults[name]) is int]
    fields |= {name: VOCAB_SIZE - 1 - place for place, name in enumerate(numbered)}
    for name, value in defaults.items():
        if isinstance(value, dict) and "model_type" in value:
            kind = value["model_type"]
            fields[name] = {"model_type": kind, **small(kind, value)}
    if "mrope_section" in str(defaults) or model_type in MROPE:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    if "is_decoder" in defaults:
        fields["is_decoder"] = True
    return fields | OTHERS.get(model_type, {})
