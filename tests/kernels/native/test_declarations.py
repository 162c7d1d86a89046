"""C++ declarations as Python reads them."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from pagewire.kernels.cpu.build import compiler_command
from pagewire.kernels.cpu.library import HEADER, structure
from pagewire.kernels.native.declarations import POINTER, functions, struct_fields

STRUCTS = ("AttentionCall", "Matrix", "Norm", "Layer", "StackCall")


def test_every_struct_lies_in_python_as_in_c(tmp_path: Path) -> None:
    """A program prints each field's offset, and each struct's size."""
    lines = [
        f'  std::printf("{name}.{field.name} %zu\\n", offsetof({name}, {field.name}));'
        for name in STRUCTS
        for field in struct_fields(HEADER, name)
    ]
    lines += [f'  std::printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTS]
    source, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    source.write_text(
        f"#include <cstddef>\n#include <cstdio>\n{HEADER}\nint main() {{\n" + "\n".join(lines) + "\n}\n"
    )
    subprocess.run([*compiler_command(), "-std=c++17", "-w", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    offsets = {name: int(number) for name, number in (line.split() for line in printed.splitlines())}
    for name in STRUCTS:
        struct = structure(name)
        assert offsets.pop(name) == ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            assert offsets.pop(f"{name}.{field}") == getattr(struct, field).offset
    assert not offsets


def test_functions_and_their_parameters() -> None:
    declared = dict(
        functions("EXPORT int64_t f(const void* x, int32_t n,\n    float y);\nEXPORT void g();\nint h();\n")
    )
    assert {result: [tuple(p) for p in parameters] for result, parameters in declared.items()} == {
        ("f", "int64_t"): [("x", POINTER), ("n", "int32_t"), ("y", "float")],
        ("g", "void"): [],
    }
    assert sum(1 for _ in functions(HEADER)) == HEADER.count("EXPORT ") - HEADER.count("#define EXPORT")


@pytest.mark.parametrize("text", ["struct A {\n  int x[3];\n};", "struct A {\n  int;\n};", "struct B {\n};"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="struct A"):
        struct_fields(text, "A")
