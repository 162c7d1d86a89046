"""Memory for weights and KV caches: in large pages, where the system gives them, and given back where it can be."""

import math
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pagewire.kernels.cpu import arena
from pagewire.kernels.cpu.arena import LARGE_PAGE, Region, Reserve

CHUNK = 32 * LARGE_PAGE
ALIGNMENT = 64


class _Chunk:
    """Fresh memory that tensors are cut from; it lasts as long as any of them."""

    def __init__(self, region: Region) -> None:
        whole = torch.frombuffer(region.memory, dtype=torch.uint8)
        self.left = whole[region.offset : region.offset + region.size]

    def take(self, size: int) -> Tensor:
        """The next `size` bytes."""
        taken, self.left = self.left[:size], self.left[size + -size % ALIGNMENT :]
        return taken


_chunk: _Chunk | None = None


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros. Its pages are faulted in when they are first written, so gigabytes are allocated at once.

    Small pages cost microseconds each when they are first written, so small tensors share large pages.

    Raises:
        OSError: there is not enough memory.
    """
    global _chunk
    size = math.prod(shape) * dtype.itemsize
    chunk = _chunk
    if chunk is None or len(chunk.left) < size:
        shared = size <= CHUNK // 2
        chunk = _Chunk(Region(CHUNK if shared else size))
        if shared:
            _chunk = chunk
    return chunk.take(size).view(dtype).view(shape)


@contextmanager
def reserved(reserve: Reserve | None) -> Iterator[None]:
    """A context in which `zeros` takes memory from a reserve until it is used up; the rest is given back."""
    global _chunk
    if reserve is None:
        yield
        return
    _chunk = chunk = _Chunk(reserve.region)
    try:
        yield
    finally:
        _chunk = None
        reserve.end(reserve.region.size - len(chunk.left))


def populate(tensor: Tensor) -> bool:
    """Fault in the pages of a contiguous tensor, keeping what is in them; False if the system cannot.

    The first write to a page waits until the system has cleared and mapped it, up to a tenth of the time of a long
    prompt; so call this in idle time, with a few megabytes at once.
    """
    address = tensor.data_ptr() & -mmap.PAGESIZE
    return arena.populate(address, tensor.data_ptr() + tensor.nbytes - address)


def forget_mapped_files(folder: str | os.PathLike[str]) -> None:
    """Give back the pages of mapped files in a folder; when they are read again, they come from the files.

    Mappings that were written to are left alone. Does nothing where there is no /proc.
    """
    try:
        mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
        files = {str(path.resolve()) for path in Path(folder).iterdir()}
    except OSError:
        return
    for mapping in mappings:
        found = re.search(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)$", mapping, re.MULTILINE)
        if found and found[3] in files and re.search(r"^Anonymous: +0 kB$", mapping, re.MULTILINE):
            start, end = int(found[1], 16), int(found[2], 16)
            arena.give_back(start, end - start)
