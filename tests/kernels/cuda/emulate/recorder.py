"""Launches that are recorded, and not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.cuda.trials import trials
from pagewire.kernels.cuda.variants import Launches
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher


class RecordedLaunch(NamedTuple):
    """A launch, without its grid and parameters."""

    variant: Variant
    block: tuple[int, ...]
    shared_bytes: int


class Recorder(EmulatedLauncher):
    """A device that runs nothing, and keeps its launches."""

    def __init__(self, capability: tuple[int, int] = HOPPER) -> None:
        super().__init__(capability=capability)
        self.launches: set[RecordedLaunch] = set()

    def launch(
        self,
        variant: Variant,
        grid: Sequence[int],
        block: Sequence[int],
        parameters: object,
        shared_bytes: int = 0,
    ) -> None:
        self.launches.add(RecordedLaunch(variant, tuple(block), shared_bytes))

    @classmethod
    def of_trials(cls, launches: Launches) -> set[RecordedLaunch]:
        """The launches of the trials of a first run."""
        device = cls(launches.capability)
        kernels = CudaKernels(device, "cpu")
        for trial in trials(launches):
            trial.why_wrong(kernels, torch.device("cpu"))
        return device.launches
