"""Draws tokens: see sampling.cpp."""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.tensors import DTYPES, last_contiguous
from pagewire.kernels.data.drawing import ONE, Draw

DrawParameters = structure("Draw")


def parameters(draw: Draw) -> ctypes.Structure:
    """A draw as the library takes it."""
    return DrawParameters(
        seed=draw.seed,  # ctypes takes it modulo 2**64
        position=draw.position,
        min_mass=math.ceil(draw.min_p * ONE),
        top_k=draw.top_k,
        top_p=draw.top_p,
        temperature=draw.temperature,
    )


def draw(library: ctypes.CDLL, x: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> list[int]:
    """See `Kernels.draw`."""
    x = last_contiguous(x)
    if len(peaks) != len(x) or len(draws) != len(x) or peaks.dtype != torch.float32:
        raise ValueError(f"{len(x)} rows with {len(peaks)} peaks of {peaks.dtype} and {len(draws)} draws")
    ids = torch.zeros(len(x), dtype=torch.int64)
    each = (DrawParameters * len(draws))(*map(parameters, draws))
    peaks = peaks.contiguous()
    library.pagewire_draw(
        x.data_ptr(),
        peaks.data_ptr(),
        ctypes.addressof(each),
        ids.data_ptr(),
        *x.shape,
        x.stride(0),
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    return ids.tolist()
