"""The kernels' C++ sources, and the parameter structs declared in them."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagewire.kernels.native.declarations import POINTER, struct_fields

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
    """A file name in this folder, or a path."""
    name: str
    """The instance in C++, `rms_norm<bf16, 8>`."""
    parameters: str
    """Name of the parameter struct, which the source declares."""
    needs: str = ""
    """The oldest architecture that can run it, such as `sm_89`, or with an "a" the only one. Empty: sm_80."""


@functools.cache
def read_source(name: str) -> tuple[tuple[str, str], ...]:
    """The texts of a source and of all its includes (files of this folder): (file, text), the source first."""
    texts = {name: (HERE / name).read_text()}
    unread = [name]
    while unread:
        for included in re.findall(r'^#include "(.+)"$', texts[unread.pop()], re.MULTILINE):
            if included not in texts:
                texts[included] = (HERE / included).read_text()
                unread.append(included)
    return tuple(texts.items())


@functools.cache
def parameter_dtype(source: str, struct: str) -> np.dtype[np.void]:
    """The numpy dtype of a parameter struct, read from its declaration: C++ lays out both.

    A field is a pointer (as an unsigned number), int, u32, float, double, i64 or u64.

    Raises:
        ValueError: the source declares no such struct, or a field is of another type.
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
