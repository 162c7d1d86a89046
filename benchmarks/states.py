"""Times the CPU kernels of layers with states beside the machine's limits, and beside transformers' functions.

    python -m benchmarks.states

A share "of floor" is the least time over the time it took: for reading and writing the states of all rows once, or
for the instructions on each element of a state and token (multiplications, and fused additions), whichever is
longer. States rotate between calls, so that they come from memory. transformers has the states of one layer, which
may stay in a cache.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from benchmarks.kernels_cpu import fastest
from benchmarks.limits import ROUNDS, probes, processor, seconds
from pagewire.kernels import ops
from pagewire.kernels.data.states import StateBatch

STATE_BYTES = 1 << 28
"""Bytes of states that calls go round."""
SIZES = ((1, 1), (32, 1), (1, 2048))
"""Rows, and tokens of each."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    """A kernel at one size."""

    name: str
    elements: int
    """Of a row's state."""
    instructions: int
    """On each element for a token: multiplications, additions, or both fused."""
    ours: Callable[[Tensor, StateBatch], object]
    """On the states [rows, ...]."""
    slot: tuple[int, ...]
    theirs: Call


def batch_of(rows: int, tokens: int) -> StateBatch:
    """Rows of equal length, each with a slot of its own."""
    spans = [[row * tokens, (row + 1) * tokens, row, row] for row in range(rows)]
    return StateBatch(torch.arange(rows + 1, dtype=torch.int32), torch.tensor(spans, dtype=torch.int32))


def delta_rule(rows: int, tokens: int, dtype: torch.dtype) -> Layer:
    """Of Qwen3-Next: 16 heads of keys, 32 of values."""
    count, key_heads, heads, dim = rows * tokens, 16, 32, 128
    q, k = torch.randn(2, count, key_heads, dim).to(dtype)
    v, decay = torch.randn(count, heads, dim).to(dtype), -torch.rand(count, heads)
    beta, state = torch.rand(count, heads), torch.zeros(rows, heads, dim, dim)
    function = torch_recurrent_gated_delta_rule if tokens == 1 else torch_chunk_gated_delta_rule
    shaped = [x.view(rows, tokens, *x.shape[1:]) for x in (q, k, v, decay, beta)]
    return Layer(
        "gated delta rule, 32 x 128 x 128",
        state[0].numel(),
        4,
        lambda states, batch: ops.gated_delta_rule(
            q, k, v, decay, beta, states, batch, scale=dim**-0.5, norm_eps=1e-6
        ),
        state.shape[1:],
        lambda: (
            function(*shaped, state, True, use_qk_l2norm_in_kernel=True)
            if tokens == 1
            else function(*shaped, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        ),
    )


def state_space(rows: int, tokens: int, dtype: torch.dtype) -> Layer:
    """Of Mamba 2 with 2.7 billion parameters."""
    count, heads, size, dim = rows * tokens, 80, 64, 128
    x, dt = torch.randn(count, heads, size).to(dtype), torch.rand(count, heads)
    a, d, state = -torch.rand(heads), torch.randn(heads), torch.zeros(rows, heads, size, dim)
    b, c = torch.randn(2, count, 1, dim).to(dtype)

    def theirs() -> object:
        if tokens == 1:
            steps, rates = dt[..., None].expand(-1, -1, size), a[:, None, None].expand(-1, size, dim)
            return mamba2_selective_state_update(state, x, steps, rates, b, c, d[:, None].expand(-1, size))
        shaped = [tensor.view(rows, tokens, *tensor.shape[1:]) for tensor in (x, dt, b, c)]
        return mamba2_chunk_scan(
            *shaped[:2], a, *shaped[2:], 256, D=d, initial_states=state, return_final_states=True
        )

    return Layer(
        "state space, 80 x 128 x 64",
        state[0].numel(),
        3,
        lambda states, batch: ops.state_space(x, dt, a, b, c, d, states, batch),
        (heads, dim, size),
        theirs,
    )


def selective_scan(rows: int, tokens: int, dtype: torch.dtype) -> Layer:
    """Of Mamba 1 with 2.8 billion parameters. An exponential is 10 instructions."""
    count, channels, dim = rows * tokens, 5120, 16
    x, dt = torch.randn(count, channels).to(dtype), torch.rand(count, channels)
    a, d, state = -torch.rand(dim, channels), torch.randn(channels), torch.zeros(rows, channels, dim)
    b, c = torch.randn(2, count, dim).to(dtype)

    def theirs() -> object:
        if tokens == 1:
            return mamba_selective_state_update(state, x, dt, a.T, b, c, d)
        shaped = [tensor.view(rows, tokens, -1).mT for tensor in (x, dt, b, c)]
        return mamba_selective_scan(*shaped[:2], a.T, *shaped[2:], D=d, return_last_state=True)

    return Layer(
        "selective scan, 5,120 x 16",
        state[0].numel(),
        14,
        lambda states, batch: ops.selective_scan(x, dt, a, b, c, d, states, batch),
        (dim, channels),
        theirs,
    )


def causal_conv(rows: int, tokens: int, dtype: torch.dtype) -> Layer:
    """Of Qwen3-Next: the queries, keys and values of all heads. A SiLU is 13 instructions, and a division."""
    count, channels, taps = rows * tokens, 8192, 4
    x, weight = torch.randn(count, channels).to(dtype), torch.randn(taps, channels).to(dtype)
    padded = torch.randn(rows, channels, tokens + taps - 1).to(dtype)
    kernel = weight.T[:, None].contiguous()
    return Layer(
        "causal convolution, 8,192 by 4",
        (taps - 1) * channels,
        6,
        lambda states, batch: ops.causal_conv(x, weight, None, states, batch, silu=True),
        (taps - 1, channels),
        lambda: functional.silu(functional.conv1d(padded, kernel, groups=channels)),
    )


@dataclass(frozen=True)
class StateLimits:
    """Bytes per second read and written in place, and fused multiply-adds of float32 per second in registers."""

    change: float
    compute: float

    def measured_again(self) -> StateLimits:
        """The higher of these and those of a new measurement."""
        library, threads, memory = probes(), torch.get_num_threads(), torch.ones(STATE_BYTES // 4)
        changing = seconds(lambda: library.probe_change(memory.data_ptr(), memory.numel(), threads))
        done = library.probe_float(1, threads) * ROUNDS
        computing = seconds(lambda: library.probe_float(ROUNDS, threads))
        return StateLimits(
            max(self.change, 2 * memory.nbytes / changing), max(self.compute, done / computing)
        )


def print_layer(layer: Layer, rows: int, tokens: int, limits: StateLimits, per_measurement: float) -> None:
    """A line for a kernel at one size."""
    batch, moved = batch_of(rows, tokens), 2 * 4 * rows * layer.elements
    copies = min(256, max(1, 2 * STATE_BYTES // moved)) if tokens == 1 else 1
    states = torch.zeros(copies, rows, *layer.slot)
    ours = fastest([functools.partial(layer.ours, own, batch) for own in states], per_measurement)
    theirs = fastest([layer.theirs], per_measurement)
    instructions = layer.instructions * layer.elements * rows * tokens
    floor = max(moved / limits.change, instructions / limits.compute)
    print(
        f"{layer.name:34}{f'{rows} x {tokens:,}':>15}{ours * 1e3:9.3f}{moved / ours / 1e9:8.1f}"
        f"{floor / ours:10.0%}{theirs * 1e3:10.3f}{theirs / ours:8.1f}",
        flush=True,
    )


def main() -> None:
    """Measure the machine, then the kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    torch.set_num_threads(arguments.threads)
    print(f"{processor()}; {arguments.dtype}, {arguments.threads} threads, torch {torch.__version__}")
    limits = StateLimits(0.0, 0.0)
    print(f"\n{'':34}{'rows x tokens':>15}{'ms':>9}{'GB/s':>8}{'of floor':>10}{'torch ms':>10}{'ratio':>8}")
    for make in (delta_rule, state_space, selective_scan, causal_conv):
        for rows, tokens in SIZES:
            limits = limits.measured_again()  # neighbours on the machine may have slowed it before
            print_layer(make(rows, tokens, dtype), rows, tokens, limits, arguments.seconds)
    print(
        f"\nlimits: {limits.change / 1e9:.1f} GB/s read and written, {limits.compute / 1e9:.0f} G float32 fma/s"
    )


if __name__ == "__main__":
    main()
