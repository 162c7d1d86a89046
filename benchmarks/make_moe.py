"""A random model with experts, shaped like a Qwen3-MoE of about 1B weights, for figures.

    python -m benchmarks.make_moe OUT --tokenizer MODEL

MODEL is a folder whose tokenizer is copied. A token gets 2 of 16 experts, unless `hf_overrides` say otherwise.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, VOCAB_SIZE = (
    1024,
    1024,
    16,
    16,
    16,
    4,
    64,
    32000,
)
GAIN, ROUTER_GAIN = 0.6, 6.0
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor."""
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN)
    yield "lm_head.weight", (VOCAB_SIZE, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (HIDDEN,)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (heads * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", (HEAD_DIM,)
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate_proj", (INTERMEDIATE, HIDDEN)),
                ("up_proj", (INTERMEDIATE, HIDDEN)),
                ("down_proj", (HIDDEN, INTERMEDIATE)),
            ):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", shape


def tensors() -> Iterator[tuple[str, Tensor]]:
    """Every tensor: norms of ones, and random matrices of which no layer outweighs the embedding.

    Logits of routers are far apart, as in trained models: else rounding sends most tokens to other experts, and the
    proof at load refuses the model.
    """
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes():
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
        else:
            gain = ROUTER_GAIN if name.endswith("mlp.gate.weight") else GAIN
            matrix = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            yield name, (matrix if "embed" in name else gain * matrix).bfloat16()


def main() -> None:
    """Write the model, and print its size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.tokenizer / name, args.out / name)
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2))
    held = dict(tensors())
    save_file(held, args.out / "model.safetensors", {"format": "pt"})
    print(f"{args.out}: {sum(tensor.numel() for tensor in held.values()) / 1e9:.2f}B weights")


if __name__ == "__main__":
    main()
