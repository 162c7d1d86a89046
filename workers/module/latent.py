"""Multi-head latent attention within modules of transformers, on its compressed cache (`pagewire.kernels.latents`).

All families of transformers with such attention have a method `expand_kv`, behind which they call attention.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.data.latents import LatentHeads
from pagewire.kernels.data.weight import dense_weight
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.latents import GroupedHeads
from pagewire.kernels.linear import dense
from pagewire.kernels.reference.kernels import Kernels
from pagewire.workers.module.products import packed
from pagewire.workers.module.weights import Weights


def absorb_latents(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Let the latent attention within a module attend to latents, in place of keys and values that it expands.

    It goes on expanding them where a GPU has no kernel for latents of their size, or PyTorch found it wrong.
    """
    for child in list(module.modules()):
        if hasattr(child, "kv_b_proj") and hasattr(child, "expand_kv") and takes_latents(child, device):
            attention: Any = child
            attention.latent_heads = GroupedHeads(latent_heads(attention, weights, device), device)
            attention.expand_kv = MethodType(_latent_and_rotated, attention)
            del attention.kv_b_proj


def takes_latents(attention: Any, device: torch.device) -> bool:
    """True if the kernels for a module's dtype attend to latents of its sizes."""
    served = kernels_for(next(attention.parameters()).dtype, device).latents
    if served is None:
        return True
    return (attention.kv_lora_rank + attention.qk_rope_head_dim, attention.kv_lora_rank) in served


def packs_heads(dtype: torch.dtype, device: torch.device) -> bool:
    """True if each head's matrices are packed by themselves, as on CPUs; else PyTorch multiplies them at once."""
    return device.type == "cpu" and kernels_for(dtype, device).latents is None


def kernels_for(dtype: torch.dtype, device: torch.device) -> Kernels:
    """The kernels for tensors of a dtype on a device."""
    return implementation_for(torch.empty(0, dtype=dtype, device=device))


def latent_heads(attention: Any, weights: Weights, device: torch.device) -> LatentHeads:
    """The halves of an attention module's `kv_b_proj`, or this rank's heads of it; dequantised."""
    nope, size = attention.qk_nope_head_dim, attention.v_head_dim
    matrix = dense(weights.matrix(attention.kv_b_proj))
    heads = split_heads(matrix.view(-1, nope + size, matrix.shape[1]), nope, device)
    weights.let_go()
    return heads


def split_heads(matrices: Tensor, nope: int, device: torch.device) -> LatentHeads:
    """The heads whose rows of keys and of values these are, [H, nope + Dv, rank]."""
    if packs_heads(matrices.dtype, device):
        keys = [packed(dense_weight(head[:nope].T), None, device) for head in matrices]
        values = [packed(dense_weight(head[nope:]), None, device) for head in matrices]
        return LatentHeads(keys, values)
    held = matrices.to(device).contiguous()
    return LatentHeads(held[:, :nope], held[:, nope:].mT)


def _latent_and_rotated(_: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`: keys [1, 1, T, rank + rope], and their first elements as values [1, 1, T, rank]."""
    keys = torch.cat([latent, rotated], -1)
    return keys, keys[..., : latent.shape[-1]]
