"""The compiled kernels of recurrent layers: state_matrices.cpp and state_channels.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.states import StateBatch
from pagewire.kernels.reference.states import StateKernels

States = structure("States")
DeltaRuleCall = structure("DeltaRuleCall")
StateSpaceCall = structure("StateSpaceCall")
SelectiveScanCall = structure("SelectiveScanCall")
CausalConvCall = structure("CausalConvCall")
LinearRecurrenceCall = structure("LinearRecurrenceCall")


class CpuStateKernels(StateKernels):
    """The compiled kernels for one instruction set."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        (tokens, channels), taps = x.shape, len(weight)
        x, weight = _rows(x), _like(x, weight, (taps, channels))
        bias = None if bias is None else _like(x, bias, (channels,))
        out = x.new_empty(tokens, channels)
        states, owners = _states(x, state, (taps - 1, channels), batch)
        call = CausalConvCall(
            states=states,
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            channels=channels,
            taps=taps,
            silu=silu,
        )
        _check(self._library.pagewire_causal_conv(ctypes.byref(call)), owners)
        return out

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
        tokens, value_heads, value_dim = v.shape
        _, key_heads, key_dim = q.shape
        _check_groups(key_heads, value_heads)
        q, k, v = _rows(q), _rows(_like(v, k, q.shape)), _rows(v)
        _like(v, q, (tokens, key_heads, key_dim))
        decays = key_dim if decay.dim() == 3 else 1
        decay = _factors(decay, (tokens, value_heads, key_dim)[: decay.dim()])
        beta = _factors(beta, (tokens, value_heads))
        out = v.new_empty(v.shape)
        states, owners = _states(v, state, (value_heads, key_dim, value_dim), batch)
        call = DeltaRuleCall(
            states=states,
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            decay=decay.data_ptr(),
            beta=beta.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            key_heads=key_heads,
            key_dim=key_dim,
            value_heads=value_heads,
            value_dim=value_dim,
            decays=decays,
            scale=scale,
            norm_eps=norm_eps or 0.0,
            normed=norm_eps is not None,
        )
        _check(self._library.pagewire_gated_delta_rule(ctypes.byref(call)), owners)
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
        tokens, heads, head_dim = x.shape
        _, groups, state_dim = b.shape
        _check_groups(groups, heads)
        x, b, c = _rows(x), _rows(_like(x, b, (tokens, groups, state_dim))), _rows(_like(x, c, b.shape))
        dt, a = _factors(dt, (tokens, heads)), _factors(a, (heads,))
        d = None if d is None else _factors(d, (heads,))
        out = x.new_empty(x.shape)
        states, owners = _states(x, state, (heads, state_dim, head_dim), batch)
        call = StateSpaceCall(
            states=states,
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            a=a.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            d=None if d is None else d.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            heads=heads,
            head_dim=head_dim,
            groups=groups,
            state_dim=state_dim,
        )
        _check(self._library.pagewire_state_space(ctypes.byref(call)), owners)
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
        (tokens, channels), state_dim = x.shape, len(a)
        x, b, c = _rows(x), _rows(_like(x, b, (tokens, state_dim))), _rows(_like(x, c, b.shape))
        dt, a = _factors(dt, (tokens, channels)), _factors(a, (state_dim, channels))
        d = None if d is None else _factors(d, (channels,))
        out = x.new_empty(x.shape)
        states, owners = _states(x, state, (state_dim, channels), batch)
        call = SelectiveScanCall(
            states=states,
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            a=a.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            d=None if d is None else d.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            channels=channels,
            state_dim=state_dim,
        )
        _check(self._library.pagewire_selective_scan(ctypes.byref(call)), owners)
        return out

    def linear_recurrence(self, x: Tensor, decay: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        _, channels = x.shape
        x, decay = _rows(x), _rows(_like(x, decay, x.shape))
        out = x.new_empty(x.shape)
        states, owners = _states(x, state, (channels,), batch)
        call = LinearRecurrenceCall(
            states=states,
            x=x.data_ptr(),
            decay=decay.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            decay_stride=decay.stride(0),
            channels=channels,
        )
        _check(self._library.pagewire_linear_recurrence(ctypes.byref(call)), owners)
        return out


def _states(
    x: Tensor, state: Tensor, shape: tuple[int, ...], batch: StateBatch
) -> tuple[ctypes.Structure, list[Tensor]]:
    """A layer's states [S, *shape] and the spans, and the tensors that must live as long as the struct.

    x: a tensor [T, ...] of the call, in the dtype of its `void*`.
    """
    if state.shape[1:] != shape or state.dtype != torch.float32 or not _dense_after_first(state):
        raise ValueError(f"states float32 {['S', *shape]} expected, not {state.dtype} {tuple(state.shape)}")
    row_starts, spans = batch.row_starts.contiguous(), batch.spans.contiguous()
    for indices in (row_starts, spans):
        if indices.dtype != torch.int32:
            raise TypeError(f"spans and their rows are int32, not {indices.dtype}")
    if row_starts.dim() != 1 or len(row_starts) == 0 or spans.dim() != 2 or spans.shape[1] != 4:
        raise ValueError(f"rows {tuple(row_starts.shape)} of spans {tuple(spans.shape)}")
    struct = States(
        state=state.data_ptr(),
        row_starts=row_starts.data_ptr(),
        spans=spans.data_ptr(),
        num_slots=len(state),
        slot_stride=state.stride(0),
        num_rows=len(row_starts) - 1,
        num_spans=len(spans),
        num_tokens=len(x),
        dtype=DTYPES[x.dtype],
        num_threads=torch.get_num_threads(),
    )
    return struct, [row_starts, spans]


def _check(failed: int, owners: list[Tensor]) -> None:
    del owners  # they have lived until now
    if failed:
        raise ValueError("spans, rows or state slots of the batch do not fit its tensors")


def _check_groups(groups: int, heads: int) -> None:
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups}")


def _dense_after_first(x: Tensor) -> bool:
    return len(x) == 0 or x[0].is_contiguous()


def _rows(x: Tensor) -> Tensor:
    """x, or a copy of which all axes but the first are contiguous."""
    return x if _dense_after_first(x) else x.contiguous()


def _like(x: Tensor, other: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Another tensor of x's dtype, if it has this shape."""
    if other.shape != shape or other.dtype != x.dtype:
        raise ValueError(f"{x.dtype} {list(shape)} expected, not {other.dtype} {tuple(other.shape)}")
    return other


def _factors(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape as contiguous float32."""
    if x.shape != shape:
        raise ValueError(f"{list(shape)} expected, not {tuple(x.shape)}")
    return x.to(torch.float32).contiguous()
