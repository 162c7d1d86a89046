"""Where the base model of texts is in a causal module, which may take pictures or sound beside them."""

from __future__ import annotations

from typing import Any

from torch import nn

NAMES = ("language_model", "text_model")


def takes_more_than_text(config: Any) -> bool:
    """True if the model of a configuration takes pictures or sound as well; Chameleon's has no part for text."""
    return config.get_text_config() is not config or hasattr(config, "vq_config")


def picture_layers(config: Any) -> set[int]:
    """The numbers of the layers that run only where there are pictures: those of Llama 3.2 Vision look at them."""
    text = config.get_text_config()
    return set(getattr(text, "cross_attention_layers", None) or ()) & set(range(text.num_hidden_layers))


def without_picture_layers(base: Any) -> Any:
    """A base model whose `picture_layers` are empty: its forward passes them by."""
    for layer in picture_layers(base.config):
        base.layers[layer] = nn.Identity()
    return base


def base_path(module: Any) -> str:
    """The name of a module's base model: of the one for texts, if it has others beside it.

    Empty if the module is a base model itself.
    """
    prefix: str = module.base_model_prefix
    base = getattr(module, prefix, None)
    path, base = ("", module) if base is None else (prefix, base)
    if takes_more_than_text(module.config):
        for name in NAMES:
            if isinstance(getattr(base, name, None), nn.Module):
                return f"{path}.{name}".removeprefix(".")
    return path


def position_offset(base: Any) -> int:
    """The position of a prompt's first token: RoBERTa and its descendants count from behind the padding token."""
    embeddings: Any = getattr(base, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_inputs_embeds"):
        return int(embeddings.padding_idx) + 1
    return 0
