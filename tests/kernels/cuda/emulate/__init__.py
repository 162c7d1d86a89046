"""Runs the CUDA kernels on the CPU: each source is compiled by the host's compiler against `cuda.h`."""

from tests.kernels.cuda.emulate.launcher import ORDERS, EmulatedLauncher, EmulationError
from tests.kernels.cuda.emulate.library import Edit
from tests.kernels.cuda.emulate.memory import guarded

__all__ = ["ORDERS", "Edit", "EmulatedLauncher", "EmulationError", "guarded"]
