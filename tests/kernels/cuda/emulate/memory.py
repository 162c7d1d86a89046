"""Tensors in front of inaccessible memory: an access beyond their end is detected."""

import ctypes
import mmap

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(tensor: Tensor) -> Tensor:
    """A contiguous copy that ends, up to its alignment to 16 bytes, before a page that cannot be accessed."""
    size = -(-tensor.nbytes // 16) * 16
    mapped = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, mapped + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _LIBC.mprotect(ctypes.c_void_p(address + mapped), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=mapped)
    raw = raw[mapped - size :][: tensor.nbytes]
    raw.copy_(tensor.contiguous().flatten().view(torch.uint8))
    return raw.view(tensor.dtype).view(tensor.shape)
