"""Models from GGUF files, written as llama.cpp's converter would: the same tokens as of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.ipc.gguf.file import BLOCKS

from ..architectures import EXPERTS, GPT2_SIZES, GROUPED, VOCAB_SIZE, WINDOWED, Architecture
from ..gguf_files import write_gguf
from ..parity import make_prompts, our_tokens, transformers_tokens

gguf = pytest.importorskip("gguf")

PROMPTS = make_prompts(VOCAB_SIZE)
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}

# llama.cpp's name, the model in transformers, and what its configuration does not say in COMMON.
MODELS: list[tuple[str, Architecture, dict[str, Any]]] = [
    ("llama", Architecture("llama", GROUPED), {}),
    (
        "llama",
        Architecture(
            "llama with biases",
            GROUPED | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            model_type="llama",
        ),
        {},
    ),
    ("llama", Architecture("mixtral", GROUPED | {"num_local_experts": 4}), {}),
    ("qwen2", Architecture("qwen2", GROUPED), {}),
    ("qwen3", Architecture("qwen3", GROUPED), {}),
    ("qwen2moe", Architecture("qwen2_moe", GROUPED | SHARED_EXPERT), {}),
    ("qwen3moe", Architecture("qwen3_moe", GROUPED | EXPERTS | {"norm_topk_prob": True}), {}),
    ("gemma", Architecture("gemma", GROUPED), {}),
    ("gemma2", Architecture("gemma2", GROUPED | {"sliding_window": 7, "query_pre_attn_scalar": 16}), {}),
    (
        "gemma3",
        Architecture(
            "gemma3_text",
            GROUPED | {"sliding_window": 7, "layer_types": WINDOWED, "query_pre_attn_scalar": 16},
        ),
        {"attention.sliding_window_pattern": 2},
    ),
    ("phi3", Architecture("phi3", GROUPED | {"sliding_window": 7}), {"rope.dimension_count": 16}),
    (
        "starcoder2",
        Architecture("starcoder2", GROUPED | {"sliding_window": 7, "norm_epsilon": 1e-5}),
        {"attention.layer_norm_epsilon": 1e-5},
    ),
    (
        "stablelm",
        Architecture("stablelm", GROUPED | {"use_qkv_bias": True}),
        {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    (
        "gpt2",
        Architecture("gpt2", GPT2_SIZES),
        {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 256},
    ),
]


@pytest.mark.parametrize(("arch", "model", "fields"), MODELS, ids=[model.name for _, model, _ in MODELS])
def test_tokens_are_those_of_the_checkpoint(
    arch: str, model: Architecture, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = model.write(tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "model.gguf", folder, model.config(), arch, fields=fields)
    assert our_tokens(path, PROMPTS) == transformers_tokens(folder, PROMPTS)
