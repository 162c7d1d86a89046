"""Chooses the implementation of the kernels by a tensor's device and dtype."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.deltas import AdapterRows
from pagewire.kernels.integers import Integers
from pagewire.kernels.kv_codes import DTYPE as KV_CODES
from pagewire.kernels.layer import (
    Activation,
    Angles,
    EncoderLayer,
    Experts,
    HeadNorms,
    Layer,
    LayerNorm,
    Norm,
)
from pagewire.kernels.paging import CAUSAL, AttentionBatch, Cache, LogitTerms
from pagewire.kernels.weight import Linear, Weight


class ExpertProducts(Protocol):
    """The products of a layer's experts, packed by an implementation."""

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, adapters: AdapterRows | None = None, first: int = 0
    ) -> Tensor:
        """See `pagewire.kernels.experts.GroupedExperts`; the experts' activation is one that the kernels have."""

    def up(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [R, H] to [R, N]: the first `counts[0]` of them by the first expert, and so on."""

    def down(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [R, I] to [R, H], likewise."""


class Kernels(Protocol):
    """The methods of an implementation; the modules with the public functions document each."""

    def paged_attention(
        self,
        q: Tensor,
        cache: Cache,
        batch: AttentionBatch,
        scale: float,
        terms: LogitTerms = CAUSAL,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def store_kv(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None: ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, out: Tensor | None = None
    ) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> Tensor: ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
    ) -> Tensor: ...

    def activate_each(self, x: Tensor, activation: Activation) -> Tensor: ...

    def silu_and_mul(self, x: Tensor) -> Tensor: ...

    def gelu_and_mul(self, x: Tensor) -> Tensor: ...

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor: ...

    def clamped_swiglu(self, x: Tensor) -> Tensor: ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Angles,
        head_norms: HeadNorms | None,
        cache: Cache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Norm heads, rotate queries and keys, store keys and values. Returns the queries; may overwrite q, k."""

    def pack(self, weight: Weight, bias: Tensor | None = None) -> Linear: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def quantise(self, weight: Weight, scheme: Integers, scale_dtype: torch.dtype) -> Weight:
        """See `pagewire.kernels.quantising.quantise`; scheme and shape are checked."""

    def dense(self, weight: Weight) -> Tensor:
        """See `pagewire.kernels.quantising.dense`; the scheme is `Integers`."""

    def adapt(self, x: Tensor, out: Tensor, rows: AdapterRows, product: int) -> None:
        """See `pagewire.kernels.adapted.adapt`; x [T, K] and out [T, N] are checked."""

    def stack(self, input_norm: Norm, layers: Sequence[Layer]) -> Callable[..., Tensor] | None: ...

    def encoder(
        self, layers: Sequence[EncoderLayer], input_norm: LayerNorm | None, *, norm_first: bool
    ) -> Callable[..., Tensor] | None: ...

    def experts(self, experts: Experts) -> ExpertProducts | None:
        """The products of all experts in one call each; None if they are called one by one."""

    def route(
        self, logits: Tensor, num_chosen: int, *, normalised: bool, rounded: bool
    ) -> tuple[Tensor, Tensor]: ...

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> None: ...

    def largest(self, x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    def only_allowed(self, x: Tensor, allowed: Tensor) -> Tensor: ...

    def fixed_point_probabilities(self, depths: Tensor) -> Tensor: ...


def implementation_for(*tensors: Tensor) -> Kernels:
    """The fastest implementation for tensors on this device and of these dtypes. None of them keeps gradients.

    tensors: the first is of the model's dtype; caches among the others may be of 8 bits.

    Raises:
        NotImplementedError: the tensors are neither on the CPU nor on a GPU.
        LaunchError, CompileError: the CUDA kernels cannot be loaded, see `cuda.launch`.
    """
    device = tensors[0].device
    if device.type == "cuda":
        from pagewire.kernels.cuda import kernels as cuda_kernels  # never imported where there is no GPU

        return cuda_kernels.load(device.index) if cuda_kernels.serves(tensors) else reference
    if device.type != "cpu":
        raise NotImplementedError(f"no kernels for device {device.type!r}: 'cpu' and 'cuda' are served")
    dtype = tensors[0].dtype
    if dtype in DTYPES and all(tensor.dtype in (dtype, KV_CODES) for tensor in tensors):
        return cpu_kernels.load() or reference
    return reference
