"""The kernels' C++: its text, and the parameter structs declared in it."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagewire.kernels.declarations import POINTER, struct_fields

HERE = Path(__file__).parent

_FIELD_TYPES = {
    POINTER: np.dtype("u8"),
    "int": np.dtype("i4"),
    "u32": np.dtype("u4"),
    "float": np.dtype("f4"),
    "double": np.dtype("f8"),
    "i64": np.dtype("i8"),
    "u64": np.dtype("u8"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One instance of a kernel template. It takes one parameter, a struct by value."""

    source: str
    """File in this folder, or with a path."""
    name: str
    """As C++ names it, `rms_norm<bf16, 8>`."""
    parameters: str
    """Name of the struct, declared in the source."""
    needs: str = ""
    """Features that only one architecture has: `sm_90a`. Empty: sm_80 and all later ones run it."""


@functools.cache
def read_source(name: str) -> tuple[tuple[str, str], ...]:
    """A source and all that it includes, as (file, text), itself first, each once. Includes are in this folder."""
    texts = {name: (HERE / name).read_text()}
    waiting = [name]
    while waiting:
        for included in re.findall(r'^#include "(.+)"$', texts[waiting.pop()], re.MULTILINE):
            if included not in texts:
                texts[included] = (HERE / included).read_text()
                waiting.append(included)
    return tuple(texts.items())


@functools.cache
def parameter_dtype(source: str, struct: str) -> np.dtype[np.void]:
    """The numpy dtype of a parameter struct, read from its declaration: C++ lays out both.

    A field is a pointer (as an unsigned number), int, u32, float, double, i64 or u64.

    Raises:
        ValueError: there is no such struct, or a field is of another type.
    """
    text = "\n".join(text for _, text in read_source(source))
    try:
        fields = [(name, _FIELD_TYPES[kind]) for name, kind in struct_fields(text, struct)]
    except KeyError as error:
        raise ValueError(
            f"{source}, struct {struct}: cannot pack a field of type {error.args[0]!r}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return np.dtype(fields, align=True)
