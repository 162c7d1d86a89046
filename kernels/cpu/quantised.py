"""Linear layers over the quantised panels of quantised.cpp."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.cpu.integers import SchemeStruct
from pagewire.kernels.cpu.linear import PACKED_ROWS, as_rows
from pagewire.kernels.cpu.memory import zeros
from pagewire.kernels.cpu.panels import NumberFormat, Panels
from pagewire.kernels.cpu.tensors import DTYPES, of_size
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.weight import Weight, check_rows


@dataclass(frozen=True, slots=True)
class PackedForm:
    """What a packed weight holds: with it, bytes that were packed by the same library can be used again."""

    scheme: Integers
    shape: tuple[int, int]
    dtype: torch.dtype
    """Of the product's inputs and outputs."""
    scale_dtype: torch.dtype
    """Of the scales, and of the offsets."""
    has_offsets: bool

    @classmethod
    def of(cls, weight: Weight) -> PackedForm:
        """The form of a weight whose scheme is `Integers`."""
        assert isinstance(weight.scheme, Integers)
        _, scales, *offsets = weight.parts
        return cls(weight.scheme, weight.shape, weight.dtype, scales.dtype, bool(offsets))

    @property
    def stored(self) -> NumberFormat:
        """What its size depends on."""
        return NumberFormat(self.scheme.bits, self.scheme.group, self.has_offsets, self.scale_dtype.itemsize)


class QuantisedLinear:
    """A linear layer over a packed quantised weight [N, K]: see `pagewire.kernels.linear.pack`.

    The product is defined by `pagewire.kernels.reference.quantised.quantised_linear`, and has its bits.
    """

    def __init__(self, library: ctypes.CDLL, panels: Panels, weight: Weight, bias: Tensor | None) -> None:
        self._bind(library, panels, PackedForm.of(weight), bias)
        self.packed = zeros((self._packed_size(self.out_features),), torch.uint8)
        for start in range(0, self.out_features, PACKED_ROWS):
            rows = weight.slice(start, min(start + PACKED_ROWS, self.out_features))
            self._pack(rows, self.packed[self._packed_size(start) :])

    @classmethod
    def of_packed(
        cls, library: ctypes.CDLL, panels: Panels, packed: Tensor, form: PackedForm, bias: Tensor | None
    ) -> QuantisedLinear:
        """The layer over what another's `packed` held, without a copy.

        Args:
            library, panels: those that packed it.
            packed: uint8, flat; its memory is best aligned to 64 bytes.
            form: the other's.
            bias: [N], of the form's dtype.

        Raises:
            ValueError: it is not as long as such a weight is.
        """
        linear = cls.__new__(cls)
        linear._bind(library, panels, form, bias)
        size = linear._packed_size(linear.out_features)
        if packed.dtype != torch.uint8 or packed.shape != (size,) or not packed.is_contiguous():
            raise ValueError(f"{size} packed bytes expected, not {tuple(packed.shape)} of {packed.dtype}")
        linear.packed = packed
        return linear

    def _bind(self, library: ctypes.CDLL, panels: Panels, form: PackedForm, bias: Tensor | None) -> None:
        self.form, self.scheme, self._library, self._panels = form, form.scheme, library, panels
        self.out_features, self.in_features = form.shape
        self.dtype, self._code = form.dtype, DTYPES[form.dtype]
        self.bias = None if bias is None else of_size(bias, self.out_features)
        self._struct = SchemeStruct(form.scheme, form.scale_dtype, form.has_offsets)
        self.num_bytes = self._packed_size(self.out_features) + (0 if bias is None else bias.nbytes)

    @property
    def struct_address(self) -> int:
        """Where the scheme lies, as the library reads it; valid as long as this layer."""
        return self._struct.address

    def _packed_size(self, num_rows: int) -> int:
        """The number of bytes that this many rows take when they are packed."""
        return self._panels.integer_bytes(num_rows, self.in_features, self.form.stored)

    def _pack(self, rows: Weight, to: Tensor) -> None:
        codes, scales, *offsets = (part.contiguous() for part in rows.parts)
        self._library.pagewire_quantised_pack(
            codes.data_ptr(),
            scales.data_ptr(),
            offsets[0].data_ptr() if offsets else None,
            to.data_ptr(),
            *rows.shape,
            self.struct_address,
            torch.get_num_threads(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        check_rows(x, self.in_features, self.dtype)
        rows = as_rows(x)
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        self._library.pagewire_quantised_linear(
            rows.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            len(rows),
            self.in_features,
            self.out_features,
            rows.stride(0),
            self.struct_address,
            self._code,
            torch.get_num_threads(),
        )
        return out
