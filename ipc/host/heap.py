"""The heap of this process: what it frees goes back to the system, rather than being kept for a next time."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

# glibc's parameters of `mallopt` (malloc.h).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
# Blocks of this size and more have a mapping of their own, which ends when they are freed. Left alone, glibc raises
# its threshold to 32 MiB once large blocks are freed: then bodies and messages lie between small blocks, and their
# room is never given back.
MAPPED_BYTES = 1 << 18
KEPT_BYTES = 4 << 20  # free memory at the end of the heap that is kept
# Heaps of threads. Blocks are made in one thread and freed in another, so each heap gets as large as a single one.
NUM_ARENAS = 2


def return_freed_memory() -> None:
    """Let a server or a core, which live long, become small again after large requests; of no effect without glibc.

    To be called before there are threads.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (
            (M_MMAP_THRESHOLD, MAPPED_BYTES),
            (M_TRIM_THRESHOLD, KEPT_BYTES),
            (M_ARENA_MAX, NUM_ARENAS),
        ):
            mallopt(parameter, value)


def freeze_heap() -> None:
    """Leave all objects that live now out of garbage collections: they live as long as the process.

    A full collection stops all threads; over the modules and tables of a server alone it takes a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def release_spare_memory() -> None:
    """Give what is free within the heap back to the system; of no effect without glibc. Takes milliseconds."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
