"""Families that are known and not served, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagewire.ipc.families.family import Config, Family


def _because(reason: str) -> Callable[[Config], dict[str, Any]]:
    def refuse(values: Config) -> dict[str, Any]:
        name = (values.get("architectures") or [values.get("model_type")])[0]
        raise ValueError(f"{name!s:.100} is not supported: {reason}")

    return refuse


ARCTIC = Family(
    "Arctic",
    frozenset({"ArcticForCausalLM"}),
    frozenset({"arctic"}),
    _because(
        "transformers has no layers whose experts run beside a dense MLP that reads the layer's input; take "
        "another mixture of experts, such as Mixtral, Qwen 3 or DeepSeek"
    ),
)
PHI3_SMALL = Family(
    "Phi-3-small",
    frozenset({"Phi3SmallForCausalLM"}),
    frozenset({"phi3small"}),
    _because(
        "every other layer leaves blocks of earlier tokens out, in a pattern of its own for each head; take "
        "Phi-3-mini or Phi-3-medium"
    ),
)
REFUSED = (ARCTIC, PHI3_SMALL)
