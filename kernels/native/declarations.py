"""Reads declarations from C++ source, so that a struct or function used by both languages is declared once."""

import re
from collections.abc import Iterator
from typing import NamedTuple

POINTER = "*"


class Declared(NamedTuple):
    """A field, a parameter or a function's result: its name, and its type in C++ (`POINTER` for any pointer)."""

    name: str
    type: str


def struct_fields(text: str, struct: str) -> list[Declared]:
    """The fields of a struct in their order. A field is `type name;`, `type a, b;` or a pointer `type* name;`.

    Raises:
        ValueError: there is no such struct, or a field has another form.
    """
    body = re.search(rf"^struct {struct} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    if body is None:
        raise ValueError(f"no struct {struct} is declared")
    lines = re.sub(r"//.*", "", body[1]).split(";")
    return [field for line in lines if line.strip() for field in _fields(line.strip(), struct)]


def functions(text: str) -> Iterator[tuple[Declared, list[Declared]]]:
    """Each function that is declared as `EXPORT result name(parameters);`, and its parameters."""
    for result, name, parameters in re.findall(r"^EXPORT (\w+) (\w+)\(([^)]*)\);", text, re.MULTILINE):
        yield Declared(name, result), [_declared(" ".join(p.split())) for p in parameters.split(",") if p]


def _fields(line: str, struct: str) -> list[Declared]:
    try:
        return [_declared(line)]
    except ValueError:
        kind, _, names = line.partition(" ")
        if not re.fullmatch(r"\w+(, *\w+)*", names):
            raise ValueError(f"struct {struct}: cannot read the field {line!r}") from None
        return [Declared(name.strip(), kind) for name in names.split(",")]


def _declared(text: str) -> Declared:
    """A declaration such as `const float* x` or `int64_t rows`."""
    if pointer := re.fullmatch(r"(?:const )?\w+ ?\* ?(?:__restrict__ )?(\w+)", text):
        return Declared(pointer[1], POINTER)
    if plain := re.fullmatch(r"(\w+) (\w+)", text):
        return Declared(plain[2], plain[1])
    raise ValueError(f"cannot read the declaration {text!r}")
