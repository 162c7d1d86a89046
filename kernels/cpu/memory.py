"""Memory for weights and KV caches: in large pages, where the system gives them, and given back where it can be."""

import ctypes
import math
import mmap
import os
import re
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
CHUNK = 32 * LARGE_PAGE
ALIGNMENT = 64
MADV_POPULATE_WRITE = 23  # Linux 5.14


class _Chunk:
    """Fresh memory that tensors are cut from; it lasts as long as any of them."""

    def __init__(self, size: int) -> None:
        """Raises OSError if there is not so much memory."""
        memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without large pages
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = -whole.data_ptr() % LARGE_PAGE
        self.left = whole[start : start + size]

    def take(self, size: int) -> Tensor:
        """The next `size` bytes."""
        taken, self.left = self.left[:size], self.left[size + -size % ALIGNMENT :]
        return taken


_chunk: _Chunk | None = None


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros. The system gives pages as they are written: taking gigabytes costs no time.

    Small pages cost microseconds each when they are first written; so what is smaller than a large page shares
    one with others.

    Raises:
        OSError: there is not so much memory.
    """
    global _chunk
    size = math.prod(shape) * dtype.itemsize
    if size > CHUNK // 2:
        chunk = _Chunk(size)
    elif _chunk is not None and len(_chunk.left) >= size:
        chunk = _chunk
    else:
        chunk = _chunk = _Chunk(CHUNK)
    return chunk.take(size).view(dtype).view(shape)


def populate(tensors: Sequence[Tensor], size: int) -> threading.Thread:
    """Have the system give the first pages of some tensors of zeros, `size` bytes in all, while CPUs are idle.

    What is written first waits for its page, which the system clears and maps: up to a tenth of the time of a long
    prompt. Ends early when a tensor is dropped. Does nothing where the system does not know how.
    """
    largest = max((tensor.nbytes for tensor in tensors), default=0)
    share = min(largest, size // max(1, len(tensors)) // LARGE_PAGE * LARGE_PAGE)
    references = [weakref.ref(tensor) for tensor in tensors]
    libc = ctypes.CDLL(None)

    def run() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        except OSError:
            return
        for start in range(0, share, LARGE_PAGE):  # the first blocks of all layers come first
            for reference in references:
                if (tensor := reference()) is None:
                    return
                address = tensor.data_ptr() & -mmap.PAGESIZE
                length = min(LARGE_PAGE, tensor.nbytes - start)
                if length > 0 and libc.madvise(
                    ctypes.c_void_p(address + start), ctypes.c_size_t(length), MADV_POPULATE_WRITE
                ):
                    return

    thread = threading.Thread(target=run, name="populate", daemon=True)
    thread.start()
    return thread


def forget_mapped_files(folder: str | os.PathLike[str]) -> None:
    """Give back the memory that maps files of a folder: what is read again comes from the files again.

    Mappings that were written to are left alone. Does nothing where there is no /proc.
    """
    try:
        mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
        files = {str(path.resolve()) for path in Path(folder).iterdir()}
    except OSError:
        return
    libc = ctypes.CDLL(None)
    for mapping in mappings:
        found = re.search(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)$", mapping, re.MULTILINE)
        if found and found[3] in files and re.search(r"^Anonymous: +0 kB$", mapping, re.MULTILINE):
            start, end = int(found[1], 16), int(found[2], 16)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
