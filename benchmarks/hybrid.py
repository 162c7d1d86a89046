"""Hybrids trained in minutes: their perplexity by the worker, beside that by transformers.

    python -m benchmarks.hybrid --minutes 4

A small model of two layers with states to one that attends, of gated delta rules (Qwen3.5's layers) or of Mamba-2's
state spaces (Bamba's), is trained as the demo model is. Held-out text is then read as `benchmarks.alibi` reads it:
in float32, by transformers at once, and by the worker in chunks, batched, with its states in slots. Status 1: the
perplexities differ by over 0.1%.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks import train_demo
from benchmarks.alibi import MOST, print_perplexities
from benchmarks.limits import processor

COMMON = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": train_demo.PAD,
    "bos_token_id": train_demo.BOS,
    "eos_token_id": train_demo.EOS,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 48,
    },
    "bamba": {
        "attn_layer_indices": [2, 5],
        "mamba_n_heads": 8,
        "mamba_d_head": 48,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
    },
}
"""By model type, what differs from one to the other."""


def make_model(kind: str, vocab_size: int) -> PreTrainedModel:
    """A hybrid without weights that mean anything."""
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **COMMON, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def main() -> int:
    """Train, and print both perplexities of each model, for each length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", choices=KINDS, help="this one")
    options = parser.parse_args()
    corpus = train_demo.read_corpus()
    tokenizer = train_demo.train_tokenizer(corpus)
    held_out = train_demo.token_stream(train_demo.held_out(corpus), tokenizer, random.Random(0))
    print(processor())
    worst = 0.0
    for kind in [options.only] if options.only else KINDS:
        torch.manual_seed(0)
        model = make_model(kind, len(tokenizer))
        report = train_demo.train(model, corpus, tokenizer, options.minutes, compiles=False)
        print(f"{kind}: {report}")
        worst = max(worst, print_perplexities(model, held_out))
    return 1 if worst > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
