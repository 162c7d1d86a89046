"""Gated activations: SiLU, and GELU in its tanh form and exact. See `Kernels`."""

import functools

import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import KernelLauncher, pack
from pagewire.kernels.cuda.limits import NoKernelError
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.data.layer import Activation

THREADS = 256
ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH, Activation.GELU)
"""Those that have a kernel."""
BLOCKS = 8
"""Blocks of the grid per multiprocessor: the number that runs at once."""


@functools.cache
def variant(dtype: torch.dtype, activation: Activation) -> Variant:
    """The kernel for an activation."""
    return Variant("gates.cu", f"gate<{DTYPES[dtype]}, {activation.name}>", "Gate")


def variants() -> list[Variant]:
    """The kernel for each dtype and activation."""
    return [variant(dtype, activation) for dtype in DTYPES for activation in ACTIVATIONS]


def activate_and_mul(launcher: KernelLauncher, x: Tensor, activation: Activation) -> Tensor:
    """[..., 2 I] to [..., I]: `activation(first half) * second half`, the activation rounded before the product.

    Args:
        x: bfloat16 or float16; I and the stride of the rows are multiples of 8.

    Raises:
        TypeError: another dtype.
        NoKernelError: another size or stride, or rows are not aligned to 16 bytes.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"activate_and_mul: bfloat16 or float16, not {x.dtype}")
    rows = x.reshape(-1, x.shape[-1])
    size = x.shape[-1] // 2
    if x.shape[-1] % 16 or rows.stride(0) % 8 or rows.stride(1) != 1 or rows.data_ptr() % 16:
        raise NoKernelError(f"activate_and_mul: no kernel for rows of {x.shape[-1]}, strides {rows.stride()}")
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    if out.numel():
        kernel = variant(x.dtype, activation)
        parameters = pack(kernel, x=rows, out=out, row_stride=rows.stride(0), num_rows=len(rows), size=size)
        num_blocks = min(-(-out.numel() // (8 * THREADS)), BLOCKS * launcher.multiprocessors)
        launcher.launch(kernel, (num_blocks,), (THREADS,), parameters)
    return out
