"""Gemma 3n: its language model alone, as transformers makes the whole only with `timm`, a package for pictures."""

from __future__ import annotations

from typing import Any

from pagewire.ipc.families.family import Config, Family, module_settings

PREFIX = "model.language_model"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Settings that may stand beside those of the text."""
MODULES = (
    "embed_tokens",
    "norm",
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)
MAX_STREAMS = 16
"""Of hidden states that a token has beside the first; the published models have 3."""


def _settings(values: Config) -> dict[str, Any]:
    beside = {name: values[name] for name in TOKENS if name in values}
    return module_settings(beside | dict(values["text_config"]), "gemma3n_text", "Gemma3nForCausalLM")


def _outside() -> dict[str, str]:
    streams = (f"altup_{kind}projections.{i}" for kind in ("", "unembed_") for i in range(MAX_STREAMS))
    return {f"{PREFIX}.{name}": f"model.{name}" for name in (*MODULES, *streams)}


GEMMA3N = Family(
    "Gemma 3n",
    frozenset({"Gemma3nForConditionalGeneration"}),
    frozenset({"gemma3n"}),
    _settings,
    layers=f"{PREFIX}.layers",
    top=_outside(),
    beside=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
)
