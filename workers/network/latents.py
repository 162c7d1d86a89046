"""Attention to latents as data, of modules of transformers."""

from __future__ import annotations

from typing import Any

import torch

from pagewire.kernels.data.layer import Indexer, Latents
from pagewire.workers.families.structures import LayerParts, children, layer_norm_of, require, rms_norm_of
from pagewire.workers.module.latent import kernels_for, latent_heads, takes_latents
from pagewire.workers.module.transforms import pack_joined
from pagewire.workers.module.weights import Weights


def latents_of(part: LayerParts, weights: Weights, device: torch.device) -> Latents:
    """What a layer has for attention to latents, packed on a device.

    Raises:
        OtherStructureError: the device's kernels have no latents of such sizes, or a norm is none that they have.
    """
    attention = part.latents
    require(takes_latents(attention, device), "the kernels have no latents of such sizes")
    kernels = kernels_for(attention.kv_b_proj.weight.dtype, device)
    require(not getattr(kernels, "batch_invariant", False), "products of heads on a GPU depend on the batch")
    indexer = getattr(attention, "indexer", None)
    has_own = attention.q_lora_rank is not None
    return Latents(
        query_norm=rms_norm_of(attention.q_a_layernorm, weights, device) if has_own else None,
        queries=pack_joined([attention.q_b_proj], weights, device) if has_own else None,
        norm=rms_norm_of(attention.kv_a_layernorm, weights, device),
        heads=latent_heads(attention, weights, device),
        indexer=None if indexer is None else indexer_of(indexer, weights, device, part.index_interleaved),
        follows=bool(getattr(attention, "skip_topk", False)),
    )


def indexer_of(module: Any, weights: Weights, device: torch.device, interleaved: bool) -> Indexer:
    """An indexer, packed on a device.

    Raises:
        OtherStructureError: its norm is no layer norm.
    """
    require(children(module) == {"wq_b", "wk", "k_norm", "weights_proj"}, "its indexer has other parts")
    return Indexer(
        keys=pack_joined([module.wk], weights, device),
        norm=layer_norm_of(module.k_norm, weights, device),
        queries=pack_joined([module.wq_b], weights, device),
        weights=pack_joined([module.weights_proj], weights, device),
        num_chosen=module.index_topk,
        interleaved=interleaved,
    )


def num_latent_heads(attention: Any, weights: Weights) -> int:
    """The heads of attention to latents that this rank has."""
    size: int = attention.qk_nope_head_dim + attention.v_head_dim
    return weights.num_rows(attention.kv_b_proj) // size
