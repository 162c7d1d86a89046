"""PyTorch's profiler of a worker's steps."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from pagewire.workers.device.interface import Device


class StepProfiler:
    """Records what a worker does between two calls."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._profile: Any = None

    @property
    def is_on(self) -> bool:
        """True while something is recorded."""
        return self._profile is not None

    def start(self) -> None:
        """Start to record.

        Raises:
            RuntimeError: a recording is going on.
        """
        if self.is_on:
            raise RuntimeError("a profile is being recorded already")
        self._profile = torch.profiler.profile(activities=self._device.activities)
        self._profile.start()

    def stop(self) -> str:
        """Stop recording. Returns the path of a trace in Chrome's format, in `$PAGEWIRE_TORCH_PROFILER_DIR`.

        Raises:
            RuntimeError: nothing is being recorded.
        """
        if not self.is_on:
            raise RuntimeError("no profile is being recorded: call start_profile first")
        profile, self._profile = self._profile, None
        profile.stop()
        folder = Path(os.environ.get("PAGEWIRE_TORCH_PROFILER_DIR") or tempfile.mkdtemp(prefix="pagewire-"))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"worker-{os.getpid()}-{time.time_ns()}.json"
        profile.export_chrome_trace(str(path))
        return str(path)

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named part of a step for the profiler, which cannot see into compiled kernels."""
        return record_function(f"pagewire.{name}") if self.is_on else nullcontext()
