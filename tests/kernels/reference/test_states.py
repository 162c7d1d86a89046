"""The reference of layers with states against the functions of transformers that they replace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from pagewire.kernels import ops
from tests.kernels.state_layers import state_batch

TOKENS, KEYS, VALUES = 20, 16, 24
BATCH = state_batch([[(0, 7, -1, 2), (7, 8, 2, 0), (8, TOKENS, 0, 1)]])
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def slots(*shape: int) -> Tensor:
    return torch.full((3, *shape), torch.nan, dtype=torch.float64)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "by_row"),
    [(torch_recurrent_gated_delta_rule, False), (recurrent_kimi_delta_attention, True)],
)
def test_delta_rule(function: Callable[..., tuple[Tensor, Tensor]], by_row: bool) -> None:
    """In float32, in which transformers computes whatever it gets."""
    q, k = numbers(2, TOKENS, 2, KEYS).float()
    v, beta = numbers(TOKENS, 4, VALUES).float(), 2 * torch.rand(TOKENS, 4)
    decay = -torch.rand(TOKENS, 4, KEYS) if by_row else -torch.rand(TOKENS, 4)
    state = slots(4, KEYS, VALUES).float()
    out = ops.gated_delta_rule(q, k, v, decay, beta, state, BATCH, scale=KEYS**-0.5, norm_eps=1e-6)
    repeated = (x.repeat_interleave(2, 1)[None] for x in (q, k))
    expected, final = function(*repeated, v[None], decay[None], beta[None], None, True, True)
    close(out, expected[0], rtol=1e-5, atol=1e-6)
    close(state[1], final[0], rtol=1e-5, atol=1e-6)


def test_state_space() -> None:
    x, dt, a, d = numbers(TOKENS, 4, VALUES), numbers(TOKENS, 4).sigmoid(), -numbers(4).exp(), numbers(4)
    b, c = numbers(2, TOKENS, 2, KEYS)
    state = slots(4, KEYS, VALUES)
    out = ops.state_space(x, dt, a, b, c, d, state, BATCH)
    arguments = [tensor[None].float() for tensor in (b, c)]
    expected, final = mamba2_chunk_scan(
        x[None].float(), dt[None].float(), a.float(), *arguments, 8, D=d.float(), return_final_states=True
    )
    close(out.float(), expected[0], rtol=1e-4, atol=1e-5)
    close(state[1].mT.float(), final[0], rtol=1e-4, atol=1e-5)

    one = state_batch([[(0, 1, 1, 1)]])
    before = state[1:2].mT.clone()
    out = ops.state_space(x[:1], dt[:1], a, b[:1], c[:1], d, state, one)
    per_value = (tensor[..., None].expand(-1, -1, VALUES) for tensor in (dt[:1], d[None]))
    steps, skips = per_value
    rates = a[:, None, None].expand(-1, VALUES, KEYS)
    expected = mamba2_selective_state_update(before, x[:1], steps, rates, b[:1], c[:1], skips)
    close(out, expected, rtol=1e-5, atol=1e-6)
    close(state[1].mT, before[0], rtol=1e-5, atol=1e-6)


def test_state_space_of_lightning_attention() -> None:
    """Minimax's recurrence, token by token."""
    q, k, v = numbers(TOKENS, 4, KEYS), numbers(TOKENS, 4, KEYS), numbers(TOKENS, 4, VALUES)
    slope, total, state = numbers(4).exp(), torch.zeros(4, KEYS, VALUES).double(), slots(4, KEYS, VALUES)
    out = ops.state_space(v, torch.ones(TOKENS, 4).double(), -slope, k, q, None, state, BATCH)
    for token in range(TOKENS):
        total = torch.exp(-slope)[:, None, None] * total + k[token, :, :, None] * v[token, :, None]
        close(out[token], (q[token, :, None] @ total)[:, 0])


def test_selective_scan() -> None:
    x, dt = numbers(TOKENS, VALUES), numbers(TOKENS, VALUES).sigmoid()
    a, d, (b, c) = -numbers(KEYS, VALUES).exp(), numbers(VALUES), numbers(2, TOKENS, KEYS)
    state = slots(KEYS, VALUES)
    out = ops.selective_scan(x, dt, a, b, c, d, state, BATCH)
    x, dt, b, c = (tensor.float().T[None] for tensor in (x, dt, b, c))
    expected, final = mamba_selective_scan(x, dt, a.float().T, b, c, D=d.float(), return_last_state=True)
    close(out.T.float(), expected[0], rtol=1e-4, atol=1e-5)
    close(state[1].T.float(), final[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("silu", [False, True])
def test_causal_conv(silu: bool) -> None:
    x, weight, bias = numbers(TOKENS, VALUES), numbers(VALUES, 4), numbers(VALUES)
    state = slots(3, VALUES)
    out = ops.causal_conv(x, weight.T, bias, state, BATCH, silu=silu)
    expected = functional.conv1d(x.T[None], weight[:, None], bias, padding=3, groups=VALUES)[0, :, :TOKENS]
    close(out.T, functional.silu(expected) if silu else expected)
    assert torch.equal(state[1], x[-3:])


def test_linear_recurrence() -> None:
    x, decay, state = numbers(TOKENS, VALUES), numbers(TOKENS, VALUES).sigmoid(), slots(VALUES)
    out = ops.linear_recurrence(x, decay, state, BATCH)
    h = torch.zeros(VALUES).double()
    for token in range(TOKENS):
        h = decay[token] * h + x[token]
        close(out[token], h)
    close(state[1], h)


def test_padding_is_zero_and_other_slots_are_left_alone() -> None:
    x, state = numbers(TOKENS, VALUES), slots(VALUES)
    batch = state_batch([[(0, 4, -1, 2)], [(4, 5, 1, 1)]])
    state[1] = 1.0
    out = ops.linear_recurrence(x, torch.ones_like(x), state, batch)
    assert (out[5:] == 0).all() and state[0].isnan().all()
    close(state[1], x[4] + 1)
    close(state[2], x[:4].sum(0))
