"""Sums and exchanges of tensors between processes of one machine, through memory that they share."""

import ctypes
import mmap

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.tensors import DTYPES

SLOT_BYTES = 1 << 20
"""Larger tensors go in pieces: these stay in the processors' caches."""

Group = structure("Group")


def region_bytes(library: ctypes.CDLL, size: int) -> int:
    """The bytes of the memory that `size` ranks share."""
    return int(library.pagewire_region_bytes(size, SLOT_BYTES))


class SharedMemoryGroup:
    """The ranks of a group on one machine. Operations as in `workers.collective.interface.Collective`.

    descriptor: of a file in memory with `region_bytes` zeros, the same for all ranks; it may be closed afterwards.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, library: ctypes.CDLL, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._library = library
        memory = mmap.mmap(descriptor, region_bytes(library, size))
        self._memory = ctypes.c_char.from_buffer(memory)  # it keeps the memory mapped
        region = ctypes.addressof(self._memory)
        self.group = Group(region=region, slot_bytes=SLOT_BYTES, rank=rank, size=size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`. The sum is in the memory of `x` where that is contiguous."""
        if x.dtype not in DTYPES:
            return ordered_sum(self.all_gather(x[..., None]).unbind(-1))
        x = x.contiguous()
        self._library.pagewire_all_reduce(
            ctypes.byref(self.group), x.data_ptr(), x.numel(), DTYPES[x.dtype], torch.get_num_threads()
        )
        return x

    @property
    def native_all_reduce(self) -> tuple[int, int]:
        """See `kernels.reduced.NativeSum`."""
        function = ctypes.cast(self._library.pagewire_all_reduce, ctypes.c_void_p).value
        return function or 0, ctypes.addressof(self.group)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective.all_gather`."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.size * x.shape[-1])
        row_bytes = x.shape[-1] * x.element_size()
        self._library.pagewire_all_gather(
            ctypes.byref(self.group),
            x.data_ptr(),
            out.data_ptr(),
            x.numel() // max(1, x.shape[-1]),
            row_bytes,
        )
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.broadcast`."""
        if not x.is_contiguous():
            raise ValueError("a tensor that takes the values of another rank is contiguous")
        self._library.pagewire_broadcast(ctypes.byref(self.group), x.data_ptr(), x.nbytes, source)
        return x

    def barrier(self) -> None:
        """See `Collective.barrier`."""
        self._library.pagewire_barrier(ctypes.byref(self.group))

    def close(self) -> None:
        """Unmap the memory; the system frees it when the last rank has done so."""
        del self._memory, self.group


def ordered_sum(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """The sum of tensors in their order: of half-precision types in float32, and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)
