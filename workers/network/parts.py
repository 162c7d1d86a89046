"""Makes modules of transformers run by our products, counts what they hold, and packs what gives layers inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pagewire.kernels.data.layer import InputGate
from pagewire.kernels.experts import GroupedExperts
from pagewire.kernels.latents import GroupedHeads
from pagewire.workers.families.structures import LayerParts, Structure, require
from pagewire.workers.module.experts import pack_experts
from pagewire.workers.module.latent import absorb_latents
from pagewire.workers.module.matrices import is_linear
from pagewire.workers.module.parallel_layers import DividedEmbedding
from pagewire.workers.module.recurrences import lay_taps
from pagewire.workers.module.transforms import (
    LinearModule,
    QuantisedEmbedding,
    ScaledEmbedding,
    embedding,
    pack_embeddings,
    pack_joined,
    pack_linears,
    replace_norms,
)
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.network import LayerInputs


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


def layer_inputs_of(
    base: Any, structure: Structure, weights: Weights, device: torch.device
) -> LayerInputs | None:
    """What a base gives its layers of each token, with packed weights; None: nothing."""
    if not structure.layer_inputs:
        return None
    table, projection, norm = map(base.get_submodule, structure.layer_inputs)
    factor = own_factor(table)
    require(factor is not None and is_linear(projection), "the table of its layers' inputs is not scaled")
    assert factor is not None
    return LayerInputs(
        scaled_by(factor, embedding(table, weights, device).to(device), table.weight.dtype),
        pack_joined([projection], weights, device),
        structure.norm_of(norm, weights, device),
        float(base.per_layer_model_projection_scale),
        float(base.per_layer_input_scale),
        structure.layer_inputs[1],
    )


def input_gate_of(
    part: LayerParts, structure: Structure, weights: Weights, device: torch.device
) -> InputGate | None:
    """What lets a layer's inputs through, packed; None: it gets none."""
    if part.input_gate is None:
        return None
    gate, out, norm = part.input_gate
    require(is_linear(gate) and is_linear(out))
    own = structure.norm_of(norm, weights, device)
    return InputGate(
        pack_joined([gate], weights, device), pack_joined([out], weights, device), own, part.index
    )


def own_factor(module: Any) -> float | None:
    """What an embedding of transformers multiplies its rows by; None: it is a plain table.

    Raises:
        OtherStructureError: it does something else.
    """
    if type(module) is nn.Embedding:
        return None
    own: float | None = getattr(module, "scalar_embed_scale", None) or getattr(module, "embed_scale", None)
    require(isinstance(module, nn.Embedding) and own is not None, "its embedding is no plain table")
    return own


def scaled_by(factor: float, words: Any, dtype: torch.dtype) -> ScaledEmbedding:
    """A table whose rows are multiplied by a factor, rounded to a dtype as the module rounds it."""
    if isinstance(words, DividedEmbedding):
        words.rows = without_factor(words.rows)
    else:
        words = without_factor(words)
    return ScaledEmbedding(words, float(torch.tensor(factor, dtype=dtype)))


def without_factor(table: Any) -> nn.Module:
    """The rows of an embedding of transformers that scales them, as they are; another one itself."""
    if not isinstance(table, nn.Embedding):
        return table  # type: ignore[no-any-return]
    rows: Any = table.weight
    return nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows, _freeze=True)
