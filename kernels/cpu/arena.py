"""Anonymous memory in large pages. Imports nothing heavy: a worker takes memory while it still imports PyTorch."""

import ctypes
import mmap
import threading

LARGE_PAGE = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None)


class Region:
    """`size` bytes of zeros at `offset` of `memory`, in large pages that are faulted in when first written."""

    def __init__(self, size: int) -> None:
        """Raises OSError if there is not enough memory."""
        self.size = size
        self.memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without large pages
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.offset = -address % LARGE_PAGE
        self.address = address + self.offset


class Reserve:
    """A region whose pages are faulted in by a thread in the background, until `end`."""

    def __init__(self, size: int) -> None:
        """Raises OSError if there is not enough memory."""
        self.region = Region(size)
        self._ended = threading.Event()
        threading.Thread(target=self._populate, name="reserve", daemon=True).start()

    def _populate(self) -> None:
        for start in range(0, self.region.size, LARGE_PAGE):
            length = min(LARGE_PAGE, self.region.size - start)
            if self._ended.is_set() or not populate(self.region.address + start, length):
                return

    def end(self, used: int) -> None:
        """Stop, and give back the pages beyond the first `used` bytes."""
        self._ended.set()
        start = used + -used % LARGE_PAGE
        if start < self.region.size:
            give_back(self.region.address + start, self.region.size - start)


def populate(address: int, length: int) -> bool:
    """Fault pages in now, keeping their contents. False if the kernel is too old for that, or memory is short."""
    return not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), MADV_POPULATE_WRITE)


def give_back(address: int, length: int) -> None:
    """Drop whole pages; when they are read again, they are zeros, or come from their file."""
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
