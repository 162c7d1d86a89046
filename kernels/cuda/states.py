"""Layers with states: see `StateKernels`. One launch each, whose grid depends on the number of rows alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.states import (
    StateBatch,
    check_shared,
    check_states,
    factors,
    token_rows,
)
from pagewire.kernels.reference.states import StateKernels

SOURCE = "states.cu"
THREADS, WARPS, COLUMNS = 128, 4, 32
"""Threads of a block, and columns of a matrix that it computes. As in states.cu."""
MATRIX_ROWS = (4, 16, 32, 64)
"""Rows of a matrix in a thread's registers: for matrices of up to 16, 64, 128 and 256 rows."""
SCAN_ROWS = (16, 64)
"""Numbers in the state of a channel, in registers."""
TAPS = (2, 3, 4, 5, 6, 7, 8)
FLOAT = {torch.float32: "float"}
OF_FLOATS = ("StateSpace", "CausalConv")
"""Kernels that have this dtype, too, whatever that of the model: families with Mamba 2 compute all that enters a
state space in it, and Ling 2.5 its convolutions."""


@functools.cache
def variant(kernel: str, dtype: torch.dtype, size: int | None = None) -> Variant:
    """A kernel by the name of its parameters, such as "GatedDeltaRule". size: its second template argument."""
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in kernel).removeprefix("_")
    element = (DTYPES | FLOAT)[dtype]
    arguments = element if size is None else f"{element}, {size}"
    return Variant(SOURCE, f"{name}<{arguments}>", kernel)


SIZES: dict[str, tuple[int | None, ...]] = {
    "GatedDeltaRule": MATRIX_ROWS,
    "StateSpace": MATRIX_ROWS,
    "SelectiveScan": SCAN_ROWS,
    "CausalConv": TAPS,
    "LinearRecurrence": (None,),
}


def variants(*dtypes: torch.dtype) -> list[Variant]:
    """Every kernel in every size, for each dtype, by default for all; and those of `OF_FLOATS`."""
    return [
        variant(kernel, dtype, size)
        for dtype in (*(dtypes or DTYPES), *FLOAT)
        for kernel, sizes in SIZES.items()
        for size in sizes
        if dtype in DTYPES or kernel in OF_FLOATS
    ]


class CudaStateKernels(StateKernels):
    """The kernels of one GPU. PyTorch computes what has none. What a batch points to is not checked."""

    def __init__(self, launcher: KernelLauncher) -> None:
        self._launcher = launcher

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        (_, channels), taps = x.shape, len(weight)
        if taps not in TAPS:
            return super().causal_conv(x, weight, bias, state, batch, silu=silu)
        x = token_rows(x, x.dtype, *x.shape)
        weight = token_rows(weight, x.dtype, taps, channels).contiguous()
        fields = {
            "x": x,
            "weight": weight,
            "bias": None if bias is None else token_rows(bias, x.dtype, channels).contiguous(),
            "x_stride": x.stride(0),
            "channels": channels,
            "silu": silu,
        }
        kernel = variant("CausalConv", x.dtype, taps)
        return self._launch(kernel, -(-channels // THREADS), x, state, (taps - 1, channels), batch, fields)

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        batch: StateBatch,
        *,
        scale: float,
        norm_eps: float | None = None,
    ) -> Tensor:
        (tokens, value_heads, value_dim), (_, key_heads, key_dim) = v.shape, q.shape
        check_shared(key_heads, value_heads)
        if (rows := _matrix_rows(key_dim)) is None or v.dtype not in DTYPES:
            return super().gated_delta_rule(
                q, k, v, decay, beta, state, batch, scale=scale, norm_eps=norm_eps
            )
        v = token_rows(v, v.dtype, *v.shape)
        q, k = (token_rows(x, v.dtype, tokens, key_heads, key_dim) for x in (q, k))
        fields = {
            "q": q,
            "k": k,
            "v": v,
            "decay": factors(decay, *(tokens, value_heads, key_dim)[: decay.dim()]),
            "beta": factors(beta, tokens, value_heads),
            "q_stride": q.stride(0),
            "k_stride": k.stride(0),
            "v_stride": v.stride(0),
            "key_heads": key_heads,
            "key_dim": key_dim,
            "value_heads": value_heads,
            "value_dim": value_dim,
            "decays": key_dim if decay.dim() == 3 else 1,
            "normed": norm_eps is not None,
            "scale": scale,
            "norm_eps": norm_eps or 0.0,
        }
        kernel, blocks = variant("GatedDeltaRule", v.dtype, rows), value_heads * -(-value_dim // COLUMNS)
        return self._launch(kernel, blocks, v, state, (value_heads, key_dim, value_dim), batch, fields)

    def state_space(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        batch: StateBatch,
    ) -> Tensor:
        (tokens, heads, head_dim), (_, groups, state_dim) = x.shape, b.shape
        check_shared(groups, heads)
        if (rows := _matrix_rows(state_dim)) is None:
            return super().state_space(x, dt, a, b, c, d, state, batch)
        x = token_rows(x, x.dtype, *x.shape)
        b, c = (token_rows(tensor, x.dtype, tokens, groups, state_dim) for tensor in (b, c))
        fields = {
            "x": x,
            "dt": factors(dt, tokens, heads),
            "a": factors(a, heads),
            "b": b,
            "c": c,
            "d": None if d is None else factors(d, heads),
            "x_stride": x.stride(0),
            "b_stride": b.stride(0),
            "c_stride": c.stride(0),
            "heads": heads,
            "head_dim": head_dim,
            "groups": groups,
            "state_dim": state_dim,
        }
        kernel, blocks = variant("StateSpace", x.dtype, rows), heads * -(-head_dim // COLUMNS)
        return self._launch(kernel, blocks, x, state, (heads, state_dim, head_dim), batch, fields)

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        batch: StateBatch,
    ) -> Tensor:
        (tokens, channels), state_dim = x.shape, len(a)
        rows = next((rows for rows in SCAN_ROWS if state_dim <= rows), None)
        if rows is None or x.dtype not in DTYPES:
            return super().selective_scan(x, dt, a, b, c, d, state, batch)
        x = token_rows(x, x.dtype, *x.shape)
        b, c = (token_rows(tensor, x.dtype, tokens, state_dim) for tensor in (b, c))
        fields = {
            "x": x,
            "dt": factors(dt, tokens, channels),
            "a": factors(a, state_dim, channels),
            "b": b,
            "c": c,
            "d": None if d is None else factors(d, channels),
            "x_stride": x.stride(0),
            "b_stride": b.stride(0),
            "c_stride": c.stride(0),
            "channels": channels,
            "state_dim": state_dim,
        }
        kernel = variant("SelectiveScan", x.dtype, rows)
        return self._launch(kernel, -(-channels // THREADS), x, state, (state_dim, channels), batch, fields)

    def linear_recurrence(self, x: Tensor, decay: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        if x.dtype not in DTYPES:
            return super().linear_recurrence(x, decay, state, batch)
        _, channels = x.shape
        x, decay = (token_rows(tensor, x.dtype, *x.shape) for tensor in (x, decay))
        strides = {"x_stride": x.stride(0), "decay_stride": decay.stride(0)}
        fields = {"x": x, "decay": decay, "channels": channels, **strides}
        kernel = variant("LinearRecurrence", x.dtype)
        return self._launch(kernel, -(-channels // THREADS), x, state, (channels,), batch, fields)

    def _launch(
        self,
        kernel: Variant,
        blocks: int,
        like: Tensor,
        state: Tensor,
        shape: tuple[int, ...],
        batch: StateBatch,
        fields: dict[str, Any],
    ) -> Tensor:
        """Run a kernel for all rows. Its result has the shape of `like`, and zeros where no span has the token."""
        check_states(state, shape, batch)
        out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if blocks and len(batch.row_starts) > 1:
            parameters = pack(
                kernel,
                state=state,
                row_starts=batch.row_starts.contiguous(),
                spans=batch.spans.contiguous(),
                slot_stride=state.stride(0),
                out=out,
                **fields,
            )
            self._launcher.launch(kernel, (blocks, len(batch.row_starts) - 1), (THREADS,), parameters)
        return out


def _matrix_rows(size: int) -> int | None:
    """Rows of a thread for matrices of this many; None: they have no kernel."""
    return next((rows for rows in MATRIX_ROWS if size <= WARPS * rows), None)
