"""How many layers, experts and labels a configuration may name: each takes work before any weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pagewire.ipc.quoting import quoted

MAX_LAYERS = 1 << 12  # the deepest models have some 130
MAX_EXPERTS = 1 << 14  # those with the most have 2,048; Doge's configuration has 16,384 by default
MAX_LABELS = 1 << 17  # classes of a classifier; the largest have some 20,000
LAYERS = re.compile(r"(^|_)(layers?|depth)$")  # as num_hidden_layers, n_layer
EXPERTS = re.compile(r"(^|_)experts$")  # as n_routed_experts
LABELS = "num_labels"


def check_counts(config: Mapping[str, Any]) -> None:
    """Refuse a model's configuration with more layers, experts or labels than any model has, also in its parts.

    Raises:
        ValueError: it has; the text names the setting.
    """
    parts = [config]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif isinstance(value, int | float) and value > MAX_LAYERS and (limit := _limit(name)) < value:
                setting = quoted(name).strip("'")
                raise ValueError(
                    f"the model's configuration: {setting} is {quoted(value)}, and at most {limit} are served"
                )


def _limit(name: str) -> float:
    if name == LABELS:
        return MAX_LABELS
    if EXPERTS.search(name):
        return MAX_EXPERTS
    return MAX_LAYERS if LAYERS.search(name) else math.inf
