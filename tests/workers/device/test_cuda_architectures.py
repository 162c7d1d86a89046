"""Every architecture on a device with our kernels: recorded steps in bfloat16 beside PyTorch in float32.

A model that waits for the device has no recorded steps, and is compared as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.errors import LoadError
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import LLAMA4, SERVED, VOCAB_SIZE, Architecture
from tests.workers.device.conftest import HEADS
from tests.workers.driver import Driver, values
from tests.workers.parity import make_prompts, transformers_tokens

LATENTS = {
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 32,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
}
INDEXED = LATENTS | {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "index_head_dim": 64}
"""Latents that have a kernel, since keys are chosen among those alone."""
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"hidden_size": 128},
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "dots3_note_text": INDEXED | {"head_dim": 48, "swa_head_dim": 32},
    "falcon": {"num_attention_heads": 2},
    "falcon with ALiBi": {"num_attention_heads": 2},
    "falcon with groups": {"num_attention_heads": 2},
    "mamba2": {},
    "mpt": {"hidden_size": 64, "num_attention_heads": 2},
} | dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), INDEXED)
"""Fields that give heads with a kernel, where neither `HEADS` do nor those of latents."""
REFUSED = {
    "doge": "no kernel for heads of 33",
}
LOOSE = {"falcon_mamba": 0.3, "mamba": 0.2, "olmoe": 0.15} | dict.fromkeys(
    ("axk2", "bailing_hybrid", "kimi_linear", "minicpm3", "phimoe", "qwen2_moe", "qwen3_next"), 0.1
)
"""Differences that are permitted where rounding makes a router or indexer choose others, or layers magnify it."""
PARAMS = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)


def with_kernels(architecture: Architecture) -> Architecture:
    """An architecture with heads that have a kernel."""
    name, fields = architecture.name, architecture.fields
    own = OWN.get(name, LATENTS if "kv_lora_rank" in fields else HEADS)
    return Architecture(name, fields | own, model_type=architecture.model_type)


@pytest.mark.every_architecture
@pytest.mark.parametrize("name", SERVED)
def test_every_architecture(name: str, tmp_path: Path, load: Callable[..., Runner]) -> None:
    # Decays of MiniMax disagree with each other once they are rounded to the 16 bits of a file.
    dtype = None if name == "minimax" else "bfloat16"
    folder = with_kernels(SERVED[name]).write(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    if name in REFUSED:
        with pytest.raises(LoadError, match=REFUSED[name]):
            load(folder, dtype="bfloat16")
        return
    wide = logprobs(load(folder, dtype="float32"), 16)
    kernels = load(folder, dtype="bfloat16", max_num_batched_tokens=64)
    for budget in (16, 2):
        assert np.abs(wide - logprobs(kernels, budget)).mean() < LOOSE.get(name, 0.05)


def test_chunks_of_keys(tmp_path: Path, load: Callable[..., Runner]) -> None:
    """Over several chunks of 7 keys: in float32 the tokens of transformers, by kernels nearly so."""
    folder = Architecture("llama4_text", LLAMA4 | HEADS).write(tmp_path, dtype="bfloat16")
    wide, prompts = load(folder, dtype="float32"), make_prompts(VOCAB_SIZE, (9, 30))
    assert Driver(wide).generate(prompts, 8) == transformers_tokens(folder, prompts, 8)
    kernels = load(folder, dtype="bfloat16", max_num_batched_tokens=64)
    for budget in (64, 2):
        assert np.abs(logprobs(wide, 16, (40, 9)) - logprobs(kernels, budget, (40, 9))).mean() < 0.05


def logprobs(runner: Runner, budget: int, lengths: tuple[int, ...] = (9, 9)) -> NDArray[np.float32]:
    """Of the tokens of prompts. budget: tokens of a step; 2: prompts come token by token, as outputs do."""
    requests = Driver(runner, budget).run(make_prompts(VOCAB_SIZE, lengths), 2, PARAMS)
    return np.concatenate([values(part)[1] for request in requests for part in request.prompt_logprobs])
