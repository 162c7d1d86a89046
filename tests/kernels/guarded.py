"""Tensors that end where memory ends that may be touched; for processes of their own, which a mistake ends."""

import ctypes
import mmap

import torch
from torch import Tensor

from pagewire.kernels.cpu.build import INSTRUCTION_SETS, emulated_tiles
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.library import open_library

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(x: Tensor) -> Tensor:
    """A copy of x that ends at the end of a page; reading or writing behind it ends the process."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), dtype=torch.uint8)
    assert libc.mprotect(memory.data_ptr() + size, mmap.PAGESIZE, 0) == 0
    copy = memory[size - x.nbytes : size].view(x.dtype).view(x.shape)
    copy.copy_(x)
    return copy


def kernels_of(name: str) -> CpuKernels:
    """The kernels for an instruction set, by its name."""
    sets = {isa.name: isa for isa in (*INSTRUCTION_SETS, emulated_tiles())}
    return CpuKernels(sets[name], open_library(sets[name]))
