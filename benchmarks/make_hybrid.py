"""Random models whose layers keep states, shaped like families of about 300M weights, for figures.

python -m benchmarks.make_hybrid OUT [--only lfm2-300m]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

COMMON = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "max_position_embeddings": 4608,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
GROUPED = {"num_attention_heads": 16, "num_key_value_heads": 8}
MAMBA2 = {
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-300m": (
        "lfm2",
        GROUPED
        | {
            "num_hidden_layers": 16,
            "intermediate_size": 6656,
            "layer_types": ["full_attention" if layer in LFM2_ATTENTION else "conv" for layer in range(16)],
        },
    ),
    "qwen3_5-300m": (
        "qwen3_5_text",
        GROUPED
        | {
            "num_hidden_layers": 16,
            "intermediate_size": 2816,
            "head_dim": 64,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "bamba-300m": (
        "bamba",
        GROUPED
        | MAMBA2
        | {"num_hidden_layers": 20, "intermediate_size": 2816, "attn_layer_indices": [4, 9, 14, 19]},
    ),
    "mamba2-300m": (
        "mamba2",
        {"num_hidden_layers": 40, "num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1},
    ),
}
"""By name: the model type and its sizes."""


def make(name: str, folder: Path) -> int:
    """Write a model of random bfloat16 weights, without a tokenizer; returns the number of weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model.num_parameters()


def main() -> None:
    """Write the models, and print their sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=SHAPES, help="this one")
    options = parser.parse_args()
    for name in [options.only] if options.only else SHAPES:
        print(f"{options.out / name}: {make(name, options.out / name) / 1e6:.0f}M weights", flush=True)


if __name__ == "__main__":
    main()
