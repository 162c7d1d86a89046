"""Random models of one shape, of families that people run, for figures: 24 layers, 1,024 wide, about 300M weights.

python -m benchmarks.make_families OUT [--only gemma3]
python -m benchmarks.compare families OUT          # each beside the Llama of the same shape
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
WINDOWS = {"sliding_window": 512}
GEMMA_4 = {
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    "global_head_dim": 128,
    "num_kv_shared_layers": 8,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 32000,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "cohere": ("cohere", {}),
    "exaone4": ("exaone4", WINDOWS | {"sliding_window_pattern": 4}),
    "gemma2": ("gemma2", WINDOWS | {"query_pre_attn_scalar": 64}),
    "gemma3": ("gemma3_text", WINDOWS | {"query_pre_attn_scalar": 64}),
    "gemma4": ("gemma4_text", WINDOWS | GEMMA_4),
    "glm4": ("glm4", {}),
    "granite": ("granite", {"attention_multiplier": 0.125, "residual_multiplier": 0.5}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {}),
    "starcoder2": ("starcoder2", {"intermediate_size": 4224}),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 12, "num_local_experts": 8, "num_experts_per_tok": 2}),
}
"""By name: the model type, and its sizes beside the common ones."""


def make(name: str, folder: Path) -> int:
    """Write a model of random bfloat16 weights, without a tokenizer; returns the number of weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = FAMILIES[name]
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
    parser.add_argument("--only", choices=FAMILIES, help="this one")
    options = parser.parse_args()
    for name in [options.only] if options.only else FAMILIES:
        print(f"{options.out / name}: {make(name, options.out / name) / 1e6:.0f}M weights", flush=True)


if __name__ == "__main__":
    main()
