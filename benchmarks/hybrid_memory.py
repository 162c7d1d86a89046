"""The memory of 64 sequences of 4,000 tokens in a hybrid: its states and blocks, beside the sum by hand.

    python -m benchmarks.hybrid_memory

A model with the layers of Bamba and small widths reads 64 prompts of 4,000 tokens in a worker, each with the two
state slots that a sequence with checkpoints or drafts has. By hand, from the configuration alone: keys and values
of the layers that attend, of 16 tokens a block; and for each layer with states a matrix of each head and the last
inputs of the convolution, in float32. Beside it: what `pagewire inspect` expects by the checkpoint's headers, what
the worker says, and by how much its resident memory has grown. Status 1: one of them differs, the last by over 5%.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.limits import processor
from pagewire.kernels.cpu.build import REFERENCE
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.estimate.figures import footprint
from tests.workers.driver import Driver, load_runner

COUNT, LENGTH, BLOCK, VOCABULARY = 64, 4000, 16, 256
HIDDEN, LAYERS, ATTENDING, KV_HEADS, HEAD_DIM = 128, 6, (2, 5), 1, 32
HEADS, SIZE, STATE, TAPS = 8, 32, 32, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "attn_layer_indices": list(ATTENDING),
    "mamba_n_heads": HEADS,
    "mamba_d_head": SIZE,
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FLOAT = 4
"""Bytes of a number of a state, and in float32 of one of a key."""
BLOCK_BYTES = len(ATTENDING) * 2 * KV_HEADS * HEAD_DIM * BLOCK * FLOAT
STATE_BYTES = (
    (LAYERS - len(ATTENDING)) * FLOAT * (HEADS * SIZE * STATE + (HEADS * SIZE + 2 * STATE) * (TAPS - 1))
)
BLOCKS = COUNT * -(-(LENGTH + 1) // BLOCK)
SLOTS = 2 * COUNT
BUDGET = 2048  # tokens of a step


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def grown_bytes(folder: Path) -> tuple[int, int, int]:
    """By how much the memory of a worker grows, and what it says of a block and of a state slot."""
    runner, ready = load_runner(
        folder,
        dtype="float32",
        max_model_len=LENGTH + 64,
        max_num_seqs=COUNT,
        block_size=BLOCK,
        num_blocks=BLOCKS,
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (COUNT, LENGTH), generator=generator).tolist()
    Driver(runner, budget=BUDGET).generate(prompts[:1], 2)  # what steps take beside it
    before = resident_bytes()
    Driver(runner, budget=BUDGET).generate(prompts, 2)
    return resident_bytes() - before, ready.bytes_per_block, ready.bytes_per_state


def main() -> int:
    """Print all of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("bamba", **SIZES)).save_pretrained(folder)
        expected = footprint(read_headers(folder), REFERENCE, "float32")
        grown, block, slot = grown_bytes(folder)
    used = (LENGTH // BLOCK + 1) * BLOCK_BYTES + STATE_BYTES  # was there before
    by_hand = {"blocks": BLOCKS * BLOCK_BYTES, "states": SLOTS * STATE_BYTES}
    by_inspect = {"blocks": BLOCKS * BLOCK * expected.kv_token_bytes, "states": SLOTS * expected.state_bytes}
    by_worker = {"blocks": BLOCKS * block, "states": SLOTS * slot}
    print(f"{processor()}; {COUNT} sequences of {LENGTH:,} tokens, float32")
    for text, sizes in (("by hand", by_hand), ("pagewire inspect", by_inspect), ("the worker", by_worker)):
        print(f"{text:18} blocks {sizes['blocks'] / 1e6:8.2f} MB, states {sizes['states'] / 1e6:8.2f} MB")
    total = sum(by_hand.values()) - used
    print(
        f"resident memory has grown by {grown / 1e6:.1f} MB, {grown / total - 1:+.1%} of what was not used before"
    )
    return int(not by_hand == by_inspect == by_worker or abs(grown / total - 1) > 0.05)


if __name__ == "__main__":
    sys.exit(main())
