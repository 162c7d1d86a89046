"""The experts of experts.cpp, and matrices as the compiled library takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pagewire.kernels.cpu.adapters import RunningRows
from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.linear import PackedLinear, as_rows
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.kernels.cpu.tensors import DTYPES
from pagewire.kernels.data.deltas import AdaptedLinear, first_adapted, plain
from pagewire.kernels.data.layer import OF_EACH, Activation, Experts, Router
from pagewire.kernels.data.routing import ExpertGroups
from pagewire.kernels.data.weight import Linear, check_rows

Matrix, GroupedCall, ExpertsStruct, ExpertsCall, RoutingStruct = map(
    structure, ("Matrix", "GroupedCall", "Experts", "ExpertsCall", "Routing")
)
ACTIVATION_CODES = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.CLAMPED_SWIGLU: 2,
    Activation.GELU: 3,
    Activation.GELU_QUICK: 4,
    Activation.RELU: 5,
    Activation.RELU_SQUARED: 6,
}
"""The numbers of activations in activations.cpp."""


def routing_struct(router: Router, num_experts: int) -> ctypes.Structure:
    """How a router chooses from this many experts, as the library takes it; its bias must live as long.

    Raises:
        ValueError: see `Routing.check`, or the bias is none of theirs.
    """
    routing, bias = router.routing, router.bias
    routing.check(num_experts)
    if bias is not None and not (
        bias.shape == (num_experts,) and bias.dtype == torch.float32 and bias.is_contiguous()
    ):
        raise ValueError(f"a bias float32 [{num_experts}] expected")
    groups = routing.groups or ExpertGroups(1, 1)
    return RoutingStruct(
        bias=None if bias is None else bias.data_ptr(),
        num_chosen=routing.num_chosen,
        groups=groups.count,
        kept_groups=groups.kept,
        best=groups.best,
        epsilon=routing.epsilon,
        factor=routing.factor,
        margin=routing.margin,
        sigmoid=routing.sigmoid,
        normalised=routing.normalised,
        weight_dtype=DTYPES[routing.dtype],
        logit_dtype=DTYPES[router.linear.dtype],
    )


def is_packed(linear: Linear) -> bool:
    """True if linear.cpp or quantised.cpp computes it, but for what adapters change."""
    return isinstance(plain(linear), PackedLinear | QuantisedLinear)


def matrix(linear: Linear) -> ctypes.Structure:
    """A packed linear layer as the library takes it; it must live as long as the struct."""
    packed = plain(linear)
    assert isinstance(packed, PackedLinear | QuantisedLinear)
    return Matrix(
        packed=packed.packed.data_ptr(),
        bias=None if packed.bias is None else packed.bias.data_ptr(),
        integers=packed.struct_address if isinstance(packed, QuantisedLinear) else None,
        n=linear.out_features,
        k=linear.in_features,
        number=linear.number if isinstance(linear, AdaptedLinear) else -1,
    )


class Matrices:
    """Linear layers of equal shape, such as those of each expert; see `Kernels.grouped`."""

    @classmethod
    def of(cls, library: ctypes.CDLL, linears: Sequence[Linear]) -> Matrices | None:
        """None if not all are packed weights, dense or quantised.

        Raises:
            ValueError: they differ in shape or dtype.
        """
        if not linears or not all(map(is_packed, linears)):
            return None
        forms = {(linear.out_features, linear.in_features, linear.dtype) for linear in linears}
        if len(forms) > 1:
            raise ValueError(f"experts differ: {sorted(map(str, forms))}")
        return cls(library, linears)

    def __init__(self, library: ctypes.CDLL, linears: Sequence[Linear]) -> None:
        first_adapted(linears)  # refuses numbers that do not follow one another
        self._library, self.linears = library, linears
        self.structs = (Matrix * len(linears))(*map(matrix, linears))
        first = linears[0]
        self.dtype, self.in_features, self.out_features = first.dtype, first.in_features, first.out_features

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """See `GroupedProduct`."""
        check_rows(rows, self.in_features, self.dtype)
        if len(counts) != len(self.structs) or sum(counts) != len(rows) or min(counts) < 0:
            raise ValueError(f"{len(rows)} rows for {len(self.structs)} experts, which get {counts}")
        rows = as_rows(rows)
        out = rows.new_empty(len(rows), self.out_features)
        starts = (ctypes.c_int64 * (len(counts) + 1))(*accumulate(counts, initial=0))
        call = GroupedCall(
            matrices=ctypes.addressof(self.structs),
            starts=ctypes.addressof(starts),
            x=rows.data_ptr(),
            out=out.data_ptr(),
            count=len(counts),
            x_stride=rows.stride(0),
            dtype=DTYPES[self.dtype],
            num_threads=torch.get_num_threads(),
        )
        self._library.pagewire_grouped(ctypes.byref(call))
        return out


class CompiledExperts:
    """The experts of a layer in one call; see `pagewire.kernels.experts.GroupedExperts`."""

    @classmethod
    def of(cls, library: ctypes.CDLL, experts: Experts) -> CompiledExperts | None:
        """None if not all linear layers are packed weights, or the activation between them is not compiled.

        Raises:
            ValueError: they differ in shape or dtype.
        """
        up, down = (Matrices.of(library, linears) for linears in (experts.up, experts.down))
        if up is None or down is None or not isinstance(experts.activation, Activation):
            return None
        return cls(
            library, up, down, experts.activation, weighs_inputs=experts.weighs_inputs, gated=experts.gated
        )

    def __init__(
        self,
        library: ctypes.CDLL,
        up: Matrices,
        down: Matrices,
        activation: Activation,
        *,
        weighs_inputs: bool,
        gated: bool,
    ) -> None:
        self._library, self._up, self._down = library, up, down
        self.hidden_size, self.scratch_width = up.in_features, up.in_features + up.out_features
        self._dtype, self._rows = up.dtype, RunningRows((*up.linears, *down.linears))
        sizes = (1 + gated) * down.in_features, down.out_features
        fit = len(up.linears) == len(down.linears) and sizes == (up.out_features, up.in_features)
        # What takes pairs of elements is a gate.
        if not fit or activation not in ACTIVATION_CODES or not (gated or activation in OF_EACH):
            raise ValueError(f"experts {up.out_features} and {down.in_features} wide with {activation}")
        self.struct = ExpertsStruct(
            up=ctypes.addressof(up.structs),
            down=ctypes.addressof(down.structs),
            count=len(up.linears),
            activation=ACTIVATION_CODES[activation],
            weighs_inputs=weighs_inputs,
            gated=gated,
        )

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids int64 [T, C] and weights [T, C] to [T, H].

        Raises:
            ValueError: shapes or dtypes do not fit, or an id is of no expert.
        """
        adapters = self._rows.take(len(x), self._dtype)
        check_rows(x, self.hidden_size, self._dtype)
        if (
            ids.dim() != 2
            or ids.dtype != torch.int64
            or weights.shape != ids.shape
            or x.shape[:-1] != ids.shape[:1]
        ):
            raise ValueError(
                f"{ids.dtype} {tuple(ids.shape)} and {tuple(weights.shape)} for x {tuple(x.shape)}"
            )
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.to(torch.float32).contiguous()
        out = torch.empty_like(x)
        scratch = x.new_empty(ids.numel() * self.scratch_width)
        call = ExpertsCall(
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
            scratch=scratch.data_ptr(),
            num_tokens=len(x),
            num_chosen=ids.shape[1],
            dtype=DTYPES[self._dtype],
            num_threads=torch.get_num_threads(),
            adapters=None if adapters is None else ctypes.addressof(adapters),
        )
        if self._library.pagewire_experts(ctypes.byref(self.struct), ctypes.byref(call)):
            raise ValueError(f"an id is of none of {self.struct.count} experts")
        return out
