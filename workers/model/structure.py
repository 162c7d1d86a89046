"""The structure of models whose layers run as one `DecoderStack`, by names. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj"}
SPARSE = {"gate", "experts"}
SHARED = {"shared_expert", "shared_expert_gate"}
NORMS = {"input_layernorm", "post_attention_layernorm"}
OTHER_ARITHMETIC = {"ernie4_5", "granite", "helium", "ministral3", "smollm3"}
"""Model types with the structure of a stack that compute something else. The proof would refuse their stacks, too,
but only after packing all of them."""
SPARSE_MODELS = {"mixtral", "qwen2_moe", "qwen3_moe"}
"""Model types whose experts are chosen by the softmax of a router's logits. Others have the same structure, and
other arithmetic."""
OTHER_EMBEDDING = {"gemma"}
"""Model types whose embedding does more than look rows up."""
ACTIVATIONS = {"silu", "swish", "gelu_pytorch_tanh"}
DEFAULT_ACTIVATION = "silu"  # of a configuration that names none


def has_stack_structure(model_type: str, names: Iterable[str], config: Mapping[str, Any]) -> bool:
    """True if tensors of these names make the layers of a stack. Whether it computes the same, the proof says."""
    text = {**config, **(config.get("text_config") or {})}
    activation = text.get("hidden_act") or text.get("hidden_activation") or DEFAULT_ACTIVATION
    if model_type in OTHER_ARITHMETIC | OTHER_EMBEDDING or activation not in ACTIVATIONS:
        return False
    children: dict[str, set[str]] = {}
    for name in names:
        _, found, rest = name.partition("model.layers.")
        if rest.endswith("norm.bias"):  # of a norm that is no RMSNorm
            return False
        if found:
            module, *inner = rest.removesuffix(".weight").removesuffix(".bias").split(".")[1:]
            children.setdefault(module if inner else "", set()).add(inner[0] if inner else module)
    if model_type in SPARSE_MODELS:
        feed_forward = children.setdefault("mlp", set())
        feed_forward |= children.pop("block_sparse_moe", set())
        if feed_forward >= SPARSE:  # some layers may have experts, and others none
            feed_forward -= SPARSE | SHARED
            feed_forward |= MLP
    if children.keys() != {"self_attn", "mlp", ""} or children["self_attn"] not in (
        ATTENTION,
        ATTENTION | HEAD_NORMS,
    ):
        return False
    return children["mlp"] == MLP and children[""] == NORMS
