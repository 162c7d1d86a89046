"""Sums and exchanges of tensors between processes of one machine, through memory that they share."""

import copy
import ctypes
import mmap

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.tensors import DTYPES

SLOT_BYTES = 1 << 20
"""Larger tensors go in pieces: these stay in the processors' caches."""

LINK_PIECES = 16
"""Of `SLOT_BYTES`, which may be on their way from one rank to another; only those that are used take memory."""

Group, Link = structure("Group"), structure("Link")


def region_bytes(library: ctypes.CDLL, size: int, stages: int = 1) -> int:
    """The bytes of the memory that `size` ranks share, in a pipeline of `stages`."""
    return links_at(library, size, stages) + (stages > 1) * size * link_bytes(library)


def part_at(library: ctypes.CDLL, size: int, stages: int, stage: int) -> int:
    """The offset of the memory that the ranks of a stage share: after the memory that all ranks share."""
    stage_bytes = library.pagewire_region_bytes(size // stages, SLOT_BYTES)
    return int(library.pagewire_region_bytes(size, SLOT_BYTES) + stage * stage_bytes)


def links_at(library: ctypes.CDLL, size: int, stages: int) -> int:
    """Where the links begin: one from each rank."""
    return part_at(library, size, stages, stages if stages > 1 else 0)


def link_bytes(library: ctypes.CDLL) -> int:
    """The bytes of a link."""
    return int(library.pagewire_link_bytes(SLOT_BYTES, LINK_PIECES))


class SharedMemoryGroup:
    """The ranks of a group on one machine. Operations as in `workers.collective.interface.Collective`.

    descriptor: of a file in memory with `region_bytes` zeros, the same for all ranks; it may be closed afterwards.
    stages: the ranks form a pipeline of this many stages. Then each stage has a `part`, and each rank sends to the
        one of the same place in the next stage.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, library: ctypes.CDLL, descriptor: int, rank: int, size: int, stages: int = 1) -> None:
        self.rank, self.size = rank, size
        self._library, self._stages = library, stages
        memory = mmap.mmap(descriptor, region_bytes(library, size, stages))
        self._memory = ctypes.c_char.from_buffer(memory)  # it keeps the memory mapped
        self.group = self._group(0, rank, size)

    def _group(self, place: int, rank: int, size: int) -> ctypes.Structure:
        region = ctypes.addressof(self._memory) + place
        return Group(region=region, slot_bytes=SLOT_BYTES, rank=rank, size=size)

    def _link(self, source: int, target: int) -> ctypes.Structure:
        if self._stages == 1 or target != source + self.size // self._stages or not 0 <= source < self.size:
            raise ValueError(f"there is no link from rank {source} to rank {target}")
        place = links_at(self._library, self.size, self._stages) + source * link_bytes(self._library)
        region = ctypes.addressof(self._memory) + place
        return Link(region=region, piece_bytes=SLOT_BYTES, num_pieces=LINK_PIECES)

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

    def part(self, size: int) -> "SharedMemoryGroup":
        """See `Collective.part`; `size` is that of a stage."""
        if self._stages == 1 or size * self._stages != self.size:
            raise ValueError(f"{self.size} ranks in {self._stages} stages have no parts of {size}")
        stage, rank = divmod(self.rank, size)
        part = copy.copy(self)
        part.rank, part.size, part._stages = rank, size, 1
        part.group = self._group(part_at(self._library, self.size, self._stages, stage), rank, size)
        return part

    def send(self, x: Tensor, target: int) -> None:
        """See `Collective.send`; to the next stage."""
        x, link = x.contiguous(), self._link(self.rank, target)
        self._library.pagewire_send(ctypes.byref(link), x.data_ptr(), x.nbytes)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.receive`; from the stage before."""
        if not x.is_contiguous():
            raise ValueError("a tensor that takes the values of another rank is contiguous")
        link = self._link(source, self.rank)
        self._library.pagewire_receive(ctypes.byref(link), x.data_ptr(), x.nbytes)
        return x

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
