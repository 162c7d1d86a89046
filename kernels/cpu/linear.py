"""Linear layers over the panels of linear.cpp."""

import ctypes
import math

import torch
from torch import Tensor

from pagewire.kernels.cpu.memory import zeros
from pagewire.kernels.cpu.panels import Panels
from pagewire.kernels.cpu.tensors import DTYPES, last_contiguous, of_size
from pagewire.kernels.data.weight import Weight, check_rows

PACKED_ROWS = 1024  # rows of a weight packed at a time, whole panels of any instruction set


class PackedLinear:
    """A linear layer over a packed weight [N, K]: see `pagewire.kernels.linear.pack`."""

    def __init__(self, library: ctypes.CDLL, panels: Panels, weight: Weight, bias: Tensor | None) -> None:
        self._describe(library, panels, weight.shape, weight.dtype, bias)
        self.packed = zeros((self._packed_size(self.out_features),), weight.dtype)
        for start in range(0, self.out_features, PACKED_ROWS):
            rows = weight.slice(start, min(start + PACKED_ROWS, self.out_features)).dense()
            self._pack(last_contiguous(rows), self.packed[self._packed_size(start) :])

    @classmethod
    def of_packed(
        cls,
        library: ctypes.CDLL,
        panels: Panels,
        packed: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
    ) -> "PackedLinear":
        """The linear layer whose `packed`, `bias` and shape [N, K] these are; packed by a library of the same code.

        Raises:
            ValueError: they do not fit each other.
        """
        linear = cls.__new__(cls)
        linear._describe(library, panels, shape, packed.dtype, bias)
        if packed.shape != (size := linear._packed_size(shape[0]),):
            raise ValueError(
                f"{size} packed numbers expected for a weight {shape}, not {tuple(packed.shape)}"
            )
        linear.packed = packed
        return linear

    def _describe(
        self,
        library: ctypes.CDLL,
        panels: Panels,
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: Tensor | None,
    ) -> None:
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.bias = None if bias is None else of_size(bias, self.out_features)
        self.num_bytes = math.prod(shape) * dtype.itemsize + (0 if bias is None else bias.nbytes)
        self._library, self._panels, self._code = library, panels, DTYPES[dtype]

    def _packed_size(self, num_rows: int) -> int:
        """The number of elements that this many rows take when they are packed."""
        return self._panels.float_size(num_rows, self.in_features, str(self.dtype).removeprefix("torch."))

    def _pack(self, rows: Tensor, to: Tensor) -> None:
        self._library.pagewire_pack(
            rows.data_ptr(),
            to.data_ptr(),
            *rows.shape,
            rows.stride(0),
            self._code,
            torch.get_num_threads(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        check_rows(x, self.in_features, self.dtype)
        rows = as_rows(x)
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        self._library.pagewire_linear(
            rows.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            self.in_features,
            self.out_features,
            rows.stride(0),
            self._code,
            torch.get_num_threads(),
        )
        return out


def multiply_unpacked(library: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] by a weight [N, K] as it is: see `Kernels.linear`."""
    if weight.device != x.device:
        raise ValueError(f"a weight on {weight.device} for rows on {x.device}")
    check_rows(x, weight.shape[1], weight.dtype)
    rows, weight = as_rows(x), last_contiguous(weight)
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


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] as [M, K], its last axis contiguous."""
    return last_contiguous(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
