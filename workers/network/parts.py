"""Makes modules of transformers run by our products and norms, and counts what they hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from pagewire.kernels.experts import GroupedExperts
from pagewire.kernels.latents import GroupedHeads
from pagewire.workers.module.experts import pack_experts
from pagewire.workers.module.latent import absorb_latents
from pagewire.workers.module.recurrences import lay_taps
from pagewire.workers.module.transforms import (
    LinearModule,
    QuantisedEmbedding,
    pack_embeddings,
    pack_linears,
    replace_norms,
)
from pagewire.workers.module.weights import Weights


def transform_parts(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Replace linears, experts and norms, and keep the module's own forward; the result is on a device.

    Parts that are transformed already stay as they are.
    """
    absorb_latents(module, weights, device)
    pack_experts(module, weights, device)
    pack_embeddings(module, weights, device)
    pack_linears(module, weights, device)
    weights.fill(module)
    module.to(device)
    lay_taps(module)
    replace_norms(module)


def module_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all weights of modules, including packed ones."""
    total, seen = 0, set()
    for module in modules:
        for child in module.modules():
            if isinstance(child, LinearModule):
                total += child.product.num_bytes
            for parts in (getattr(child, "grouped", None), getattr(child, "latent_heads", None)):
                if isinstance(parts, GroupedExperts | GroupedHeads):
                    total += parts.num_bytes
            if isinstance(child, QuantisedEmbedding):
                total += child.num_bytes
        for parameter in module.parameters():
            if parameter.device.type != "meta" and parameter.data_ptr() not in seen:
                seen.add(parameter.data_ptr())
                total += parameter.nbytes
    return total
