"""Every kernel in plain PyTorch: what each computes, the oracle of the tests, and what runs where none is compiled.

`CpuKernels` and `CudaKernels` replace the methods that they have compiled. Sums are float32 (float64 for float64
tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data import integers
from pagewire.kernels.data.deltas import AdapterRows, adapt_with
from pagewire.kernels.data.drawing import Draw
from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.layer import (
    Activation,
    Angles,
    Experts,
    HeadNorms,
    Layer,
    LayerNorm,
    LimitedGate,
    Norm,
    Router,
    Xielu,
)
from pagewire.kernels.data.paging import CAUSAL, AttentionBatch, Cache, LogitTerms
from pagewire.kernels.data.weight import Linear, UnpackedLinear, Weight
from pagewire.kernels.reference import attention, drawing, routing
from pagewire.kernels.reference.activations import activated, limited
from pagewire.kernels.reference.quantised import UnpackedQuantisedLinear
from pagewire.kernels.reference.states import StateKernels
from pagewire.kernels.reference.sums import fixed_sums

ROWS = 16
"""Rows of every product in `Kernels.linear`."""


class CompiledSum(Protocol):
    """The experts of a layer in one call, packed by an implementation."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `pagewire.kernels.experts.GroupedExperts`."""


GroupedProduct = Callable[[Tensor, Sequence[int]], Tensor]
"""Rows [R, K] in order of their matrix, and how many each matrix has, to [R, N]. The host knows these numbers."""


IndexScores = Callable[[Tensor, Tensor, float, Tensor, AttentionBatch, range], Tensor]
"""Scores of keys, see `pagewire.kernels.indexed`: float32 [rows, max_seq_len], of keys after a token -inf.

It takes queries [T, heads, size], weights float32 [T, heads], the scale of products, the keys
[blocks, block_size, size], the batch, and the rows that are scored. They depend on their token and key alone.
"""


def in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of x [..., K] by a weight [N, K], `ROWS` rows at a time: PyTorch orders sums by that number."""
    rows = x.reshape(-1, x.shape[-1])
    num_rows = len(rows)
    blocks = functional.pad(rows, (0, 0, 0, -num_rows % ROWS)).view(-1, ROWS, x.shape[-1])
    out = x.new_empty(len(blocks), ROWS, len(weight))
    for block, result in zip(blocks, out, strict=True):
        result.copy_(functional.linear(block, weight, bias))
    return out.flatten(0, 1)[:num_rows].view(*x.shape[:-1], len(weight))


class Kernels:
    """The kernels of a device. A row's bits depend on the row alone, unless a method says otherwise.

    Norms, activations and rotations follow the rounding of the Hugging Face modules that they replace.
    states: the kernels of recurrent layers. multiplies_floats: see `pagewire.kernels.linear.multiplies_floats`.
    latents: elements of keys, and of values that are a part of them; other values are as long as keys. None: any.
    index_scores: by the size of an indexer's keys, what scores them without waiting for the device.
    """

    states: StateKernels = StateKernels()
    index_scores: Mapping[int, IndexScores] = MappingProxyType({})
    multiplies_floats: bool = False
    latents: Collection[tuple[int, int]] | None = None

    def paged_attention(
        self,
        q: Tensor,
        cache: Cache,
        batch: AttentionBatch,
        scale: float,
        terms: LogitTerms = CAUSAL,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of every query token to its own request's keys and values.

        Query i of a request with `query_len` tokens sits at position `seq_len - query_len + i`. The bits of a
        token's output depend on its request alone, not on the batch, the chunking or the threads.

        Args:
            q: [T, Hq, D], any strides as long as D is contiguous.
            cache: of the layer; Hq is a multiple of Hkv. On the CPU it may be of codes, see `kv_codes.py`.
            batch: which rows of q belong to which request.
            scale: factor of the dot products, usually D ** -0.5.
            terms: which keys are seen, and what changes the logits.
            out: [T, Hq, Dv], contiguous, in q's dtype; made if not given.

        Returns:
            out: [T, Hq, Dv] in q's dtype. Padding rows are 0.

        Raises:
            TypeError: an index tensor of the batch is not int32.
            ValueError: shapes disagree, the batch points outside its tensors, or the cache takes no scales.
        """
        return attention.paged_attention(q, cache, batch, scale, terms, out)

    def store_kv(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
        """Writes keys and values into their slots of a cache.

        Args:
            k: [T, Hkv, D] in the cache's dtype; may be a strided view. For a cache of codes, of the model's dtype.
            v: [T, Hkv, Dv], likewise; not read where the cache has its values in its keys.
            cache: of the layer.
            slot_mapping: int64 [T], `block * block_size + row`; -1 stores nothing.

        Raises:
            ValueError: the cache takes no scales.
            IndexError: a slot lies outside the cache (not checked on GPUs).
        """
        attention.store_kv(k, v, cache, slot_mapping)

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Angles | None,
        head_norms: HeadNorms | None,
        cache: Cache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Norms heads, rotates queries and keys, stores keys and values; see `rotary` and `store_kv`.

        Where there are no norms or no angles, that step is left out.

        Returns:
            The queries [T, Hq, D]. q and k may be overwritten.
        """
        if head_norms is not None:
            q, k = (
                self.rms_norm(heads, norm.weight, norm.eps, offset=norm.offset)
                for heads, norm in zip((q, k), head_norms, strict=True)
            )
        if angles is not None:
            self.rotary(q, k, *angles)
        self.store_kv(k, v, cache, slot_mapping)
        return q

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotates q and k in place: `x * cos + rotate_half(x) * sin` on the first `rot_dim` elements of each head.

        The two products and the sum are rounded to the dtype, as PyTorch does, so the result equals Hugging Face's
        to the bit (if cos and sin have q's dtype).

        Args:
            q: [T, Hq, D], any strides as long as D is contiguous.
            k: [T, Hkv, D], likewise.
            cos, sin: [T, rot_dim], both halves given, as Hugging Face's rotary modules return them; rot_dim <= D.
        """
        for x in (q, k):
            rotated = x[..., : cos.shape[-1]]
            first, second = rotated.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
            rotated.copy_(rotated * cos[:, None] + turned * sin[:, None])

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last axis, computed in float32.

        With offset 0 the normed value is rounded to x's dtype before the product, as in Llama. With another offset
        (1 for Gemma) everything is float32 up to the result.

        Args:
            x: [..., N], N contiguous.
            weight: [N].
            out: of x's shape and dtype, contiguous; may be x itself. Made if not given.

        Returns:
            out, of x's shape and dtype.
        """
        dtype = attention.accumulation_dtype(x)
        wide = x.to(dtype)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        result = normed.to(x.dtype) * weight if offset == 0.0 else normed * (weight.to(dtype) + offset)
        return result.to(x.dtype) if out is None else out.copy_(result)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> Tensor:
        """`residual += x` in place, rounded to its dtype; returns `rms_norm(residual, weight, eps, offset=offset)`.

        Args:
            x: [..., N].
            residual: like x, contiguous.
            weight: [N].
        """
        residual += x
        return self.rms_norm(residual, weight, eps, offset=offset)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
    ) -> Tensor:
        """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last axis, computed in float32.

        Args:
            x: [..., N], as the result, which has its dtype.
            weight: [N].
            bias: [N]; None: 0.
            residual: like x, is added to it first; the sum is rounded to x's dtype.
        """
        total = x if residual is None else x + residual
        return functional.layer_norm(total, weight.shape, weight, bias, eps)

    def activate_each(self, x: Tensor, activation: Activation | Xielu) -> Tensor:
        """An activation of each element of x, without CLAMPED_SWIGLU."""
        return activated(x, activation)

    def activate_and_mul(self, x: Tensor, activation: Activation | LimitedGate) -> Tensor:
        """[..., 2 I] to [..., I]: `activation(first half) * second half`, the activation rounded before.

        CLAMPED_SWIGLU is gpt-oss's: of each pair (gate, up) of neighbours in the last axis, with gate at most 7 and
        up from -7 to 7, `(up + 1) * (gate * sigmoid(1.702 * gate))`; every step is rounded.
        """
        if isinstance(activation, LimitedGate):
            return limited(x, activation, partial(self.activate_each, activation=Activation.SILU))
        if activation is Activation.CLAMPED_SWIGLU:
            gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
            return (up + 1) * (gate * elementwise(torch.sigmoid, gate * 1.702))
        gate, up = x.chunk(2, dim=-1)
        return self.activate_each(gate, activation) * up

    def cap(self, x: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Logits x [..., V] times `scale`, then `softcap * tanh(x / softcap)`, every step rounded.

        x: may be overwritten. softcap: None: they are not capped.
        """
        x = x if scale == 1.0 else x * scale
        return x if softcap is None else elementwise(torch.tanh, x / softcap) * softcap

    def fixed_sums(self, x: Tensor, ends: Tensor, one: float) -> Tensor | None:
        """See `pagewire.kernels.reference.sums.fixed_sums`."""
        return fixed_sums(x, ends, one)

    def pack(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """See `pagewire.kernels.linear.pack`; weight and bias are on the device, and fit. Here both are kept."""
        if isinstance(weight.scheme, Integers):
            return UnpackedQuantisedLinear(weight, bias)
        return UnpackedLinear(self.linear, weight, bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, to the bits of the product over the packed weight, without keeping that.

        On a GPU a row's bits may depend on the number of rows.

        Args:
            x: [..., K].
            weight: [N, K], of the same dtype. Each call packs it anew, in pieces that fit a processor's cache.
            bias: [N], of the same dtype.

        Returns:
            [..., N].

        Raises:
            ValueError: the shapes or dtypes do not fit.
        """
        return in_blocks(x, weight, bias) if x.device.type == "cpu" else functional.linear(x, weight, bias)

    def quantise(self, weight: Weight, scheme: Integers, scale_dtype: torch.dtype) -> Weight:
        """See `pagewire.kernels.linear.quantise`; scheme and shape are checked."""
        return integers.quantise(weight, scheme, scale_dtype)

    def dense(self, weight: Weight) -> Tensor:
        """See `pagewire.kernels.linear.dense`; the scheme is `Integers`."""
        return weight.dense()

    def adapt(self, x: Tensor, out: Tensor, rows: AdapterRows, product: int) -> None:
        """See `pagewire.kernels.adapted.adapt`; x [T, K] and out [T, N] are checked."""
        adapt_with(self.linear, x, out, rows, product)

    def stack(
        self, input_norm: Norm | LayerNorm | None, layers: Sequence[Layer], *, norm_first: bool
    ) -> Callable[..., Tensor] | None:
        """All layers of a `pagewire.kernels.stack.Stack` in one call; None: they run kernel by kernel."""
        return None

    def experts(self, experts: Experts) -> CompiledSum | None:
        """All experts of a layer, which have an activation, in one call; None: they are called one by one."""
        return None

    def grouped(self, linears: Sequence[Linear]) -> GroupedProduct | None:
        """The product of several layers of equal shape, without adapters, in one call; None: there is none."""
        return None

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """Chooses the experts of each token, and their weights.

        Args:
            logits: [T, E], in any float dtype.
            router: how many are chosen, by what, and what their weights are.

        Returns:
            ids int64 [T, C] of the experts, the first choice first, and weights float32 [T, C].

        Raises:
            ValueError: see `Routing.check`.
        """
        return routing.choose(logits, router.routing, router.bias)

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> None:
        """`out += sigmoid(gate) * x` in place, each step rounded. out [T, H], contiguous; x [T, H]; gate [T, 1]."""
        out += elementwise(torch.sigmoid, gate) * x

    def largest(self, x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The largest value of each row, and the lowest column that holds it.

        Args:
            x: [R, V], any float dtype, V contiguous and at least 1.
            allowed: int32 [R, ceil(V / 32)]: column i takes part if bit i % 32 of word i // 32 is set.

        Returns:
            values float32 [R], NaN for a row that contains NaN, and columns int64 [R] (arbitrary for such a row).
            A row without allowed columns has the value -inf.
        """
        if allowed is not None:
            x = self.only_allowed(x, allowed)
        values = x.amax(1)
        # argmax of a comparison is the first True; argmax of 16-bit floats is slow on CPUs.
        return values.float(), (x == values[:, None]).to(torch.uint8).argmax(1)

    def only_allowed(self, x: Tensor, allowed: Tensor) -> Tensor:
        """x as new float32 [R, V], with -inf in columns that are not allowed. Arguments as for `largest`."""
        bits = allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=x.device) & 1
        return x.float().masked_fill(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf)

    def fixed_point_probabilities(self, depths: Tensor) -> Tensor:
        """exp(-depth) as a 64-bit fixed-point number with `FRACTION_BITS` bits of fraction, rounded down.

        The exponential is spelled out in float32 additions and multiplications, each rounded to nearest, so that
        every implementation and every device gives the same bits: a sampled token depends on nothing else. It is
        exact at 0, never rises with depth, and errs by at most 8e-8 of itself.

        Args:
            depths: float32, at least 0; not NaN.

        Returns:
            int64, of the same shape, from 0 to 2**FRACTION_BITS.
        """
        return drawing.probabilities(depths)

    def draw(self, x: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> list[int]:
        """A random token of each row, by its probability at the temperature and after truncation.

        x: [n, V], any float dtype, V contiguous. peaks: float32 [n], the largest of each row, finite. draws: [n].
        """
        return drawing.tokens_of(drawing.truncated(x, peaks, draws, self.fixed_point_probabilities), draws)


reference = Kernels()
