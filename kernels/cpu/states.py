"""The compiled kernels of recurrent layers: state_matrices.cpp and state_channels.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.tensors import DTYPES, last_contiguous
from pagewire.kernels.data.mixers import OutputGate
from pagewire.kernels.data.states import (
    StateBatch,
    check_shared,
    check_states,
    factors,
    token_rows,
)
from pagewire.kernels.reference.states import StateKernels

States = structure("States")
DeltaRuleCall = structure("DeltaRuleCall")
StateSpaceCall = structure("StateSpaceCall")
SelectiveScanCall = structure("SelectiveScanCall")
CausalConvCall = structure("CausalConvCall")
LinearRecurrenceCall = structure("LinearRecurrenceCall")
GateStruct = structure("OutputGate")


class CpuStateKernels(StateKernels):
    """The compiled kernels for one instruction set."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        (tokens, channels), taps = x.shape, len(weight)
        x = token_rows(x, x.dtype, *x.shape)
        weight = token_rows(weight, x.dtype, taps, channels).contiguous()
        bias = None if bias is None else token_rows(bias, x.dtype, channels).contiguous()
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
        check_shared(key_heads, value_heads)
        v = token_rows(v, v.dtype, *v.shape)
        q, k = (token_rows(x, v.dtype, tokens, key_heads, key_dim) for x in (q, k))
        decays = key_dim if decay.dim() == 3 else 1
        decay = factors(decay, *(tokens, value_heads, key_dim)[: decay.dim()])
        beta = factors(beta, tokens, value_heads)
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
        check_shared(groups, heads)
        x = token_rows(x, x.dtype, *x.shape)
        b, c = (token_rows(tensor, x.dtype, tokens, groups, state_dim) for tensor in (b, c))
        dt, a = factors(dt, tokens, heads), factors(a, heads)
        d = None if d is None else factors(d, heads)
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
        x = token_rows(x, x.dtype, *x.shape)
        b, c = (token_rows(tensor, x.dtype, tokens, state_dim) for tensor in (b, c))
        dt, a = factors(dt, tokens, channels), factors(a, state_dim, channels)
        d = None if d is None else factors(d, channels)
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
        x, decay = (token_rows(tensor, x.dtype, *x.shape) for tensor in (x, decay))
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

    def step_sizes(
        self,
        x: Tensor,
        bias: Tensor | None,
        factor: Tensor | None,
        least: float = 0.0,
        most: float = float("inf"),
    ) -> Tensor:
        tokens, size = x.shape
        x = token_rows(x, x.dtype, tokens, size)
        bias, factor = (None if own is None else factors(own, size) for own in (bias, factor))
        out = torch.empty(tokens, size)
        self._library.pagewire_step_sizes(
            x.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if factor is None else factor.data_ptr(),
            out.data_ptr(),
            tokens,
            size,
            x.stride(0),
            least,
            most,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def rates(self, x: Tensor, most: float) -> Tensor:
        x = token_rows(x, x.dtype, *x.shape)
        out = torch.empty(x.shape)
        self._library.pagewire_rates(
            x.data_ptr(),
            out.data_ptr(),
            *x.shape,
            x.stride(0),
            most,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def open_by(self, x: Tensor, gates: Tensor, form: OutputGate) -> Tensor:
        x = x.contiguous()
        num_rows, size = x.shape
        struct = gate_struct(form, size, x.dtype)
        width = 1 if form.single else form.group
        gates = gates if gates.dim() == 3 else torch.unflatten(gates, -1, (-1, width))
        if gates.shape != (num_rows, size // form.group, width) or gates.dtype != x.dtype:
            raise ValueError(f"gates {tuple(gates.shape)} in groups of {form.group} for {tuple(x.shape)}")
        gates, out = last_contiguous(gates), torch.empty_like(x)
        self._library.pagewire_open_by(
            x.data_ptr(),
            gates.data_ptr(),
            out.data_ptr(),
            num_rows,
            gates.shape[1],
            gates.stride(0),
            gates.stride(1),
            ctypes.byref(struct),
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out


def _states(
    x: Tensor, state: Tensor, shape: tuple[int, ...], batch: StateBatch
) -> tuple[ctypes.Structure, list[Tensor]]:
    """A layer's states [S, *shape] and the spans, and the tensors that must live as long as the struct.

    x: a tensor [T, ...] of the call, in the dtype of its `void*`.
    """
    check_states(state, shape, batch)
    row_starts, spans = batch.row_starts.contiguous(), batch.spans.contiguous()
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


def gate_struct(form: OutputGate, size: int, dtype: torch.dtype) -> ctypes.Structure:
    """A gate of `size` numbers of a token; its weight must live as long as the struct.

    Raises:
        ValueError: they are no groups, or the weight has another size or dtype.
    """
    weight, group = form.weight, form.group
    if group < 1 or size % group:
        raise ValueError(f"{size} numbers in groups of {group}")
    if weight is not None and not (
        weight.numel() in (group, size) and weight.dtype == dtype and weight.is_contiguous()
    ):
        raise ValueError(f"a weight [{group}] or [{size}] of {dtype} expected, not {tuple(weight.shape)}")
    return GateStruct(
        weight=None if weight is None else weight.data_ptr(),
        group=group,
        weight_stride=0 if weight is None or weight.numel() == group else group,
        eps=form.eps,
        sigmoid=form.sigmoid,
        first=form.first,
        single=form.single,
    )
