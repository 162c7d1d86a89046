"""The families whose models take pictures or sound, a row each: what their processor and their module do otherwise.

Most do the same: the processor's `image_token` is the placeholder, every place of the configuration's
`image_token_id` in a layout takes one row of the `pooler_output` of the module's `get_image_features`, and
attention stays causal. What differs stands in the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MediaFamily:
    """How models of one type take media.

    kinds: "image", "audio". positions: tokens have three positions, of time, height and width (M-RoPE), which the
    module's `get_rope_index` gives.
    whole: the tokens of a medium attend to each other both ways. leads: media come before the text, and prompts
    need no placeholder. only_places: a layout has only the places of embeddings, although the processor adds more.
    arguments: that the processor gets with every medium.
    refused: why the family is served with text alone; empty: it takes media.
    """

    kinds: tuple[str, ...] = ("image",)
    positions: bool = False
    whole: bool = False
    leads: bool = False
    only_places: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


FILES = ("processor_config.json", "preprocessor_config.json")

PLAIN = MediaFamily()
GRID = MediaFamily(positions=True)
HEARS = MediaFamily(("audio",))

FAMILIES: Mapping[str, MediaFamily] = {
    "qwen2_vl": GRID,
    "qwen2_5_vl": GRID,
    "qwen3_vl": GRID,
    "qwen3_vl_moe": GRID,
    "glm4v": GRID,
    "glm4v_moe": GRID,
    "llava": PLAIN,
    "llava_next": PLAIN,
    "mistral3": PLAIN,
    "internvl": PLAIN,
    "idefics3": PLAIN,
    "smolvlm": PLAIN,
    "aya_vision": PLAIN,
    "got_ocr2": MediaFamily(refused="its processor writes the whole prompt, of one picture of 256 tokens"),
    "audioflamingo3": HEARS,
    "glmasr": HEARS,
    "qwen2_audio": HEARS,
    "gemma3": MediaFamily(whole=True),
    "paligemma": MediaFamily(refused="all tokens of its prompts attend both ways, text as well"),
}
"""By the `model_type` of config.json."""


def has_processor(folder: Path) -> bool:
    """True if a model's folder has a processor of media."""
    return any((folder / name).is_file() for name in FILES)


def media_family(config: Mapping[str, Any]) -> MediaFamily | None:
    """The row of a model by its config.json; None where it takes text alone."""
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None or family.refused else family
