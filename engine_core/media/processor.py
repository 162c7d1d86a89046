"""A model's processor of media, as the core calls it: in processes that may be lost (`process.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from pagewire.engine_core.media.jobs import Array, Describe, Described, Lay, Processed, ProcessMedium
from pagewire.ipc.host.confined import Confined, JobKilledError, Limits
from pagewire.ipc.wire.codec import Tensor

START_SECONDS = 300.0  # to import torch and transformers: minutes on a machine that does much else
SECONDS = 30.0  # of wall-clock and of processor time for one medium
MEMORY_BYTES = 2 << 30
STACK_BYTES = 16 << 20
ANSWER_BYTES = 512 << 20  # features of one medium
NUM_PARALLEL = 3  # media that are processed at the same time


class MediaProcessor(Protocol):
    """Makes layouts and features of media. All methods block, and may be called in any thread."""

    def describe(self) -> Described:
        """Which media it takes; raises ValueError or EngineBusyError."""

    def lay(self, kind: str, shape: Sequence[int], options: str) -> Processed:
        """The tokens of a medium of a shape; raises ValueError or EngineBusyError."""

    def process(self, kind: str, content: Tensor, options: str) -> Processed:
        """The tokens and features of a medium; raises ValueError or EngineBusyError."""

    def close(self) -> None:
        """End the processes."""


class ConfinedProcessor:
    """The processor of the model in a folder. arguments: for each medium, as JSON; a request's go before them."""

    def __init__(self, folder: Path, arguments: str = "") -> None:
        self._jobs = Confined(
            "pagewire.engine_core.media.process",
            [str(folder), arguments],
            num_parallel=NUM_PARALLEL,
            start_seconds=START_SECONDS,
        )

    @property
    def pid(self) -> int | None:
        """Process id of the job server; None before the first job."""
        return self._jobs.pid

    def describe(self) -> Described:
        """See `MediaProcessor`."""
        return msgspec.msgpack.decode(self._run(Describe(), "media"), type=Described)

    def lay(self, kind: str, shape: Sequence[int], options: str) -> Processed:
        """See `MediaProcessor`."""
        return msgspec.msgpack.decode(self._run(Lay(kind, tuple(shape), options), kind), type=Processed)

    def process(self, kind: str, content: Tensor, options: str) -> Processed:
        """See `MediaProcessor`."""
        job = ProcessMedium(kind, Array(content.dtype, content.shape, bytes(content.data)), options)
        return msgspec.msgpack.decode(self._run(job, kind), type=Processed)

    def close(self) -> None:
        """See `MediaProcessor`."""
        self._jobs.close()

    def _run(self, job: Describe | Lay | ProcessMedium, kind: str) -> memoryview:
        limits = Limits(SECONDS, SECONDS, MEMORY_BYTES, STACK_BYTES, ANSWER_BYTES)
        try:
            return self._jobs.run(msgspec.msgpack.encode(job), limits)
        except JobKilledError as error:
            raise ValueError(f"{kind}: the model's processor fails on it: {error}") from None
