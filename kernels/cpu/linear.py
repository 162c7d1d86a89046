"""Linear layers over the panels of linear.cpp."""

import ctypes

import torch
from torch import Tensor

from pagewire.kernels.cpu.memory import zeros
from pagewire.kernels.cpu.tensors import DTYPES, last_contiguous, of_size


class PackedLinear:
    """A linear layer over a packed weight [N, K]: see `pagewire.kernels.linear.pack`."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        weight = last_contiguous(weight)
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else of_size(bias, self.out_features)
        self._library, self._dtype = library, DTYPES[weight.dtype]
        size = library.pagewire_packed_size(self.out_features, self.in_features, self._dtype)
        self.packed = zeros((size,), weight.dtype)
        library.pagewire_pack(
            weight.data_ptr(),
            self.packed.data_ptr(),
            *weight.shape,
            weight.stride(0),
            self._dtype,
            torch.get_num_threads(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        if x.shape[-1] != self.in_features or x.dtype != self.packed.dtype:
            raise ValueError(
                f"a row of {x.shape[-1]} {x.dtype} by {self.in_features} {self.packed.dtype} expected"
            )
        rows = _rows(x)
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        self._library.pagewire_linear(
            rows.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            len(rows),
            self.in_features,
            self.out_features,
            rows.stride(0),
            self._dtype,
            torch.get_num_threads(),
        )
        return out


def multiply_unpacked(library: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] by a weight [N, K] as it is: see `pagewire.kernels.linear.linear`."""
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"a row of {x.shape[-1]} {x.dtype} by {weight.shape[1]} {weight.dtype} expected")
    rows, weight = _rows(x), last_contiguous(weight)
    bias = None if bias is None else of_size(bias, len(weight))
    out = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype)
    library.pagewire_linear_unpacked(
        rows.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        len(rows),
        weight.shape[1],
        len(weight),
        rows.stride(0),
        weight.stride(0),
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def _rows(x: Tensor) -> Tensor:
    return last_contiguous(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
