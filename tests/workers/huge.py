"""A checkpoint that no machine can load: its header is whole, its weights are a hole in the file."""

from __future__ import annotations

import json
from pathlib import Path

HIDDEN, LAYERS = 1 << 16, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}


def write_huge(folder: Path) -> Path:
    """Write it into `folder`: 192 matrices of 8 GiB each take no room on the disk."""
    tensors: dict[str, object] = {}
    end = 0
    names = [f"layers.{layer}.mlp.{name}_proj" for layer in range(LAYERS) for name in ("gate", "up", "down")]
    for name in ("embed_tokens", *names):
        rows = 32 if name == "embed_tokens" else HIDDEN
        size = 2 * rows * HIDDEN
        shape = {"shape": [rows, HIDDEN], "dtype": "BF16", "data_offsets": [end, end + size]}
        tensors[f"model.{name}.weight"] = shape
        end += size
    header = json.dumps(tensors).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
