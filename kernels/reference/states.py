"""The kernels of recurrent layers in plain PyTorch, one token at a time, and what each computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.data.mixers import OutputGate
from pagewire.kernels.data.states import StateBatch


class StateKernels:
    """The kernels of layers whose memory of earlier tokens is a state of fixed size.

    States are float32 tensors [S, ...] for S slots, updated in place; slots may lie apart, the rest is contiguous.
    Other tensors have a dtype of the model unless a method says otherwise, and may be views as long as all axes but
    the first are contiguous. Arithmetic is float32 and strictly token by token, so a token's bits depend on the
    tokens before it alone: not on the batch, the spans or the threads.

    All methods raise ValueError if shapes disagree, or if the batch points outside its tensors.
    """

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        """The convolution of each channel with its last K inputs, as a `Conv1d` with groups and causal padding.

        Args:
            x: [T, C].
            weight: [K, C], the newest input's taps last: the transpose of `conv1d.weight.squeeze(1)`.
            bias: [C].
            state: [S, K - 1, C], the inputs before a token, the newest last.
            silu: apply SiLU to the sum, which is rounded to x's dtype before it.

        Returns:
            [T, C] in x's dtype.
        """
        out = torch.zeros_like(x)
        taps = weight.to(state.dtype)
        for token, slot, memory in _steps(state, batch):
            window = torch.cat([memory, x[token, None].to(state.dtype)])
            total = (window * taps).sum(0)
            out[token] = total if bias is None else total + bias
            slot.copy_(window[1:])
        return elementwise(functional.silu, out) if silu else out

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
        """Linear attention that replaces what a key stands for: gated delta nets, and Kimi's delta attention.

        For each value head `state *= exp(decay)`, `state += k (v - k state) beta`, and the result is `q state`.

        Args:
            q: [T, Hk, Dk]. Head h of the values has the queries and keys of head `h * Hk // Hv`.
            k: [T, Hk, Dk].
            v: [T, Hv, Dv].
            decay: float32 [T, Hv], or [T, Hv, Dk] for each row of the state: logarithms, at most 0.
            beta: [T, Hv], of any dtype.
            state: [S, Hv, Dk, Dv].
            scale: factor of the queries, usually Dk ** -0.5.
            norm_eps: divide queries and keys by `sqrt(sum(x * x) + norm_eps)` first; None: take them as they are.

        Returns:
            [T, Hv, Dv] in v's dtype.
        """
        out = torch.zeros_like(v)
        repeats = v.shape[1] // q.shape[1]
        for token, slot, memory in _steps(state, batch):
            query, key = (x[token].to(state.dtype) for x in (q, k))
            if norm_eps is not None:
                query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + norm_eps) for x in (query, key))
            query, key = (x.repeat_interleave(repeats, 0)[..., None] for x in (query * scale, key))
            kept = memory * elementwise(torch.exp, decay[token].view(len(memory), -1, 1))
            change = (v[token].to(state.dtype) - (kept * key).sum(-2)) * beta[token, :, None]
            slot.copy_(kept + key * change[:, None])
            out[token] = (slot * query).sum(-2)
        return out

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
        """The state space of Mamba 2, one decay per head and token. With `dt` of ones also lightning attention.

        For each head `state = state * exp(dt a) + (dt b) x`, and the result is `c state + d x`.

        Args:
            x: [T, H, P]; of lightning attention the values.
            dt: float32 [T, H], after bias, softplus and limits.
            a: float32 [H], below 0; of lightning attention `-slope`.
            b: [T, G, N]. Head h takes group `h * G // H`; of lightning attention the keys.
            c: [T, G, N], likewise; of lightning attention the queries.
            d: float32 [H].
            state: [S, H, N, P].

        Returns:
            [T, H, P] in x's dtype.
        """
        out = torch.zeros_like(x)
        repeats = x.shape[1] // b.shape[1]
        for token, slot, memory in _steps(state, batch):
            values, writes, reads = (tensor[token].to(state.dtype) for tensor in (x, b, c))
            writes, reads = (rows.repeat_interleave(repeats, 0)[..., None] for rows in (writes, reads))
            step = dt[token, :, None, None]
            kept = memory * elementwise(torch.exp, step * a[:, None, None])
            slot.copy_(kept + step * writes * values[:, None])
            total = (slot * reads).sum(-2)
            out[token] = total if d is None else total + values * d[:, None]
        return out

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
        """The state space of Mamba 1, where each channel has decays of its own.

        For each channel `state = state * exp(dt a) + (dt x) b`, and the result is `c state + d x`.

        Args:
            x: [T, C].
            dt: float32 [T, C], after bias and softplus.
            a: float32 [N, C], below 0: the transpose of `-exp(A_log)`.
            b: [T, N].
            c: [T, N].
            d: float32 [C].
            state: [S, N, C].

        Returns:
            [T, C] in x's dtype.
        """
        out = torch.zeros_like(x)
        for token, slot, memory in _steps(state, batch):
            values, writes, reads = (tensor[token].to(state.dtype) for tensor in (x, b, c))
            kept = memory * elementwise(torch.exp, dt[token] * a)
            slot.copy_(kept + (dt[token] * values) * writes[:, None])
            total = (slot * reads[:, None]).sum(0)
            out[token] = total if d is None else total + values * d
        return out

    def linear_recurrence(self, x: Tensor, decay: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        """`state = decay * state + x` of each channel, as in RG-LRU; the result is the state.

        Args:
            x: [T, C].
            decay: [T, C], factors.
            state: [S, C].

        Returns:
            [T, C] in x's dtype.
        """
        out = torch.zeros_like(x)
        for token, slot, memory in _steps(state, batch):
            slot.copy_(decay[token] * memory + x[token])
            out[token] = slot
        return out

    def step_sizes(
        self,
        x: Tensor,
        bias: Tensor | None,
        factor: Tensor | None,
        least: float = 0.0,
        most: float = float("inf"),
    ) -> Tensor:
        """`softplus(x + bias)`, from `least` to `most`, times `factor`.

        Args:
            x: [T, N].
            bias: float32 [N]; None: 0.
            factor: float32 [N]; None: 1.

        Returns:
            float32 [T, N], contiguous.
        """
        full = x.float() if bias is None else x.float() + bias
        steps = elementwise(functional.softplus, full).clamp(least, most)
        return steps if factor is None else steps * factor

    def rates(self, x: Tensor, most: float) -> Tensor:
        """`most` times the sigmoid of x [T, N], float32 and contiguous."""
        return elementwise(torch.sigmoid, x.float()) * most

    def open_by(self, x: Tensor, gates: Tensor, form: OutputGate) -> Tensor:
        """`activation(gates) * x` of groups of D numbers each, which are normed before or after, if at all.

        All is computed in float32; what a norm gives is rounded before and after it is multiplied by the weight.

        Args:
            x: [T, G D].
            gates: [T, G D], or [T, G, D] where the groups lie apart; D contiguous. Single ones: [T, G].
            form: the activation, and the norm.

        Returns:
            [T, G D] in x's dtype.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        opened = gates.reshape(len(x), -1, 1 if form.single else form.group).to(dtype)
        opened = elementwise(torch.sigmoid if form.sigmoid else functional.silu, opened)
        full = x.reshape(*opened.shape[:2], form.group).to(dtype)
        if form.weight is None:
            return (full * opened).to(x.dtype).flatten(1)
        full = full * opened if form.first else full
        normed = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + form.eps)
        normed = (normed.to(x.dtype) * form.weight.view(-1, form.group)).to(x.dtype)
        return (normed if form.first else (normed.to(dtype) * opened).to(x.dtype)).flatten(1)


def _steps(state: Tensor, batch: StateBatch) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every token in its turn, the slot that gets its state, and the state before it."""
    for begin, end, read, written in batch.spans[: int(batch.row_starts[-1])].tolist():
        slot = state[written]
        slot.copy_(state[read] if read >= 0 else torch.zeros_like(slot))
        for token in range(begin, end):
            yield token, slot, slot.clone()
