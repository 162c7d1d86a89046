"""The longest sequence that a model's configuration names, and requests for a longer one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewire.ipc.environment import env_flag

MAX_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "max_seq_len",  # of MPT and DBRX
)
"""The names that families give the setting of the longest sequence."""


def longest_sequence(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a model, in tokens, by its config.json; None if that does not say."""
    text = config.get("text_config")
    settings = text if isinstance(text, dict) else config
    limits = (settings.get(name) for name in MAX_POSITIONS)
    return next((limit for limit in limits if type(limit) is int and limit > 0), None)


def too_long(max_model_len: int | None, limit: int | None) -> str | None:
    """Why a length that is asked for is refused; None if it is not. limit: the model's; None: unknown."""
    if max_model_len is None or limit is None or max_model_len <= limit:
        return None
    if env_flag("PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN"):
        return None
    return (
        f"max_model_len {max_model_len} exceeds the model's limit of {limit} positions; "
        "PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN=1 allows it"
    )
