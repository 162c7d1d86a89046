"""The CUDA kernels."""

import functools
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from pagewire.kernels.cuda import (
    attention,
    gates,
    indexing,
    kv,
    latents,
    linear,
    lora,
    norms,
    quantised_linear,
    states,
)
from pagewire.kernels.cuda import experts as cuda_experts
from pagewire.kernels.cuda.launch import CudaLauncher, KernelLauncher
from pagewire.kernels.cuda.layout import REPLACEMENTS
from pagewire.kernels.cuda.limits import NoKernelError
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.layer import Activation, Angles, Experts, HeadNorms, LimitedGate
from pagewire.kernels.data.paging import CAUSAL, AttentionBatch, Cache, LogitTerms
from pagewire.kernels.data.weight import Linear, UnpackedLinear, Weight, dense_weight
from pagewire.kernels.reference.kernels import Kernels

PREFERRED = frozenset(
    (
        attention.WARPGROUPS,
        linear.FEWEST,
        linear.UNPACKED,
        quantised_linear.INTEGERS,
        quantised_linear.FLOATS,
    )
)
"""Names, as of methods, of what the fastest kernels compute, for which others stand in: those with the products of
warpgroups, products of the fewest rows, those that unpack weights, and those of rows in 8 bits."""
STAND_INS = dict.fromkeys(PREFERRED, "the kernel for all GPUs") | {
    latents.METHOD: "the kernel for expanded heads"
}
"""What comes in the place of kernels with such names. PyTorch comes in the place of others."""


@functools.cache
def load(index: int) -> "CudaKernels":
    """The kernels for the device `cuda:index`, compiled at first use.

    Raises:
        LaunchError, CompileError: see `CudaLauncher.at`.
    """
    return CudaKernels(CudaLauncher.at(index), f"cuda:{index}")


def serves(tensors: Sequence[Tensor]) -> bool:
    """True if kernels support these tensors: one 16-bit float dtype, and 8-bit floats for cached K and V."""
    dtype = tensors[0].dtype
    return dtype in norms.DTYPES and all(tensor.dtype in (dtype, *kv.FP8) for tensor in tensors)


class CudaKernels(Kernels):
    """The kernels of one GPU.

    PyTorch computes what has no kernel of its own: rare operations, and those that the fast path fuses into others.
    on: the device's memory, where the workspace of attention is allocated.
    replaced: methods that PyTorch computes although they have kernels, see `replace`.
    preferred: of `PREFERRED`, what these kernels compute, where the GPU has their products.
    batch_invariant: the bits of a row depend on no other row, for slower attention and products.
    latents: see `Kernels`; empty if they are to be expanded.
    """

    multiplies_floats = True

    def __init__(self, launcher: KernelLauncher, on: torch.device | str) -> None:
        self.launcher = launcher
        self.replaced: set[str] = set()
        self.preferred = PREFERRED
        self.batch_invariant = False
        self.latents: frozenset[tuple[int, int]] = frozenset(latents.LATENTS.items())
        self.states = states.CudaStateKernels(launcher)
        self.index_scores = dict.fromkeys(indexing.SIZES, functools.partial(indexing.index_scores, launcher))
        self._workspace = attention.Workspace.allocate(launcher.multiprocessors, on)

    def replace(self, method: str) -> None:
        """Let PyTorch compute a method from now on: its kernel is wrong on this device.

        In the place of some come other kernels, see `STAND_INS`.
        """
        if method in STAND_INS:
            self.preferred -= {method}
            if method == latents.METHOD:
                self.latents = frozenset()
            return
        setattr(self, method, getattr(REPLACEMENTS, method))
        self.replaced.add(method)

    def paged_attention(
        self,
        q: Tensor,
        cache: Cache,
        batch: AttentionBatch,
        scale: float,
        terms: LogitTerms = CAUSAL,
        out: Tensor | None = None,
    ) -> Tensor:
        use = (self.launcher, self._workspace)
        if cache.values_in_keys:
            return latents.attend(*use, q, cache, batch, scale, terms, out)
        return attention.paged_attention(
            *use,
            q,
            cache,
            batch,
            scale,
            terms,
            out,
            warpgroups=attention.WARPGROUPS in self.preferred,
            invariant=self.batch_invariant,
        )

    def store_kv(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
        if cache.values_in_keys:
            latents.write(self.launcher, k, cache, slot_mapping)
        else:
            kv.write_kv(self.launcher, None, k, v, cache, slot_mapping)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        try:
            return norms.rms_norm(self.launcher, x, weight, eps, offset=offset, out=out)
        except NoKernelError:
            if self.batch_invariant:
                raise
            return super().rms_norm(x, weight, eps, offset=offset, out=out)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> Tensor:
        try:
            return norms.rms_norm(self.launcher, x, weight, eps, offset=offset, residual=residual)
        except NoKernelError:
            if self.batch_invariant:
                raise
            return super().add_rms_norm(x, residual, weight, eps, offset=offset)

    def activate_and_mul(self, x: Tensor, activation: Activation | LimitedGate) -> Tensor:
        if isinstance(activation, Activation) and activation in gates.ACTIVATIONS:
            with suppress(NoKernelError):
                return gates.activate_and_mul(self.launcher, x, activation)
        return super().activate_and_mul(x, activation)

    def pack(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """See `pagewire.kernels.linear.pack`. Integers and 8-bit floats stay packed.

        A weight that has no kernel is made dense, see `linear.why_not`. Where rows keep 16 bits,
        `quantised_linear.why_not` says why.
        """
        rounds_rows = quantised_linear.why_not(weight, self.launcher.capability) is None
        if rounds_rows and quantised_linear.kind_of(weight) in self.preferred:
            return quantised_linear.QuantisedRowsLinear(self.launcher, weight, bias)
        if linear.why_not(weight) is None:
            fewest, unpacks = (
                method in self.preferred and not self.batch_invariant
                for method in (linear.FEWEST, linear.UNPACKED)
            )
            return linear.PackedWeightLinear(self.launcher, weight, bias, fewest=fewest, unpacks=unpacks)
        if self.batch_invariant:
            return UnpackedLinear(self.linear, dense_weight(weight.dense().contiguous()), bias)
        return REPLACEMENTS.pack(weight, bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.batch_invariant:
            return linear.dense_linear(self.launcher, x, weight, bias)
        return super().linear(x, weight, bias)

    def experts(self, experts: Experts) -> cuda_experts.CudaExperts | None:
        """See `Kernels.experts`; `experts.why_not` says why experts are called one by one."""
        if cuda_experts.why_not(experts) is not None:
            return None
        return cuda_experts.CudaExperts(self.launcher, experts, self.activate_and_mul)

    def adapt(self, x: Tensor, out: Tensor, rows: AdapterRows, product: int) -> None:
        """See `pagewire.kernels.adapted.adapt`.

        PyTorch adapts grouped products, and puts weights in the place of the model's: there a row's bits may depend
        on the batch.
        """
        others: AdapterRows | None = rows
        if rows.num_matrices == 1:
            others = lora.adapt(self.launcher, x, out, rows, product)
        if others is not None:
            super().adapt(x, out, others, product)

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
        """See `Kernels.rotate_and_store`; one kernel, which refuses norms of two eps.

        PyTorch rotates as many elements as no kernel rotates.
        """
        if angles is not None and angles[0].shape[-1] % kv.ROTATED:
            if head_norms is not None:
                q, k = (
                    self.rms_norm(x, norm.weight, norm.eps, offset=norm.offset)
                    for x, norm in zip((q, k), head_norms, strict=True)
                )
            self.rotary(q, k, *angles)
            angles = head_norms = None
        changed = None if angles is None and head_norms is None else q
        kv.write_kv(self.launcher, changed, k, v, cache, slot_mapping, angles, head_norms)
        return q
