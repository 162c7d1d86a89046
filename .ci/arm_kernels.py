"""Compiles the libraries that `make test-arm` runs, where its tests find them, without emulation.

They are those for NEON of `tests.kernels.instruction_sets`, on a processor that has all sets. (Programs of several
threads that start others now and then hang under qemu, and a build is one.)
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from pagewire.kernels.cpu import build

sys.path.insert(0, str(Path(__file__).parents[1]))
platform.machine = lambda: "aarch64"
build.cpu_flags = lambda: frozenset(name for bits in build.ARM_FLAGS.values() for name in bits.values())  # type: ignore[assignment]

from tests.kernels.instruction_sets import TESTED  # noqa: E402 - it asks for the processor

for isa in TESTED.values():
    if isa.name.startswith("neon"):
        build.build(isa)
        print(build.library_name(isa))
