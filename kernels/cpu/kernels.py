"""The compiled CPU kernels, called through ctypes. Which library they call is chosen in `library.py`."""

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.cpu import adapters, attention, drawing, integers
from pagewire.kernels.cpu.build import InstructionSet
from pagewire.kernels.cpu.experts import ACTIVATION_CODES, CompiledExperts, Matrices, routing_struct
from pagewire.kernels.cpu.layer import xielu_struct
from pagewire.kernels.cpu.library import choose
from pagewire.kernels.cpu.linear import PackedLinear, multiply_unpacked
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.kernels.cpu.stack import CompiledStack
from pagewire.kernels.cpu.states import CpuStateKernels
from pagewire.kernels.cpu.tensors import DTYPES, last_contiguous, of_size
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.drawing import Draw
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.kv_codes import CODES
from pagewire.kernels.data.layer import (
    Activation,
    Experts,
    Layer,
    LayerNorm,
    LimitedGate,
    Norm,
    Router,
    Xielu,
)
from pagewire.kernels.data.paging import CAUSAL, AttentionBatch, Cache, LogitTerms
from pagewire.kernels.data.weight import Linear, Weight
from pagewire.kernels.reference.kernels import Kernels


@functools.cache
def load() -> "CpuKernels | None":
    """The kernels for this CPU; None where there is no library, see `library.choose`."""
    library = choose()
    return CpuKernels(library.isa, library.functions) if library else None


def serves(tensors: Sequence[Tensor]) -> bool:
    """True if the kernels support these tensors: one dtype of floats, and codes for cached K and V."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and {tensor.dtype for tensor in tensors} <= {dtype, *CODES}


class CpuKernels(Kernels):
    """The compiled kernels for one instruction set."""

    def __init__(self, isa: InstructionSet, library: ctypes.CDLL) -> None:
        self.isa, self._library = isa, library
        self.packing = library, isa.panels
        """The first arguments of `PackedLinear`, `QuantisedLinear`, and their `of_packed`."""
        self.states = CpuStateKernels(library)

    def paged_attention(
        self,
        q: Tensor,
        cache: Cache,
        batch: AttentionBatch,
        scale: float,
        terms: LogitTerms = CAUSAL,
        out: Tensor | None = None,
    ) -> Tensor:
        return attention.paged_attention(self._library, q, cache, batch, scale, terms, out)

    def store_kv(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
        attention.store_kv(self._library, k, v, cache, slot_mapping)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        rows = last_contiguous(x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1]))
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype)
        weight = of_size(weight, x.shape[-1])
        self._library.pagewire_rms_norm(
            rows.data_ptr(),
            weight.data_ptr(),
            _contiguous_like(x, out).data_ptr(),
            *rows.shape,
            rows.stride(0),
            rows.stride(1),
            rows.shape[1] * rows.shape[2],
            rows.shape[2],
            eps,
            offset,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> Tensor:
        x, weight = x.contiguous(), of_size(weight, x.shape[-1])
        out = torch.empty_like(x)
        self._library.pagewire_add_rms_norm(
            x.data_ptr(),
            _contiguous_like(x, residual).data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // max(1, x.shape[-1]),
            x.shape[-1],
            eps,
            offset,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
    ) -> Tensor:
        x, weight = x.contiguous(), of_size(weight, x.shape[-1])
        bias = None if bias is None else of_size(bias, x.shape[-1])
        residual = None if residual is None else _contiguous_like(x, residual)
        out = torch.empty_like(x)
        self._library.pagewire_layer_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None,
            out.data_ptr(),
            x.numel() // max(1, x.shape[-1]),
            x.shape[-1],
            eps,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def fixed_sums(self, x: Tensor, ends: Tensor, one: float) -> Tensor | None:
        if not x.is_contiguous() or not ends.is_contiguous() or ends[-1] != len(x):
            raise ValueError(f"contiguous rows that end with the last segment expected, not {tuple(x.shape)}")
        sums = torch.empty(len(ends), x.shape[1], dtype=torch.int64)
        failed = self._library.pagewire_fixed_sums(
            x.data_ptr(),
            ends.data_ptr(),
            sums.data_ptr(),
            *sums.shape,
            one,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return None if failed else sums

    def activate_each(self, x: Tensor, activation: Activation | Xielu) -> Tensor:
        if activation is Activation.CLAMPED_SWIGLU:
            raise ValueError(f"{activation} is of pairs of elements, not of each")
        x = x.contiguous()
        out = torch.empty_like(x)
        sizes = x.numel() // max(1, x.shape[-1]), x.shape[-1]
        how = DTYPES[x.dtype], torch.get_num_threads()
        if isinstance(activation, Xielu):
            parameters = ctypes.byref(xielu_struct(activation))
            self._library.pagewire_xielu(x.data_ptr(), out.data_ptr(), *sizes, parameters, *how)
        else:
            code = ACTIVATION_CODES[activation]
            self._library.pagewire_activate_each(x.data_ptr(), out.data_ptr(), *sizes, code, *how)
        return out

    def activate_and_mul(self, x: Tensor, activation: Activation | LimitedGate) -> Tensor:
        if isinstance(activation, LimitedGate):
            return super().activate_and_mul(x, activation)
        size, odd = divmod(x.shape[-1], 2)
        if odd:
            raise ValueError(f"gate and up halves need an even size, not {x.shape[-1]}")
        rows = last_contiguous(x.reshape(-1, x.shape[-1]))
        out = torch.empty(*x.shape[:-1], size, dtype=x.dtype)
        self._library.pagewire_activate(
            rows.data_ptr(),
            out.data_ptr(),
            len(rows),
            size,
            rows.stride(0),
            size,
            ACTIVATION_CODES[activation],
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def cap(self, x: Tensor, scale: float, softcap: float | None) -> Tensor:
        x = x.contiguous()
        threads = torch.get_num_threads()
        self._library.pagewire_cap(x.data_ptr(), x.numel(), scale, softcap or 0.0, DTYPES[x.dtype], threads)
        return x

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        cos, sin = last_contiguous(cos), last_contiguous(sin)
        num_tokens, size = cos.shape
        for x in (q, k):
            if len(x) != num_tokens or x.shape[2] < size or size % 2 or sin.shape != cos.shape:
                raise ValueError(f"rotary: {tuple(x.shape)} by {tuple(cos.shape)}, {tuple(sin.shape)}")
            if x.stride(2) != 1:
                raise ValueError("rotary: heads are rotated in place and must be contiguous")
            self._library.pagewire_rotary(
                x.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                num_tokens,
                x.shape[1],
                size // 2,
                x.stride(0),
                x.stride(1),
                cos.stride(0),
                sin.stride(0),
                DTYPES[x.dtype],
                torch.get_num_threads(),
            )

    def pack(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        if isinstance(weight.scheme, Integers):
            return QuantisedLinear(*self.packing, weight, bias)
        return PackedLinear(*self.packing, weight, bias)

    def quantise(self, weight: Weight, scheme: Integers, scale_dtype: torch.dtype) -> Weight:
        return integers.quantise(self._library, weight, scheme, scale_dtype)

    def dense(self, weight: Weight) -> Tensor:
        return integers.dense(self._library, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply_unpacked(self._library, x, weight, bias)

    def adapt(self, x: Tensor, out: Tensor, rows: AdapterRows, product: int) -> None:
        adapters.adapt(self._library, x, out, rows, product)

    def stack(
        self, input_norm: Norm | LayerNorm | None, layers: Sequence[Layer], *, norm_first: bool
    ) -> CompiledStack | None:
        """A compiled call for all layers; None if it lacks something, or they are not packed by this library."""
        return CompiledStack.of(self._library, input_norm, layers, norm_first=norm_first)

    def experts(self, experts: Experts) -> CompiledExperts | None:
        return CompiledExperts.of(self._library, experts)

    def grouped(self, linears: Sequence[Linear]) -> Matrices | None:
        return Matrices.of(self._library, linears)

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        if router.routing.by_logits:
            return super().route(logits, router)
        num_tokens, num_experts = logits.shape
        routing = routing_struct(router, num_experts)
        logits = logits.contiguous()
        ids = torch.empty(num_tokens, router.routing.num_chosen, dtype=torch.int64)
        weights = torch.empty(ids.shape)
        self._library.pagewire_route(
            logits.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            num_tokens,
            num_experts,
            ctypes.byref(routing),
            DTYPES[logits.dtype],
        )
        return ids, weights

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> None:
        if gate.shape != (len(out), 1):
            raise ValueError(f"gates {[len(out), 1]} expected, not {tuple(gate.shape)}")
        x, gate = x.contiguous(), gate.contiguous()
        self._library.pagewire_add_gated(
            _contiguous_like(x, out).data_ptr(),
            x.data_ptr(),
            gate.data_ptr(),
            *out.shape,
            DTYPES[out.dtype],
            torch.get_num_threads(),
        )

    def largest(self, x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows = last_contiguous(x)
        bits = None if allowed is None else _bits_for(x, allowed)
        values, columns = torch.empty(x.shape[0]), torch.empty(x.shape[0], dtype=torch.int64)
        self._library.pagewire_largest(
            rows.data_ptr(),
            None if bits is None else bits.data_ptr(),
            values.data_ptr(),
            columns.data_ptr(),
            *rows.shape,
            rows.stride(0),
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return values, columns

    def only_allowed(self, x: Tensor, allowed: Tensor) -> Tensor:
        rows, bits = last_contiguous(x), _bits_for(x, allowed)
        out = torch.empty(x.shape)
        self._library.pagewire_only_allowed(
            rows.data_ptr(),
            bits.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            rows.stride(0),
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def fixed_point_probabilities(self, depths: Tensor) -> Tensor:
        depths = depths.contiguous()
        masses = torch.empty(depths.shape, dtype=torch.int64)
        self._library.pagewire_fixed_point_probabilities(
            depths.data_ptr(), masses.data_ptr(), depths.numel(), torch.get_num_threads()
        )
        return masses

    def draw(self, x: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> list[int]:
        return drawing.draw(self._library, x, peaks, draws)


def _bits_for(x: Tensor, allowed: Tensor) -> Tensor:
    shape = (x.shape[0], -(-x.shape[1] // 32))
    if allowed.shape != shape or allowed.dtype != torch.int32:
        raise ValueError(f"masks are int32 {shape}, not {allowed.dtype} {tuple(allowed.shape)}")
    return allowed.contiguous()


def _contiguous_like(x: Tensor, other: Tensor) -> Tensor:
    if other.shape != x.shape or other.dtype != x.dtype or not other.is_contiguous():
        raise ValueError(f"expected a contiguous {x.dtype} tensor of shape {tuple(x.shape)}")
    return other
