"""Opens the compiled library for this CPU, with its structs and functions. Imports no torch."""

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.kernels.cpu.build import (
    EMULATED_TILES,
    REFERENCE,
    BuildError,
    InstructionSet,
    build,
    compiler_command,
    emulated_tiles,
    is_shipped,
    library_name,
    supported_instruction_sets,
)
from pagewire.kernels.native import cache
from pagewire.kernels.native.declarations import POINTER, functions, struct_fields

logger = logging.getLogger("pagewire.kernels")

HEADER = Path(__file__).with_name("kernels.h").read_text()
C_TYPES: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    POINTER: ctypes.c_void_p,
}


@functools.cache
def structure(name: str) -> type[ctypes.Structure]:
    """A struct of kernels.h, with the same fields and layout."""
    fields = [
        (field.name, C_TYPES[field.type] if field.type in C_TYPES else structure(field.type))
        for field in struct_fields(HEADER, name)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


SLOWER_WITHOUT = 50
"""How much longer a token takes in plain PyTorch, at most: 1.7 to 2.8 s in place of 0.02 to 0.04, of 135 million
weights in 4 bits. Those in bfloat16 lose less."""

AttentionCall = structure("AttentionCall")


class InstructionsRefusedError(RuntimeError):
    """The CPU has the instructions, but the system does not let this process use them."""


def load(content: bytes) -> ctypes.CDLL:
    """A shared library, given its content: what was checked is what runs, whatever becomes of files meanwhile.

    Raises:
        OSError: it is no library, or cannot be loaded.
    """
    # The descriptor stays open: the dynamic linker would take another file of this name for the same library.
    descriptor = os.memfd_create("pagewire-kernels")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")


def open_library(isa: InstructionSet) -> ctypes.CDLL:
    """The library for an instruction set: from the wheel, or compiled on first use.

    Raises:
        BuildError, OSError: it cannot be compiled or loaded.
        InstructionsRefusedError: the system forbids its instructions (AMX needs a permission per process).
    """
    library = load(build(isa))
    for (name, result), parameters in functions(HEADER):
        function = getattr(library, name)
        function.restype = C_TYPES[result]
        function.argtypes = [C_TYPES[parameter.type] for parameter in parameters]
    if library.pagewire_prepare():
        raise InstructionsRefusedError(f"the system does not let this process use {isa.name}")
    return library


@dataclass(frozen=True)
class Library:
    """An open library, and the instruction set that it was compiled for."""

    isa: InstructionSet
    functions: ctypes.CDLL


@functools.cache
def choose() -> Library | None:
    """The best library for this CPU, compiled on first use; None, with one log line, if there cannot be one.

    `PAGEWIRE_CPU_ISA` forces an instruction set by its name in `build.INSTRUCTION_SETS`. `amx_emulated` stands for
    matrix tiles in plain C++, `reference` for no compiled kernels at all.

    Raises:
        ValueError: `PAGEWIRE_CPU_ISA` names no instruction set of this CPU.
    """
    forced = os.environ.get("PAGEWIRE_CPU_ISA")
    if forced == REFERENCE:
        return None
    failure: Exception | None = None
    for isa in _candidates(forced):  # an old compiler may know only the lesser ones
        try:
            library = open_library(isa)
        except InstructionsRefusedError as error:
            logger.warning("CPU kernels: %s; taking the next best instructions", error)
            failure = error
        except (BuildError, OSError) as error:
            failure = error
        else:
            logger.info("CPU kernels: %s", isa.name)
            return Library(isa, library)
    logger.warning(
        "CPU kernels unavailable, using PyTorch instead, up to %d times slower: %s", SLOWER_WITHOUT, failure
    )
    return None


def expected_isa() -> str:
    """The name of the instruction set that `choose` takes unless its library fails to compile; compiles nothing.

    Raises:
        ValueError: see `choose`.
    """
    forced = os.environ.get("PAGEWIRE_CPU_ISA")
    if forced == REFERENCE:
        return REFERENCE
    candidates = _candidates(forced)
    try:
        compiler_command()
    except BuildError:
        return next((isa.name for isa in candidates if is_shipped(isa)), REFERENCE)
    return candidates[0].name


def must_compile() -> bool:
    """True if `choose` would compile the best library: neither the wheel nor the cache has it.

    Raises:
        ValueError: see `choose`.
    """
    name = expected_isa()
    if name == REFERENCE:
        return False
    isa = next(isa for isa in _candidates(os.environ.get("PAGEWIRE_CPU_ISA")) if isa.name == name)
    try:
        return not is_shipped(isa) and cache.read(library_name(isa)) is None
    except BuildError:  # a compiler that does not run
        return False


def _candidates(forced: str | None) -> list[InstructionSet]:
    """The instruction sets to try, the best first."""
    supported = supported_instruction_sets()
    if not forced:
        return supported
    if forced == EMULATED_TILES:
        return [emulated_tiles()]
    chosen = [isa for isa in supported if isa.name == forced]
    if not chosen:
        names = ", ".join(isa.name for isa in supported)
        raise ValueError(f"PAGEWIRE_CPU_ISA={forced}: this CPU has {names}")
    return chosen
