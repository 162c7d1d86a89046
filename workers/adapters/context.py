"""Adapters for longer contexts than their model's: their rotary embedding is another one ("LongLoRA")."""

from __future__ import annotations

import json
from pathlib import Path

from pagewire.ipc.hub import read_configs
from pagewire.ipc.worker_messages import WorkerConfig

LENGTHS = ("max_position_embeddings", "n_positions")


def check_context_length(context_length: int, config: WorkerConfig) -> None:
    """Refuse an adapter that was trained with positions scaled for more tokens than its model has positions for.

    Such an adapter has `context_length` in its configuration. Chen et al. 2023 ("LongLoRA") divide positions by the
    ratio of the two, rounded up, which is `rope_type` "linear".

    Raises:
        ValueError: the text says with which options it can be served.
    """
    values = read_configs(Path(config.model_path))[0] | config.hf_overrides
    text = {**values, **(values.get("text_config") or {})}
    limit = next((n for name in LENGTHS if isinstance(n := text.get(name), int) and n > 0), context_length)
    if context_length > limit:
        own = text.get("rope_parameters") or text.get("rope_scaling") or {}
        factor = -(-context_length // limit)
        scaling = {"rope_type": "linear", "factor": factor * own.get("factor", 1.0)}
        if "rope_theta" in own:  # where versions of transformers since 5 have it
            scaling["rope_theta"] = own["rope_theta"]
        overrides = {"rope_scaling": scaling, "max_position_embeddings": limit * factor}
        raise ValueError(
            f"it was trained for {context_length} tokens, and this model has positions for {limit}: all requests "
            "of an engine have one rotary embedding. Serve it in an engine of its own, with hf_overrides="
            f"{json.dumps(overrides)}"
        )
