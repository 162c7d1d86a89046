"""Which parameters of transformers' modules are matrices of products or of embeddings, and how they lie there."""

from __future__ import annotations

from torch import nn

EXPERT_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


def is_linear(module: nn.Module) -> bool:
    """True for a linear layer, and for GPT-2's transposed `Conv1D`."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def is_experts(module: nn.Module) -> bool:
    """True for a module of fused experts, whose implementation transformers selects by name."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def is_plain_embedding(module: nn.Module) -> bool:
    """True for an embedding that does nothing but look rows up."""
    return type(module) is nn.Embedding


def is_stack(module: nn.Module, name: str) -> bool:
    """True for a parameter that is a stack of matrices, one for each expert."""
    return name in EXPERT_MATRICES and is_experts(module)


def is_transposed(module: nn.Module) -> bool:
    """True if the matrices of a module are [K, N], not [N, K]."""
    return bool(getattr(module, "is_transposed", type(module).__name__ == "Conv1D"))
