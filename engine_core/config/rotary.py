"""The options `rope_scaling` and `rope_theta`, as changes of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEPT = ("rope_theta", "partial_rotary_factor")
"""Of a rotary embedding's settings, those that another scaling leaves as they are."""


def rotary_overrides(
    model: Mapping[str, Any], scaling: Mapping[str, Any], theta: float | None
) -> dict[str, Any]:
    """The settings that give a model this scaling of its rotary embedding, and this base of its angles.

    model: the content of its config.json. scaling, theta: empty and None leave the model's own.

    Raises:
        ValueError: the model has several rotary embeddings, or has them for more than text.
    """
    if not scaling and theta is None:
        return {}
    own = model.get("rope_parameters") or {}
    if isinstance(model.get("text_config"), dict) or any(isinstance(value, dict) for value in own.values()):
        raise ValueError(
            "rope_scaling and rope_theta are for models of one rotary embedding, and this one may have several: "
            "give its rope_parameters in hf_overrides"
        )
    base = {} if theta is None else {"rope_theta": theta}
    if not own:  # as files have it that were written by versions of transformers before 5
        return base | ({"rope_scaling": dict(scaling)} if scaling else {})
    kept = {name: own[name] for name in KEPT if name in own} if scaling else dict(own)
    return {"rope_parameters": {**kept, **scaling, **base}}
