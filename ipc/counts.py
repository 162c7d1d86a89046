"""How many layers and experts a configuration may name: an object is made for each, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pagewire.ipc.quoting import quoted

MAX_COUNT = 1 << 12  # the deepest models have some 130 layers, those with the most experts 2,048
COUNTED = re.compile(r"(^|_)(layers?|experts|depth)$")  # as num_hidden_layers, n_layer, n_routed_experts


def check_counts(config: Mapping[str, Any]) -> None:
    """Refuse a model's configuration with more layers or experts than any model has, also in its parts.

    Raises:
        ValueError: it has; the text names the setting.
    """
    parts = [config]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif isinstance(value, int | float) and value > MAX_COUNT and COUNTED.search(name):
                setting = quoted(name).strip("'")
                raise ValueError(
                    f"the model's configuration: {setting} is {quoted(value)}, and at most {MAX_COUNT} are served"
                )
