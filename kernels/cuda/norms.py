"""RMS norm, alone and after adding to a residual. See `Kernels`."""

import functools

import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.limits import NoKernelError
from pagewire.kernels.cuda.source import Variant

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SHAPES = ((32, 1), (32, 2), (128, 1), (128, 2), (256, 2), (512, 2), (512, 4), (512, 8))
"""Threads of a block, and runs of 8 elements per thread: up to 32,768 elements per row."""


@functools.cache
def variant(dtype: torch.dtype, shape: tuple[int, int], add: bool) -> Variant:
    """The kernel for rows that fit a shape. add: add the row to a residual first."""
    name = f"rms_norm<{DTYPES[dtype]}, {shape[0]}, {shape[1]}, {str(add).lower()}>"
    return Variant("norms.cu", name, "RmsNorm")


def variants() -> list[Variant]:
    """The kernel for each dtype and shape, with and without the sum before the norm."""
    return [variant(dtype, shape, add) for dtype in DTYPES for shape in SHAPES for add in (False, True)]


def rms_norm(
    launcher: KernelLauncher,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `Kernels.rms_norm`, and with a residual `Kernels.add_rms_norm`.

    Raises:
        TypeError: another dtype than bfloat16 or float16, or the dtypes differ.
        ValueError: shapes disagree.
        NoKernelError: a row is not aligned to 16 bytes, no multiple of 8 elements, or too long.
    """
    size = x.shape[-1]
    rows = x if x.dim() == 3 else x.reshape(1, -1, size)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors = [x, weight, out] if residual is None else [x, weight, out, residual]
    if x.dtype not in DTYPES or any(tensor.dtype != x.dtype for tensor in tensors):
        raise TypeError(f"rms_norm: bfloat16 or float16, not {', '.join(str(t.dtype) for t in tensors)}")
    shape = next((shape for shape in SHAPES if size <= 8 * shape[0] * shape[1]), None)
    if shape is None or size % 8 or any(stride % 8 for stride in rows.stride()[:2]) or rows.stride(2) != 1:
        raise NoKernelError(f"rms_norm: no kernel for rows of {size}, strides {rows.stride()}")
    if weight.shape != (size,) or any(not _fits(tensor, x) for tensor in tensors[2:]):
        raise ValueError(f"rms_norm: shapes disagree: {[tuple(tensor.shape) for tensor in tensors]}")
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        raise NoKernelError("rms_norm: tensors must be aligned to 16 bytes")
    if x.numel():
        kernel = variant(x.dtype, shape, residual is not None)
        parameters = pack(
            kernel,
            x=rows,
            residual=residual,
            weight=weight,
            out=out,
            outer_stride=rows.stride(0),
            inner_stride=rows.stride(1),
            inner=rows.shape[1],
            size=size,
            eps=eps,
            offset=offset,
        )
        launcher.launch(kernel, (rows.shape[0] * rows.shape[1],), (shape[0],), parameters)
    return out


def _fits(tensor: Tensor, x: Tensor) -> bool:
    return tensor.shape == x.shape and tensor.is_contiguous()
