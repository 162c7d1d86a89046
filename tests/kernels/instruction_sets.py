"""The instruction sets that the kernels are tested on.

Compiling takes longer than the tests of what is compiled. The set that this machine would use is compiled as
shipped; the others are optimised less, which takes half the time: the bits do not depend on it, since contractions
are explicit (`build.FLAGS`). With `PAGEWIRE_TEST_SHIPPED_FLAGS` set, all are compiled as shipped (`make test-cpu`).
"""

import dataclasses
import functools
import os

import pytest

from pagewire.kernels.cpu.build import BuildError, InstructionSet, emulated_tiles, supported_instruction_sets
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.library import InstructionsRefusedError, open_library

SHIPPED_FLAGS = bool(os.environ.get("PAGEWIRE_TEST_SHIPPED_FLAGS"))


def optimised_less(isa: InstructionSet, level: str = "-O1") -> InstructionSet:
    """The same instructions with another level of optimisation: of several levels a compiler takes the last."""
    if SHIPPED_FLAGS:
        return isa
    return dataclasses.replace(isa, compiler_flags=(*isa.compiler_flags, level))


BEST, *_lesser = supported_instruction_sets()
PORTABLE = ([BEST] + _lesser)[-1]
EMULATED = optimised_less(emulated_tiles())
TESTED = {isa.name: isa for isa in (BEST, *map(optimised_less, _lesser), EMULATED)}
"""Every instruction set of this CPU, the best first, and matrix tiles in plain C++."""
if "avx512_bf16" in TESTED:  # the same code as this one's and `avx512`'s: a library less to compile
    TESTED.pop("avx512_vnni")


@functools.cache
def built(isa: InstructionSet) -> CpuKernels | Exception:
    """The kernels for an instruction set, or why there are none."""
    try:
        return CpuKernels(isa, open_library(isa))
    except (BuildError, InstructionsRefusedError) as error:
        return error


def kernels_or_skip(isa: InstructionSet) -> CpuKernels:
    """The kernels for an instruction set; skips the test where this machine's compiler or system has none."""
    kernels = built(isa)
    if isinstance(kernels, Exception):
        pytest.skip(str(kernels))
    return kernels
