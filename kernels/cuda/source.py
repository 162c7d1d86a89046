"""The kernels' C++: its text, and the parameter structs declared in it."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent

_FIELD_TYPES = {
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

    A field is `type name;` or `type a, b;`: a pointer, int, u32, float, double, i64 or u64.
    Pointers are unsigned numbers.

    Raises:
        ValueError: there is no such struct, or a field is of another type.
    """
    text = "\n".join(text for _, text in read_source(source))
    found = re.search(rf"^struct {struct} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{source} declares no struct {struct}")
    fields: list[tuple[str, Any]] = []
    for declaration in re.sub(r"//.*", "", found[1]).split(";"):
        if not (declaration := declaration.strip()):
            continue
        pointer = re.fullmatch(r"(?:const )?\w+ ?\* ?(?:__restrict__ )?(\w+)", declaration)
        if pointer:
            fields.append((pointer[1], np.dtype("u8")))
            continue
        kind, _, names = declaration.partition(" ")
        if kind not in _FIELD_TYPES or not re.fullmatch(r"\w+(, *\w+)*", names):
            raise ValueError(f"{source}, struct {struct}: cannot pack the field {declaration!r}")
        fields += [(name.strip(), _FIELD_TYPES[kind]) for name in names.split(",")]
    return np.dtype(fields, align=True)
