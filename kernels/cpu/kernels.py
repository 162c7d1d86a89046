"""The compiled CPU kernels, called through ctypes. Which library they call is chosen in `library.py`."""

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.cpu import adapters, integers
from pagewire.kernels.cpu.build import InstructionSet
from pagewire.kernels.cpu.experts import ACTIVATION_CODES, CompiledExperts
from pagewire.kernels.cpu.library import AttentionCall, choose
from pagewire.kernels.cpu.linear import PackedLinear, multiply_unpacked
from pagewire.kernels.cpu.quantised import PackedForm, QuantisedLinear
from pagewire.kernels.cpu.stack import CompiledStack
from pagewire.kernels.cpu.tensors import (
    CACHE_DTYPES,
    DTYPES,
    cache_fields,
    check_cache,
    last_contiguous,
    logit_terms,
    of_size,
)
from pagewire.kernels.deltas import AdapterRows
from pagewire.kernels.integers import Integers
from pagewire.kernels.kv_codes import DTYPE as KV_CODES
from pagewire.kernels.kv_codes import head_size, row_width
from pagewire.kernels.layer import Activation, Experts, Layer, LayerNorm, Norm, Router
from pagewire.kernels.paging import CAUSAL, AttentionBatch, Cache, LogitTerms, check_scales
from pagewire.kernels.reference.kernels import Kernels
from pagewire.kernels.weight import Linear, Weight


@functools.cache
def load() -> "CpuKernels | None":
    """The kernels for this CPU; None where there is no library, see `library.choose`."""
    library = choose()
    return CpuKernels(library.isa, library.functions) if library else None


class CpuKernels(Kernels):
    """The compiled kernels for one instruction set."""

    def __init__(self, isa: InstructionSet, library: ctypes.CDLL) -> None:
        self.isa, self._library = isa, library

    def paged_attention(
        self,
        q: Tensor,
        cache: Cache,
        batch: AttentionBatch,
        scale: float,
        terms: LogitTerms = CAUSAL,
        out: Tensor | None = None,
    ) -> Tensor:
        check_scales(cache)
        num_tokens, num_heads, head_dim = q.shape
        q = last_contiguous(q)
        if out is None:
            out = q.new_empty(num_tokens, num_heads, head_size(cache.v))
        _check_attention(q, cache, batch, out)
        query_start_loc, seq_lens = batch.query_start_loc.contiguous(), batch.seq_lens.contiguous()
        block_table = last_contiguous(batch.block_table)
        native, owners = logit_terms(terms, num_heads)
        call = AttentionCall(
            q=q.data_ptr(),
            out=out.data_ptr(),
            query_start_loc=query_start_loc.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_table=block_table.data_ptr(),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            **cache_fields(self._library, cache),
            block_table_stride=block_table.stride(0),
            num_tokens=num_tokens,
            num_requests=len(seq_lens),
            num_heads=num_heads,
            head_dim=head_dim,
            max_blocks=block_table.shape[1],
            terms=native,
            scale=scale,
            dtype=DTYPES[q.dtype],
            num_threads=torch.get_num_threads(),
        )
        failed = self._library.pagewire_attention(ctypes.byref(call))
        del owners
        if failed:
            raise ValueError("paged_attention: lengths or block numbers of the batch do not fit its tensors")
        return out

    def store_kv(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
        check_scales(cache)
        if slot_mapping.dtype != torch.int64:
            raise TypeError(f"slots are int64, not {slot_mapping.dtype}")
        slots = slot_mapping.contiguous()
        for is_value, (source, stored) in enumerate(((k, cache.k), (v, cache.v))):
            source = last_contiguous(source)
            num_tokens, num_heads, size = source.shape
            num_blocks, _, block_size, _ = stored.shape
            if stored.shape[1] != num_heads or head_size(stored) != size:
                raise ValueError(f"store_kv: {tuple(source.shape)} into {tuple(stored.shape)}")
            if len(slots) != num_tokens:
                raise ValueError(f"store_kv: {len(slots)} slots for {num_tokens} tokens")
            if stored.dtype not in (source.dtype, KV_CODES):
                raise TypeError(f"store_kv: {source.dtype} into {stored.dtype}")
            check_cache(self._library, stored)
            outside = self._library.pagewire_store(
                source.data_ptr(),
                stored.data_ptr(),
                slots.data_ptr(),
                num_tokens,
                num_heads,
                size,
                *(source.stride(0), source.stride(1), stored.stride(0), stored.stride(1)),
                num_blocks,
                block_size,
                is_value,
                DTYPES[source.dtype],
                CACHE_DTYPES[stored.dtype],
                torch.get_num_threads(),
            )
            if outside:
                raise IndexError("store_kv: a slot lies outside the cache")

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

    def activate_each(self, x: Tensor, activation: Activation) -> Tensor:
        if activation is Activation.CLAMPED_SWIGLU:
            raise ValueError(f"{activation} is of pairs of elements, not of each")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._library.pagewire_activate_each(
            x.data_ptr(),
            out.data_ptr(),
            x.numel() // max(1, x.shape[-1]),
            x.shape[-1],
            ACTIVATION_CODES[activation],
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def activate_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
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
            return QuantisedLinear(self._library, self.isa.panels, weight, bias)
        return PackedLinear(self._library, self.isa.panels, weight, bias)

    def packed_linear(self, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> PackedLinear:
        """See `PackedLinear.of_packed`."""
        return PackedLinear.of_packed(self._library, self.isa.panels, packed, bias, shape)

    def quantised_linear(self, packed: Tensor, form: PackedForm, bias: Tensor | None) -> QuantisedLinear:
        """See `QuantisedLinear.of_packed`."""
        return QuantisedLinear.of_packed(self._library, self.isa.panels, packed, form, bias)

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
        """A compiled call for all layers; None if they differ in shape, or are not packed by this library."""
        return CompiledStack.of(self._library, input_norm, layers, norm_first=norm_first)

    def experts(self, experts: Experts) -> CompiledExperts | None:
        """The experts in one call; None if they are not packed by this library."""
        return CompiledExperts.of(self._library, experts)

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        (num_tokens, num_experts), num_chosen = logits.shape, router.num_chosen
        if not 0 < num_chosen <= num_experts:
            raise ValueError(f"{num_chosen} of {num_experts} experts cannot be chosen")
        logits = logits.contiguous()
        ids = torch.empty(num_tokens, num_chosen, dtype=torch.int64)
        weights = torch.empty(num_tokens, num_chosen)
        self._library.pagewire_route(
            logits.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            num_tokens,
            num_experts,
            num_chosen,
            router.normalised,
            router.rounded,
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
        values, columns = torch.empty(len(x)), torch.empty(len(x), dtype=torch.int64)
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


def _check_attention(q: Tensor, cache: Cache, batch: AttentionBatch, out: Tensor) -> None:
    num_tokens, num_heads, head_dim = q.shape
    k_cache, v_cache = cache.k, cache.v
    num_blocks, num_kv_heads, block_size, _ = v_cache.shape
    if k_cache.dtype not in (q.dtype, KV_CODES):
        raise TypeError(f"paged_attention: queries of {q.dtype}, keys of {k_cache.dtype}")
    for tensor in (batch.query_start_loc, batch.seq_lens, batch.block_table):
        if tensor.dtype != torch.int32:
            raise TypeError(f"lengths and block tables are int32, not {tensor.dtype}")
    if (
        k_cache.shape != (num_blocks, num_kv_heads, block_size, row_width(head_dim, k_cache.dtype))
        or num_heads % num_kv_heads != 0
        or out.shape != (num_tokens, num_heads, head_size(v_cache))
        or out.dtype != q.dtype
        or not out.is_contiguous()
        or len(batch.query_start_loc) != len(batch.seq_lens) + 1
        or len(batch.block_table) < len(batch.seq_lens)
    ):
        raise ValueError(
            f"paged_attention: shapes disagree: q {tuple(q.shape)}, K {tuple(k_cache.shape)}, "
            f"V {tuple(v_cache.shape)}, out {tuple(out.shape)}, block table {tuple(batch.block_table.shape)}"
        )


def _bits_for(x: Tensor, allowed: Tensor) -> Tensor:
    shape = (x.shape[0], -(-x.shape[1] // 32))
    if allowed.shape != shape or allowed.dtype != torch.int32:
        raise ValueError(f"masks are int32 {shape}, not {allowed.dtype} {tuple(allowed.shape)}")
    return allowed.contiguous()


def _contiguous_like(x: Tensor, other: Tensor) -> Tensor:
    if other.shape != x.shape or other.dtype != x.dtype or not other.is_contiguous():
        raise ValueError(f"expected a contiguous {x.dtype} tensor of shape {tuple(x.shape)}")
    return other
