"""What a machine can do at most, and what that means for a work: a floor under every engine's time.

A step reads all weights once (or multiplies with them, where that takes longer) and the keys and values of all
its requests; the prompt is multiplied at the matrix rate. No engine that computes in bfloat16 can be faster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagewire.kernels import linear, reference

REPEATS = 7
SIZE = 4096


@dataclass(frozen=True)
class Limits:
    """Bytes per second read by all cores, and bf16 floating-point operations per second of large products."""

    read_bytes_per_s: float
    flop_per_s: float

    def best(self, other: Limits) -> Limits:
        """The higher of both."""
        return Limits(
            max(self.read_bytes_per_s, other.read_bytes_per_s), max(self.flop_per_s, other.flop_per_s)
        )


def best_seconds(work: Callable[[], object]) -> float:
    """The fastest of several runs, after a warm-up."""
    work()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure_limits() -> Limits:
    """Measured on all cores that this process may use: what the best of our products and oneDNN's can do."""
    source = torch.empty(1 << 28, dtype=torch.float32).uniform_()
    read = source.nbytes / best_seconds(source.sum)
    rates = []
    for make in (linear.pack, reference.pack):
        products = [make(torch.randn(SIZE, SIZE).bfloat16()) for _ in range(16)]
        row, rows = torch.randn(2, SIZE).bfloat16(), torch.randn(1024, SIZE).bfloat16()
        stream = best_seconds(lambda: [product(row) for product in products])  # noqa: B023 - called at once
        read = max(read, len(products) * SIZE * SIZE * 2 / stream)
        rates.append(2 * len(rows) * SIZE * SIZE / best_seconds(lambda: products[0](rows)))  # noqa: B023
    return Limits(read, max(rates))


def floor_seconds(limits: Limits, model: Path, count: int, num_in: int, num_out: int, shared: int) -> float:
    """The least time for `count` prompts of `num_in` tokens (`shared` of them computed once), `num_out` each."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * head_dim * 2 * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
    body, head = layers * layer, hidden * config["vocab_size"]
    kv_bytes = 2 * layers * kv_heads * head_dim * 2

    def step(rows: int) -> float:
        """The weights are streamed or multiplied, whichever takes longer."""
        streamed = 2 * (body + head) / limits.read_bytes_per_s
        return max(streamed, 2 * rows * (body + head) / limits.flop_per_s)

    prompt_tokens = shared + count * (num_in - shared)
    attention = 2 * layers * heads * head_dim * 2 * count * (num_in - shared) * (num_in + shared) / 2
    attention += 2 * layers * heads * head_dim * 2 * shared * shared / 2
    flop = 2 * (prompt_tokens * body + count * head) + attention
    seconds = max(flop / limits.flop_per_s, 2 * (body + head) / limits.read_bytes_per_s)
    for done in range(num_in, num_in + num_out - 1):
        seconds += step(count) + count * (done + 1) * kv_bytes / limits.read_bytes_per_s
    return seconds
