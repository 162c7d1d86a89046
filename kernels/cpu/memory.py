"""Memory in large pages, where the system gives them."""

import math
import mmap

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros. The system gives pages as they are written: taking gigabytes costs no time.

    Raises:
        OSError: there is not so much memory.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without large pages
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
