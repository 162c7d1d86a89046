"""Causal architectures of transformers as tiny random models, and whether they are served.

One table for the tests and for the list in docs/models.md (`python -m benchmarks.parity`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.workers.versions import GROUPED_NORM, transformers_version
from tests.workers.biting import bite

VOCAB_SIZE = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36}


@dataclass(frozen=True)
class Architecture:
    """A model type, the fields of its config, and if it is refused, words of the reason."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    model_type: str = ""

    def config(self) -> Any:
        """Its tiny configuration. A test is skipped where transformers does not have it."""
        from transformers import AutoConfig

        from tests.workers.versions import skip_unless_known  # pytest is not for benchmarks

        skip_unless_known(self.model_type or self.name)
        return AutoConfig.for_model(self.model_type or self.name, **(COMMON | self.fields))

    def class_name(self) -> str:
        """Its class in transformers."""
        from transformers import AutoModelForCausalLM

        mapping = AutoModelForCausalLM._model_mapping
        return mapping[type(self.config())].__name__  # type: ignore[no-any-return]

    def write(self, folder: Path, seed: int = 0, dtype: str = "float32", *, bites: bool = True) -> Path:
        """A checkpoint with random weights in `folder`, all of which have an effect.

        bites: False leaves norms at 1 and biases at 0, for tests of how far 16 bits round: less is magnified then.
        """
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(self.config())
        if bites:
            bite(model, seed)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        align(folder / "model.safetensors")
        return folder


def align(path: Path) -> None:
    """Let tensors of a file begin at multiples of 16 bytes, as in the memory of a GPU, whose kernels rely on it.

    An emulated GPU reads them where the file is mapped.
    """
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    if padding := -begin % 16:
        header = data[8:begin] + b" " * padding
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[begin:])


MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
INDEXED = MLA | {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 6, "pad_token_id": None}
"""Fewer keys are seen than prompts have. Where all keys score 0, as with few heads or for a padding token, whose
embedding is 0, transformers takes any."""
DOTS3 = {  # layers with a window have latents of another size
    "head_dim": 24,
    "num_hidden_layers": 3,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "sliding_window": 7,
    "moe_shared_expert_intermediate_size": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "n_group": 1,
    "topk_group": 1,
}
LATER_EXPERTS = ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1}
MINIMAX_M3 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "dense_intermediate_size": 72,
    "shared_intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "swiglu_limit": 0.5,
}
"""Limits that many numbers are beyond."""
GPT2_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
WINDOWED = ["sliding_attention", "full_attention"]
OWN_ATTENTION = "does not let its attention be replaced"
GEMMA4 = {  # the last two layers read keys and values of earlier ones; heads of two sizes
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "layer_types": [*WINDOWED, "sliding_attention", *WINDOWED],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
GEMMA4_LARGE = GEMMA4 | {  # fewer and larger heads in some layers, where values are keys
    "num_hidden_layers": 2,
    "layer_types": WINDOWED,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 36,
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

OF_AXES = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}
BOTH_WAYS = GROUPED | {"use_bidirectional_attention": True}
DECODER = {"is_decoder": True, "pad_token_id": 1}  # whose positions begin behind that of the padding token
DBRX = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 128,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1},
    "ffn_config": {"ffn_hidden_size": 36, "moe_num_experts": 4, "moe_top_k": 2},
}
LAGUNA = (
    GROUPED
    | EXPERTS
    | {"shared_expert_intermediate_size": 32, "moe_routed_scaling_factor": 1.7, "sliding_window": 7}
    | {"layer_types": WINDOWED, "num_attention_heads_per_layer": [4, 6]}
)
LLAMA4 = (
    GROUPED
    | {  # a layer that attends to chunks of keys, and one without angles, which scales its queries
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 7,
        "floor_scale": 4,
        "attn_scale": 0.5,
    }
)

RECURRENT = ["linear_attention", "full_attention"]
DELTA_RULE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
KIMI_DELTA = {"linear_num_heads": 4, "linear_head_dim": 16, "mlp_layer_types": ["dense", "sparse"]}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
NUM_GROUPS = 2 if transformers_version() >= GROUPED_NORM else 1  # of families with one norm for all before
NORMED = MAMBA2 | {"mamba_n_groups": NUM_GROUPS}
MAMBA = {  # states that matter more than those of a new model
    "state_size": 4,
    "time_step_min": 0.5,
    "time_step_max": 2.0,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
}
NEMOTRON_H = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "moe_shared_expert_intermediate_size": 32,
}
ZAMBA = {  # layers share attention
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "mamba_d_state": 4,
    "n_mamba_heads": 2,
    "mamba_dt_rank": 8,
}
ZAMBA2 = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
    "num_mem_blocks": 2,
    "mamba_headdim": 16,
    "mamba_ngroups": 2,
    "use_mem_rope": True,
    "attention_head_dim": 32,
    "adapter_rank": 8,
}
QWEN4 = {
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [],
}
ZAYA = {  # the second layer's window is shorter than prompts
    "num_experts_per_tok": 1,
    "layer_types": ["hybrid", "hybrid_sliding"],
    "sliding_window": 7,
    "router_hidden_size": 16,
    "cca_time1": 3,
    "pad_token_id": None,
}
GRIFFIN = {
    "block_types": ["recurrent", "attention"],
    "lru_width": 64,
    "attention_window_size": 7,
    "w_init_variance_scale": 1.0,
    "final_w_init_variance_scale": 2.0,
    "tie_word_embeddings": False,
}

HYBRIDS = [
    Architecture("bailing_hybrid", MLA | LATER_EXPERTS | KIMI_DELTA | {"layer_types": RECURRENT}),
    Architecture("bamba", GROUPED | NORMED | {"attn_layer_indices": [1]}),
    Architecture("falcon_h1", GROUPED | MAMBA2 | {"mamba_d_ssm": 128}),
    Architecture("falcon_mamba", MAMBA),
    Architecture(
        "granitemoehybrid",
        GROUPED | NORMED | {"num_local_experts": 4, "layer_types": RECURRENT, "shared_intermediate_size": 32},
    ),
    Architecture(
        "jamba",
        GROUPED
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 8}
        | {"num_experts": 4},
    ),
    Architecture("kimi_linear", MLA | LATER_EXPERTS | KIMI_DELTA | {"layer_types": RECURRENT}),
    Architecture("lfm2", GROUPED | {"layer_types": ["conv", "full_attention"]}),
    Architecture(
        "lfm2_moe", GROUPED | EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    ),
    Architecture("lfm3", GROUPED | {"layer_types": ["conv", "full_attention"]}),
    Architecture("mamba", MAMBA),
    Architecture(
        "mamba2",
        {
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": NUM_GROUPS,
            "expand": 2,
            "chunk_size": 8,
        },
    ),
    Architecture("minimax", GROUPED | {"num_local_experts": 4, "layer_types": RECURRENT, "block_size": 8}),
    Architecture("nemotron_h", GROUPED | ROUTED | NEMOTRON_H),
    Architecture("olmo_hybrid", GROUPED | DELTA_RULE | {"layer_types": RECURRENT}),
    Architecture("qwen3_5_text", GROUPED | DELTA_RULE | {"layer_types": RECURRENT}),
    Architecture("qwen3_5_moe_text", GROUPED | SHARED_EXPERT | DELTA_RULE | {"layer_types": RECURRENT}),
    Architecture("qwen3_next", GROUPED | SHARED_EXPERT | DELTA_RULE | {"layer_types": RECURRENT}),
    Architecture("recurrent_gemma", GROUPED | GRIFFIN),
    Architecture("zamba", ZAMBA),
    Architecture("zamba2", MAMBA2 | ZAMBA2),
    Architecture("zaya", GROUPED | EXPERTS | ZAYA),
]
"""Models whose layers keep states."""

ARCHITECTURES = [
    Architecture(
        "afmoe",  # a layer that is rotated and has a window, and one with experts
        GROUPED
        | EXPERTS
        | {"sliding_window": 7, "layer_types": WINDOWED, "mup_enabled": True, "route_scale": 1.7},
    ),
    Architecture("apertus", GROUPED),
    Architecture("arcee", GROUPED),
    Architecture(
        "beam",
        GROUPED
        | EXPERTS
        | {"n_group": 2, "topk_group": 1, "sliding_window": 7, "layer_types": [*WINDOWED, "full_attention"]}
        | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    Architecture("biogpt"),
    Architecture("bitnet", GROUPED),
    Architecture("cohere", GROUPED | {"logit_scale": 0.5}),
    Architecture("cohere2", GROUPED | {"logit_scale": 0.5, "sliding_window": 7, "layer_types": WINDOWED}),
    Architecture(
        "cohere_compass_text",
        GROUPED
        | {"logit_scale": 0.5, "sliding_window": 7, "layer_types": WINDOWED}
        | {"rope_parameters": {"full_attention": None, "sliding_attention": OF_AXES}},
    ),
    Architecture(  # a dense layer without a window that is rotated all the same
        "cohere2_moe",
        GROUPED
        | EXPERTS
        | {"num_shared_experts": 1, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80}
        | {"num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 2, "logit_scale": 0.5},
    ),
    Architecture("deepseek_v2", MLA | LATER_EXPERTS),
    Architecture("deepseek_v3", MLA | LATER_EXPERTS),
    Architecture("axk1", MLA | LATER_EXPERTS),
    Architecture("axk2", INDEXED | LATER_EXPERTS | {"num_local_experts": 4}),
    Architecture("deepseek_v32", INDEXED | LATER_EXPERTS),
    Architecture("glm_moe_dsa", INDEXED | LATER_EXPERTS | {"indexer_types": ["full", "shared"]}),
    Architecture("dots3_note_text", INDEXED | LATER_EXPERTS | DOTS3),
    Architecture("hy_v4", INDEXED | LATER_EXPERTS | {"indexer_types": ["full", "shared"]}),
    Architecture("diffllama", GROUPED),
    Architecture("doge", GROUPED),
    Architecture("dots1", GROUPED | LATER_EXPERTS | {"sliding_window": 7, "layer_types": WINDOWED}),
    Architecture("ernie4_5", GROUPED),
    Architecture("ernie4_5_moe", GROUPED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 36}),
    Architecture("exaone4", GROUPED | {"sliding_window": 7, "layer_types": WINDOWED}),
    Architecture("flex_olmo", GROUPED | EXPERTS),
    Architecture("gemma", GROUPED),
    Architecture("gemma2", GROUPED | {"sliding_window": 7, "query_pre_attn_scalar": 12}),
    Architecture("gemma3_text", GROUPED | {"sliding_window": 7, "layer_types": WINDOWED}),
    Architecture("gemma4_text", GEMMA4),
    Architecture(
        "gemma4_unified_text", {name: value for name, value in GEMMA4.items() if "per_layer" not in name}
    ),
    Architecture("gemma4_text with experts", GEMMA4_LARGE, model_type="gemma4_text"),
    Architecture("glm", GROUPED),
    Architecture("glm4", GROUPED),
    Architecture("glm4_moe", GROUPED | LATER_EXPERTS),
    Architecture("gpt2", GPT2_SIZES),
    Architecture("gpt_bigcode", GPT2_SIZES),
    Architecture("gpt_neox"),
    Architecture(
        "gpt_oss", GROUPED | EXPERTS | {"num_local_experts": 4, "sliding_window": 7, "layer_types": WINDOWED}
    ),
    Architecture(
        "granite", GROUPED | {"residual_multiplier": 0.3, "embedding_multiplier": 4.0, "logits_scaling": 2.0}
    ),
    Architecture(  # each layer has a base of its own, and one none
        "granite_swa",
        GROUPED
        | {"residual_multiplier": 0.3, "embedding_multiplier": 4.0, "logits_scaling": 2.0}
        | {"num_hidden_layers": 3, "layer_types": [*WINDOWED, "full_attention"], "sliding_window": 7}
        | {"layer_rope_theta": [100.0, 0, 10000]},
    ),
    Architecture("granitemoe", GROUPED | {"num_local_experts": 4, "residual_multiplier": 0.5}),
    Architecture(
        "granitemoe_swa",
        GROUPED
        | {"num_local_experts": 4, "shared_intermediate_size": 32, "layer_types": WINDOWED}
        | {"sliding_window": 7, "layer_rope_theta": [0, 100.0]},
    ),
    Architecture(
        "granitemoe_swa without shared experts",
        GROUPED | {"num_local_experts": 4, "layer_types": WINDOWED, "sliding_window": 7},
        model_type="granitemoe_swa",
    ),
    Architecture("granitemoeshared", GROUPED | {"num_local_experts": 4, "shared_intermediate_size": 32}),
    Architecture("helium", GROUPED),
    Architecture("hunyuan_v1_dense", GROUPED),
    Architecture("hunyuan_v1_moe", GROUPED | {"num_experts": 4, "moe_topk": 2}),
    Architecture("internlm3", GROUPED),
    Architecture("jais2", GROUPED),
    Architecture(
        "kolibri1",
        GROUPED
        | EXPERTS
        | {"shared_expert_intermediate_size": 32, "sliding_window": 7, "layer_types": WINDOWED},
    ),
    Architecture("laguna", LAGUNA),
    Architecture("laguna with a gate each", LAGUNA | {"gating": "per-element"}, model_type="laguna"),
    Architecture("llama", GROUPED),
    Architecture(
        "llama with biases", GROUPED | {"attention_bias": True, "mlp_bias": True}, model_type="llama"
    ),
    Architecture("llama4_text", LLAMA4),
    Architecture("minimax_m2", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Architecture("minimax_m3_vl_text", GROUPED | MINIMAX_M3),
    Architecture("ministral", GROUPED | {"sliding_window": 7, "layer_types": WINDOWED}),
    Architecture(
        "modernbert-decoder",
        {"sliding_window": 7, "layer_types": WINDOWED, "cls_token_id": 1, "sep_token_id": 2},
    ),
    Architecture("mistral", GROUPED | {"sliding_window": 7}),
    Architecture("mixtral", GROUPED | {"num_local_experts": 4, "sliding_window": 7}),
    Architecture("nanochat", GROUPED),
    Architecture("olmo", GROUPED | {"clip_qkv": 0.5}),
    Architecture("olmo2", GROUPED),
    Architecture("olmo3", GROUPED | {"sliding_window": 7, "layer_types": WINDOWED}),
    Architecture("olmoe", GROUPED | EXPERTS),
    Architecture("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Architecture("persimmon"),
    Architecture("phi", {"partial_rotary_factor": 0.5}),
    Architecture("phi3", GROUPED | {"sliding_window": 7}),
    Architecture("phimoe", GROUPED | {"num_local_experts": 4, "sliding_window": 7}),
    Architecture("qwen2", GROUPED),
    Architecture(
        "qwen2_moe", GROUPED | EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
    ),
    Architecture("qwen3", GROUPED),
    Architecture("qwen3_moe", GROUPED | EXPERTS),
    Architecture("seed_oss", GROUPED),
    Architecture("smollm3", GROUPED | {"no_rope_layers": [1, 0]}),
    Architecture("starcoder2", GROUPED | {"sliding_window": 7}),
    Architecture("vaultgemma", GROUPED | {"sliding_window": 7, "layer_types": WINDOWED}),
    Architecture("cwm", GROUPED | {"sliding_window": 7, "layer_types": WINDOWED}),
    Architecture(
        "hyperclovax",
        GROUPED | {"residual_multiplier": 0.5, "embedding_multiplier": 4.0, "logits_scaling": 2.0},
    ),
    Architecture("mimo_v2_flash", GROUPED | EXPERTS | {"sliding_window": 7, "v_head_dim": 12}),
    Architecture("ministral3", GROUPED | {"sliding_window": None, "rope_parameters": MINISTRAL_ROPE}),
    Architecture("minicpm3", MLA),
    Architecture("youtu", MLA),
    Architecture("glm4_moe_lite", MLA | LATER_EXPERTS),
    Architecture("ctrl", GPT2_SIZES | {"dff": 96}),
    Architecture("nemotron", GROUPED),
    Architecture("stablelm", GROUPED),
    Architecture("bloom", {"n_head": 4, "n_layer": 2}),
    Architecture("codegen", GPT2_SIZES | {"rotary_dim": 8}),
    Architecture("falcon", {"alibi": False}),
    Architecture("falcon with ALiBi", {"alibi": True, "multi_query": False}, model_type="falcon"),
    Architecture(
        "falcon with groups", {"new_decoder_architecture": True, "num_kv_heads": 2}, model_type="falcon"
    ),
    Architecture("data2vec-text", DECODER),
    Architecture("roberta", DECODER),
    Architecture("dbrx", DBRX),
    Architecture(
        "gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 7}
    ),
    Architecture("gptj", GPT2_SIZES | {"rotary_dim": 8}),
    Architecture(
        "mpt", {"hidden_size": 96, "num_attention_heads": 6, "n_layers": 2, "max_seq_len": 128}
    ),  # heads that are no power of 2
    *HYBRIDS,
    # Refused: attention or states that cannot be replaced.
    Architecture(
        "bart",
        {"d_model": 64, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
        "decoder of an encoder-decoder model",
    ),
    Architecture("gemma2 both ways", BOTH_WAYS, "attend both ways", model_type="gemma2"),
    Architecture("deepseek_v4", INDEXED | LATER_EXPERTS, "heavily_compressed_attention"),
    Architecture("openai-gpt", GPT2_SIZES, OWN_ATTENTION),
    Architecture(
        "inkling_text", GROUPED | ROUTED | {"sliding_window_size": 7}, "logits of a query's own by distance"
    ),
    Architecture("qwen4_exp_text", GROUPED | EXPERTS | DELTA_RULE | QWEN4, "indexed_attention"),
    Architecture("rwkv", {}, "recurrent model"),
    Architecture("cpmant", {"dim_head": 16, "dim_ff": 96}, OWN_ATTENTION),
    Architecture("hrm_text", GROUPED, "calls attention more than once"),
    Architecture(
        "longcat_flash",
        MLA | {"num_layers": 2, "head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
        "multiplies by the weight of a linear layer",
    ),
    Architecture(
        "doge with long sequences", GROUPED | {"keep_window_size": 60}, "max_model_len=60", model_type="doge"
    ),
]

SERVED = {architecture.name: architecture for architecture in ARCHITECTURES if architecture.refused is None}
MODULES = frozenset(
    [
        "axk2",
        "diffllama",
        "doge",
        "dots3_note_text",
        "hy_v4",
        "minimax",
        "recurrent_gemma",
        "zamba",
        "zamba2",
        "zaya",
    ]
)
"""Decoders that no structure describes."""
