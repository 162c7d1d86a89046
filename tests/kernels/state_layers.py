"""Layers with states at small sizes, their random inputs, and batches that cut them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.data.states import StateBatch
from pagewire.kernels.reference.states import StateKernels

Run = Callable[[StateKernels, list[Tensor], Tensor, StateBatch], Tensor]


@dataclass(frozen=True)
class StateLayer:
    """A kernel with the weights of a layer; `run` gets the inputs of the tokens."""

    name: str
    state: tuple[int, ...]
    """The shape of a slot."""
    inputs: list[Tensor]
    """[T, ...] each, of all tokens."""
    run: Run


def state_layers(tokens: int, dtype: torch.dtype) -> list[StateLayer]:
    """Every kernel, in sizes with full strips and with odd ends."""
    torch.manual_seed(0)
    layers: list[StateLayer] = []
    for heads, dim, values in ((1, 128, 128), (2, 24, 70), (4, 5, 17)):
        layers += [_delta_rule(tokens, dtype, heads, dim, values, by_row=by_row) for by_row in (False, True)]
        layers += [_state_space(tokens, dtype, heads, dim, values, skips=dim != 5)]
    for channels in (16, 100, 300):
        layers.append(_selective_scan(tokens, dtype, channels, 16 if channels != 100 else 5))
        layers.append(_recurrence(tokens, dtype, channels))
    for channels, taps, silu in ((16, 4, True), (300, 3, False), (100, 2, True)):
        layers.append(_convolution(tokens, dtype, channels, taps, silu))
    return layers


def _delta_rule(
    tokens: int, dtype: torch.dtype, heads: int, dim: int, values: int, *, by_row: bool
) -> StateLayer:
    q, k = torch.randn(2, tokens, heads, dim).to(dtype)
    v = torch.randn(tokens, 2 * heads, values).to(dtype)
    decay = -torch.rand(tokens, 2 * heads, dim)
    beta = 2 * torch.rand(tokens, 2 * heads)
    name = f"delta rule of {heads} x {dim} x {values}{' by row' if by_row else ''}"

    def run(kernels: StateKernels, inputs: list[Tensor], state: Tensor, batch: StateBatch) -> Tensor:
        return kernels.gated_delta_rule(*inputs, state, batch, scale=dim**-0.5, norm_eps=1e-6)

    inputs = [q, k, v, decay if by_row else decay[..., 0], beta]
    return StateLayer(name, (2 * heads, dim, values), inputs, run)


def _state_space(
    tokens: int, dtype: torch.dtype, groups: int, dim: int, values: int, *, skips: bool
) -> StateLayer:
    heads = 2 * groups
    a, d = -2 * torch.rand(heads), torch.randn(heads)
    inputs = [torch.randn(tokens, heads, values).to(dtype), torch.rand(tokens, heads)]
    inputs += list(torch.randn(2, tokens, groups, dim).to(dtype))

    def run(kernels: StateKernels, inputs: list[Tensor], state: Tensor, batch: StateBatch) -> Tensor:
        x, dt, b, c = inputs
        return kernels.state_space(x, dt, a, b, c, d if skips else None, state, batch)

    return StateLayer(f"state space of {groups} x {dim} x {values}", (heads, dim, values), inputs, run)


def _selective_scan(tokens: int, dtype: torch.dtype, channels: int, dim: int) -> StateLayer:
    a, d = -4 * torch.rand(channels, dim).T, torch.randn(channels)
    inputs = [torch.randn(tokens, channels).to(dtype), torch.rand(tokens, channels)]
    inputs += list(torch.randn(2, tokens, dim).to(dtype))

    def run(kernels: StateKernels, inputs: list[Tensor], state: Tensor, batch: StateBatch) -> Tensor:
        x, dt, b, c = inputs
        return kernels.selective_scan(x, dt, a, b, c, None if channels == 16 else d, state, batch)

    return StateLayer(f"scan of {channels}", (dim, channels), inputs, run)


def _convolution(tokens: int, dtype: torch.dtype, channels: int, taps: int, silu: bool) -> StateLayer:
    weight, bias = torch.randn(taps, 2 * channels).to(dtype)[:, :channels], torch.randn(channels).to(dtype)

    def run(kernels: StateKernels, inputs: list[Tensor], state: Tensor, batch: StateBatch) -> Tensor:
        return kernels.causal_conv(*inputs, weight, bias if silu else None, state, batch, silu=silu)

    inputs = [torch.randn(tokens, channels).to(dtype)]
    return StateLayer(f"convolution of {channels} by {taps}", (taps - 1, channels), inputs, run)


def _recurrence(tokens: int, dtype: torch.dtype, channels: int) -> StateLayer:
    def run(kernels: StateKernels, inputs: list[Tensor], state: Tensor, batch: StateBatch) -> Tensor:
        return kernels.linear_recurrence(*inputs, state, batch)

    inputs = [torch.randn(tokens, channels).to(dtype), torch.rand(tokens, channels).to(dtype)]
    return StateLayer(f"recurrence of {channels}", (channels,), inputs, run)


def state_batch(rows: list[list[tuple[int, int, int, int]]]) -> StateBatch:
    """A batch of rows, each a list of spans."""
    starts = torch.tensor([0] + [len(spans) for spans in rows]).cumsum(0)
    spans = torch.tensor([span for spans in rows for span in spans], dtype=torch.int32).view(-1, 4)
    return StateBatch(starts.to(torch.int32), spans)
