"""Numbers to integers with scales, and back, by integers.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.tensors import DTYPES, last_contiguous
from pagewire.kernels.data.integers import NOT_FINITE, Integers, integer_weight, row_blocks
from pagewire.kernels.data.weight import DENSE, Weight

IntegersStruct = structure("Integers")


class SchemeStruct:
    """A scheme with the dtype of its scales, as the library reads it; valid as long as this object."""

    def __init__(self, scheme: Integers, scale_dtype: torch.dtype, has_offsets: bool) -> None:
        self._table = None if scheme.table is None else (ctypes.c_uint8 * 16)(*scheme.table)
        self._struct = IntegersStruct(
            table=None if self._table is None else ctypes.addressof(self._table),
            group=scheme.group or 0,
            bits=scheme.bits,
            zero=scheme.zero,
            scale_dtype=DTYPES[scale_dtype],
            offsets=has_offsets,
        )

    @property
    def address(self) -> int:
        """Where it lies."""
        return ctypes.addressof(self._struct)


def quantise(library: ctypes.CDLL, weight: Weight, scheme: Integers, scale_dtype: torch.dtype) -> Weight:
    """See `pagewire.kernels.linear.quantise`."""
    num_rows, num_in = weight.shape
    codes = torch.empty(num_rows, num_in // scheme.per_byte, dtype=torch.uint8)
    scales = torch.empty(num_rows, num_in // (scheme.group or num_in), dtype=scale_dtype)
    offsets = None if scheme.zero else torch.empty_like(scales)
    struct, first = SchemeStruct(scheme, scale_dtype, offsets is not None), 0
    for numbers in _numbers(weight):
        failed = library.pagewire_quantise(
            numbers.data_ptr(),
            codes[first:].data_ptr(),
            scales[first:].data_ptr(),
            None if offsets is None else offsets[first:].data_ptr(),
            *numbers.shape,
            numbers.stride(0),
            struct.address,
            DTYPES[numbers.dtype],
            torch.get_num_threads(),
        )
        if failed:
            raise ValueError(NOT_FINITE)
        first += len(numbers)
    return integer_weight(scheme, codes, scales, offsets, weight.dtype)


def dense(library: ctypes.CDLL, weight: Weight) -> Tensor:
    """See `pagewire.kernels.linear.dense`."""
    scheme = weight.scheme
    assert isinstance(scheme, Integers)
    codes, scales, *offsets = (part.contiguous() for part in weight.parts)
    struct = SchemeStruct(scheme, scales.dtype, bool(offsets))
    out = torch.empty(weight.shape, dtype=weight.dtype)
    library.pagewire_dequantise(
        codes.data_ptr(),
        scales.data_ptr(),
        offsets[0].data_ptr() if offsets else None,
        out.data_ptr(),
        *weight.shape,
        struct.address,
        DTYPES[weight.dtype],
        torch.get_num_threads(),
    )
    return out


def _numbers(weight: Weight) -> Iterator[Tensor]:
    """The rows of a weight in blocks [n, K] that the library reads: as they lie there, or converted to float32."""
    if weight.scheme is DENSE and all(part.dtype in DTYPES and part.stride(1) == 1 for part in weight.parts):
        yield from weight.parts
        return
    for start, stop in row_blocks(*weight.shape):
        yield last_contiguous(replace(weight.slice(start, stop), dtype=torch.float32).dense())
