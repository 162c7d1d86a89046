"""Imports what runs models, PyTorch and our modules on top of it: most of the time in which a worker starts."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress

import psutil

from pagewire.workers.process.deferred_imports import defer

_importing = threading.Lock()  # two threads that import what imports each other could see half of a module
_bytes_before: list[int] = []


def import_engine() -> None:
    """Import what runs models; waits where another thread does so already."""
    with _importing:
        gc.disable()  # looking for garbage among what is imported takes a tenth of the time, and later some more
        try:
            defer()
            import pagewire.workers.device.open
            import pagewire.workers.process.wiring
            import pagewire.workers.ranks.open
            import pagewire.workers.weight_cache.cached_loading  # noqa: F401

            gc.freeze()
        finally:
            gc.enable()


def import_engine_ahead() -> None:
    """Begin to import what runs models, in a thread: what every model needs does not wait for the name of one.

    What fails there fails again, and is reported, when `import_engine` is called for a model.
    """

    def run() -> None:
        with suppress(Exception):
            import_engine()

    _bytes_before.append(own_bytes())
    threading.Thread(target=run, name="import-engine").start()


def bytes_taken_ahead() -> int:
    """Bytes of memory that the import ahead has taken so far, which an estimate of a worker counts again."""
    return max(0, own_bytes() - _bytes_before[0]) if _bytes_before else 0


def own_bytes() -> int:
    """Bytes of memory of this process alone. Pages of files are the system's, which drops them when it must."""
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)
