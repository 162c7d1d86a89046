"""The configurations of a model's layers, which differ in some families: Gemma 4 has heads of two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def layer_configs(config: Any) -> Sequence[Any]:
    """The configuration of each decoder layer, with its own heads, window and widths. config: of the model."""
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return text.per_layer_config  # type: ignore[no-any-return]
    return [text] * text.num_hidden_layers


def head_dims(config: Any) -> set[int]:
    """The sizes of the attention heads in a model's layers."""
    layers = layer_configs(config)
    return {getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads for own in layers}
