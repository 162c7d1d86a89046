"""What names say: which models' layers run as the stack of a `Network`, and how long they are. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj"}
SPARSE = {"gate", "experts"}
SHARED = {"shared_expert", "shared_expert_gate"}
NORMS = {"input_layernorm", "post_attention_layernorm"}
OTHER_ARITHMETIC = {"alibi_llama", "ernie4_5", "granite", "helium", "ministral3", "smollm3"}
"""Model types with the structure of a stack that compute something else. The proof would refuse their stacks, too,
but only after packing all of them."""
SPARSE_MODELS = {"mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"}
"""Model types whose experts are chosen by the softmax of a router's logits. Others have the same structure, and
other arithmetic."""
STACKED_HYBRIDS = {
    *("bailing_hybrid", "bamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
"""Model types with states whose layers add what their halves make of normed states, and do nothing else."""
OTHER_EMBEDDING = {"gemma"}
"""Model types whose embedding does more than look rows up."""
NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
"""The names that families give the number of a layer's experts."""
CHUNKED = "chunked_attention"
WINDOWS = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "local": "window_size",
    CHUNKED: "attention_chunk_size",
}
"""Types of layers whose queries see the keys of a window or a chunk, and the setting of its size."""
DEFAULT_POSITIONS = 2048  # of a model that gives no limit
ACTIVATIONS = {"silu", "swish", "gelu_pytorch_tanh"}
DEFAULT_ACTIVATION = "silu"  # of a configuration that names none


def has_stack_structure(model_type: str, names: Iterable[str], config: Mapping[str, Any]) -> bool:
    """True if tensors of these names make the layers of a stack. Whether it computes the same, the proof says."""
    text = {**config, **(config.get("text_config") or {})}
    if text.get("model_type") in STACKED_HYBRIDS:
        return True
    activation = text.get("hidden_act") or text.get("hidden_activation") or DEFAULT_ACTIVATION
    if model_type in OTHER_ARITHMETIC | OTHER_EMBEDDING or activation not in ACTIVATIONS:
        return False
    names = [name for name in names if not name.endswith(".inv_freq")]  # in old checkpoints; not read
    if any(name.endswith("norm.bias") for name in names):  # of a norm that is no RMSNorm
        return False
    inner = (name.partition("model.layers.")[2].split(".")[1:3] for name in names)
    found = {
        ".".join(path).replace("block_sparse_moe", "mlp").removesuffix(".weight") for path in inner if path
    }
    dense, experts = _within("mlp", MLP), _within("mlp", SPARSE)
    if model_type in SPARSE_MODELS and found >= experts:  # some layers may have experts, and others none
        found = found - experts - _within("mlp", SHARED) | dense
    parts, norms = _within("self_attn", ATTENTION) | dense | NORMS, _within("self_attn", HEAD_NORMS)
    return found in (parts, parts | norms)


def _within(module: str, names: Iterable[str]) -> set[str]:
    return {f"{module}.{name}" for name in names}
