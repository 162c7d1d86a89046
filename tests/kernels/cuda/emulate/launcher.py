"""Launches kernels on an emulated device: they run on the CPU, over tensors of the CPU."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagewire.kernels.cuda.source import Variant, read_source
from tests.kernels.cuda.emulate.library import Edit, load

IN_ORDER, ANY_THREAD, ANY_WARP = range(3)
ORDERS = ((IN_ORDER, 0), (ANY_THREAD, 1), (ANY_WARP, 2), (ANY_WARP, 3))
"""Orders of threads, with the seed of the order: each of them reveals other faults."""


class EmulationError(RuntimeError):
    """A kernel made an error that the emulation detects: a deadlock, a bad address, a misaligned access."""


@dataclass
class EmulatedLauncher:
    """A `pagewire.kernels.cuda.launch.KernelLauncher` for an emulated device."""

    order: tuple[int, int] = ORDERS[0]
    edits: tuple[Edit, ...] = ()
    """Faults to plant in the sources."""
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 4
    races: bool = False
    """Find accesses to shared memory that no barrier orders; takes several times as long."""

    def load(self, variants: Sequence[Variant], progress: object = None) -> None:
        """Nothing to do: kernels are compiled at first use."""

    def launch(
        self,
        variant: Variant,
        grid: Sequence[int],
        block: Sequence[int],
        parameters: "np.ndarray[tuple[int, ...], np.dtype[np.void]]",
        shared_bytes: int = 0,
    ) -> None:
        """Run a grid to its end.

        Raises:
            EmulationError: the kernel made an error that the emulation detects.
        """
        if 0 in grid:
            raise EmulationError("an empty grid")
        files = {name for name, _ in read_source(variant.source)}
        edits = tuple(edit for edit in self.edits if edit.file in files)
        library = load(variant, edits, 100 * self.capability[0] + 10 * self.capability[1], self.races)
        library.set_order(*self.order)
        run = library.run
        run.restype = ctypes.c_char_p
        error = run(
            (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
            (ctypes.c_uint * 3)(*block, *(1,) * (3 - len(block))),
            ctypes.c_size_t(shared_bytes),
            ctypes.c_void_p(parameters.ctypes.data),
            ctypes.c_size_t(parameters.nbytes),
        )
        if error is not None:
            raise EmulationError(f"{variant.name}: {error.decode()}")
