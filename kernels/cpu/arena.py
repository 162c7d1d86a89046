"""Anonymous memory in large pages. Imports nothing heavy: a worker takes memory while it still imports PyTorch."""

import ctypes
import json
import math
import mmap
import os
import struct
import threading
from pathlib import Path

LARGE_PAGE = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14
MAX_HEADER_BYTES = 100 << 20  # of a safetensors file; its library has the same limit
HALF = ("bfloat16", "float16", "half")
FOUR_BITS = ("int4", "bitsandbytes")  # quantisations while loading; the others are of 8 bits

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


def weight_bytes(folder: str | os.PathLike[str], dtype: str, quantization: str | None = None) -> int:
    """Bytes of a checkpoint's weights once they are packed: 0 if none can be mapped.

    dtype: of the weights, "auto" for that of its configuration. quantization: of the weights while they are loaded;
    what is quantised in the checkpoint takes about the bytes that it takes there.
    """
    files = list(Path(folder).glob("*.safetensors"))
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        num_weights = sum(map(_num_weights, files))
        if config.get("quantization_config") is not None:
            return sum(path.stat().st_size for path in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return 0  # loading will fail, with a better message
    if quantization is not None:
        return num_weights // 2 if quantization in FOUR_BITS else num_weights
    if dtype == "auto":
        text = config.get("text_config") or config
        dtype = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "float32"
    return num_weights * (2 if dtype in HALF else 4)


def _num_weights(path: Path) -> int:
    """The number of elements of all tensors in a safetensors file, by its header; no more than the file has bytes.

    Raises:
        ValueError: the header is too large or no JSON. KeyError, TypeError, AttributeError: it is of another form.
    """
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{path} has a header of {size} bytes")
        header = json.loads(file.read(size))
    claimed: int = sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return min(claimed, path.stat().st_size)
