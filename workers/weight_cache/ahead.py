"""What a worker does about weights while it imports PyTorch: reads packed ones, or takes memory to pack them into.

Imports no torch itself.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu.arena import Reserve
from pagewire.workers.checkpoint.headers import weight_files
from pagewire.workers.device.machine import machine_memory, runs_on_cpu
from pagewire.workers.weight_cache import file, folder
from pagewire.workers.weight_cache.file import DamagedError, PackedFile
from pagewire.workers.weight_cache.key import checkpoint_files, key_of

logger = logging.getLogger("pagewire.worker")

MAX_THREADS = 4  # that read a file; more do not read faster than memory takes it


class WeightsAhead:
    """Looks for the packed weights of a configuration in a thread, and reads them.

    Where there are none, the thread reserves memory for weights that will be packed on the CPU, and lets the system
    read the checkpoint.

    num_bytes: of the packed weights, if it is known.

    Attributes (once `wait` has returned):
        key: of the packed weights; None if they are not kept.
        packed: what was read; None if there was nothing. reserve: in that case, memory for the weights.
    """

    def __init__(self, config: WorkerConfig, num_bytes: int = 0) -> None:
        self.config, self._num_bytes = config, num_bytes
        self.key: str | None = None
        self.packed: PackedFile | None = None
        self.reserve: Reserve | None = None
        self._thread = threading.Thread(target=self._run, name="weights-ahead", daemon=True)
        if runs_on_cpu(config.device):
            self._thread.start()

    def wait(self) -> None:
        """Return when the thread has ended, or at once if the weights are not packed on the CPU."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.key = key_of(self.config)
            self.packed = None if self.key is None else read_packed(self.key)
        except (OSError, ValueError) as error:
            logger.debug("no packed weights: %s", error)  # loading will fail, with a better message
        if self.packed is None:
            self.reserve = reserve_weights(self._num_bytes)
            threading.Thread(target=read_ahead, args=(self.config,), name="read-ahead", daemon=True).start()


def read_packed(key: str) -> PackedFile | None:
    """The packed weights of a key, every byte of them checked; None, and the file is removed, if it is damaged."""
    descriptor = folder.open_file(key)
    if descriptor is None:
        return None
    try:
        return file.read(descriptor, key, num_threads())
    except (DamagedError, OSError) as error:
        logger.warning("ignored the packed weights %s in %s: %s", key, folder.weight_folder(), error)
        if isinstance(error, DamagedError):
            folder.remove(key)
        return None
    finally:
        os.close(descriptor)


def read_ahead(config: WorkerConfig) -> None:
    """Let the system read the files of weights into its cache, if they leave half of the available memory free.

    Loading maps them, and would otherwise wait for the disk page by page.
    """
    try:
        path = Path(config.model_path)
        paths = weight_files(path) if path.is_dir() else list(checkpoint_files(path))
        _, available = machine_memory(config.parallel.local_size)
        if 2 * sum(path.stat().st_size for path in paths) > available:
            return
        for path in paths:
            with path.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    except (OSError, ValueError) as error:
        logger.debug("the files of weights are not read ahead: %s", error)


def num_threads() -> int:
    """Threads that read: one processor is left to the import of PyTorch."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 1))


def reserve_weights(num_bytes: int) -> Reserve | None:
    """Memory for the packed weights, reserved in the background; None if there is too little, or none is needed."""
    try:
        return Reserve(num_bytes) if num_bytes else None
    except OSError:
        return None  # loading will fail, with a better message
