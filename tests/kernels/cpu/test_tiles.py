"""Matrix tiles: the emulated instructions against their documented arithmetic, and against a CPU that has them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagewire.kernels.cpu import build as build_module
from pagewire.kernels.cpu.build import (
    INSTRUCTION_SETS,
    BuildError,
    InstructionSet,
    build,
    compiler_command,
    supported_instruction_sets,
)
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.library import InstructionsRefusedError, load, open_library
from pagewire.kernels.data.integers import Integers, quantise
from pagewire.kernels.data.weight import dense_weight
from tests.kernels.batches import Request, Shape, page, random_request
from tests.kernels.instruction_sets import EMULATED, kernels_or_skip, optimised_less

Bits = NDArray[np.uint16]
Sums = NDArray[np.uint32]
Signed, Unsigned, Integers32 = NDArray[np.int8], NDArray[np.uint8], NDArray[np.int32]
Matrix = TypeVar("Matrix", Sums, Integers32)

ONE_PRODUCT = """
#include "tiles.h"

// C [m, n] += A [m, k] B [k, n] for shapes up to a whole tile, from and to memory with rows of 64 bytes.
extern "C" __attribute__((visibility("default")))
int multiply_add(int kind, const TileConfig* config, const void* a, const void* b, void* c) {
  if (!request_tiles()) return 1;
  tile_config(*config);
  tile_load<0>(c, 64), tile_load<1>(a, 64), tile_load<2>(b, 64);
  if (kind == 0) tile_multiply_add<bf16, 0, 1, 2>();
#if defined(PAGEWIRE_TILES_FP16)
  if (kind == 1) tile_multiply_add<f16, 0, 1, 2>();
#endif
  if (kind == 2) tile_multiply_add_bytes<0, 1, 2>();
  tile_store<0>(c, 64);
  tile_release();
  return 0;
}
"""


class TileConfig(ctypes.Structure):
    """Mirrors the struct of tiles.h."""

    _fields_ = (
        *(("palette", ctypes.c_uint8), ("start_row", ctypes.c_uint8), ("reserved", ctypes.c_uint8 * 14)),
        *(("row_bytes", ctypes.c_uint16 * 16), ("rows", ctypes.c_uint8 * 16)),
    )


class Instruction:
    """TDPBF16PS, TDPFP16PS and TDPBSUD, as an instruction set has them."""

    def __init__(self, isa: InstructionSet, folder: Path) -> None:
        source, library = folder / f"{isa.name}.cpp", folder / f"{isa.name}.so"
        source.write_text(ONE_PRODUCT)
        headers = Path(build_module.__file__).parent
        command = [*compiler_command(), *build_module.FLAGS, "-shared", *isa.compiler_flags, f"-I{headers}"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=120)
        self._library = ctypes.CDLL(str(library))

    def __call__(
        self, a: Bits, b: Bits, c: Sums, shape: tuple[int, int, int] = (16, 16, 16), half: bool = False
    ) -> Sums:
        """C + A B. a: [16, 32]; b: [16 pairs of k, 32]; c: float32 [16, 16]; shape: rows, columns, pairs of k."""
        return self._run(int(half), a, b, c, shape)

    def of_bytes(
        self, a: Signed, b: Unsigned, c: Integers32, shape: tuple[int, int, int] = (16, 16, 16)
    ) -> Integers32:
        """C + A B. a: [16, 64]; b: [16 fours of k, 64]; c: [16, 16]; shape: rows, columns, fours of k."""
        return self._run(2, a, b, c, shape)

    def _run(self, kind: int, a: Any, b: Any, c: Matrix, shape: tuple[int, int, int]) -> Matrix:
        m, n, k = shape
        memory = np.zeros(128, np.uint8)  # the instruction wants 64-byte alignment
        config = TileConfig.from_buffer(memory, -memory.ctypes.data % 64)
        config.palette = 1
        for tile, (rows, row_bytes) in enumerate(((m, 4 * n), (m, 4 * k), (k, 4 * n))):
            config.rows[tile], config.row_bytes[tile] = rows, row_bytes
        out = c.copy()
        pointers = (
            ctypes.c_void_p(x.ctypes.data) for x in (np.ascontiguousarray(a), np.ascontiguousarray(b), out)
        )
        if self._library.multiply_add(kind, ctypes.byref(config), *pointers):
            pytest.skip("the system does not let this process use matrix tiles")
        return out


def has_tiles(isa: InstructionSet) -> bool:
    return "-DPAGEWIRE_TILES" in isa.compiler_flags


def real_tiles() -> InstructionSet:
    """The best set with tiles that this CPU has; skips the test where there is none."""
    for isa in supported_instruction_sets():
        if has_tiles(isa):
            return isa
    pytest.skip("this CPU has no matrix tiles")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Instruction:
    return Instruction(EMULATED, tmp_path_factory.mktemp("emulated"))


def to_bfloat16(x: NDArray[np.float32]) -> Bits:
    return torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()


def to_float(bits: Bits, half: bool = False) -> NDArray[np.float32]:
    return (
        bits.view(np.float16).astype(np.float32) if half else (bits.astype(np.uint32) << 16).view(np.float32)
    )


def documented(a: Bits, b: Bits, c: Sums, half: bool = False) -> Sums:
    """The arithmetic in Intel's words: exact in float64 for elements of similar size, and rounded once a step."""
    x, y = to_float(a, half).astype(np.float64), to_float(b, half).astype(np.float64)
    chains = np.zeros((2, 16, 16), np.float32)
    for k in range(16):
        for odd in range(2):
            products = x[:, 2 * k + odd, None] * y[k, odd::2]
            chains[odd] = (chains[odd].astype(np.float64) + products).astype(np.float32)
    return (c.view(np.float32) + (chains[0] + chains[1])).view(np.uint32)


def random_bits(rng: np.random.Generator, half: bool) -> tuple[Bits, Bits, Sums]:
    """Normal numbers between 2^-8 and 2^8, of both signs."""
    a, b = (
        (rng.integers(0, 2, 512) << 15 | rng.integers(7, 23, 512) << 10 | rng.integers(0, 1024, 512))
        if half
        else (rng.integers(0, 2, 512) << 15 | rng.integers(119, 135, 512) << 7 | rng.integers(0, 128, 512))
        for _ in range(2)
    )
    c = rng.standard_normal((16, 16)).astype(np.float32).view(np.uint32)
    return a.astype(np.uint16).reshape(16, 32), b.astype(np.uint16).reshape(16, 32), c


@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
def test_the_emulated_instruction_is_the_documented_one(emulated: Instruction, half: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b, c = random_bits(rng, half)
        np.testing.assert_array_equal(emulated(a, b, c, half=half), documented(a, b, c, half))


def test_smaller_tiles_take_their_part_of_a_whole_one(emulated: Instruction) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        a, b, c = random_bits(rng, False)
        m, n, k = (int(size) for size in rng.integers(1, 17, 3))
        part = emulated(a, b, c, (m, n, k))
        a[:, 2 * k :] = 0
        np.testing.assert_array_equal(part[:m, :n], emulated(a, b, c)[:m, :n])
        np.testing.assert_array_equal(part[m:], c[m:])
        np.testing.assert_array_equal(part[:, n:], c[:, n:])


def random_bytes(rng: np.random.Generator) -> tuple[Signed, Unsigned, Integers32]:
    """All values of bytes, and sums that wrap around."""
    a, b = rng.integers(-128, 128, (16, 64), np.int8), rng.integers(0, 256, (16, 64), np.uint8)
    return a, b, rng.integers(-(2**31), 2**31, (16, 16), np.int64).astype(np.int32)


def test_bytes_are_multiplied_exactly(emulated: Instruction) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        a, b, c = random_bytes(rng)
        m, n, k = (int(size) for size in rng.integers(1, 17, 3))
        columns = b.reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16).astype(np.int64)
        found = emulated.of_bytes(a, b, c, (m, n, k))
        wanted = c.copy()
        wanted[:m, :n] += (a[:m, : 4 * k].astype(np.int64) @ columns[: 4 * k, :n]).astype(np.int32)
        np.testing.assert_array_equal(found, wanted)


def one_product(instruction: Instruction, x: int, y: int, c: int) -> int:
    """c + x y, the other elements being 0."""
    a, b, sums = np.zeros((16, 32), np.uint16), np.zeros((16, 32), np.uint16), np.zeros((16, 16), np.uint32)
    a[3, 4], b[2, 10], sums[3, 5] = x, y, c
    return int(instruction(a, b, sums)[3, 5])


ONE, INFINITY, QUIET, SIGNALLING, SUBNORMAL, LEAST = 0x3F80, 0x7F80, 0x7FC1, 0xFF81, 0x007F, 0x0080
SPECIAL_PRODUCTS = [
    (SUBNORMAL, ONE, 0, 0),  # a subnormal element is a zero
    (LEAST, ONE, 0, 0x0080_0000),
    (LEAST, 0x3F00, 0, 0),  # a subnormal result, too
    (0, 0, 0x0000_0001, 0),  # and a subnormal sum before
    (INFINITY, ONE, 0, 0x7F80_0000),
    (INFINITY, 0, 0, 0xFFC0_0000),  # the default NaN is negative
    (QUIET, ONE, 0, 0x7FC1_0000),
    (SIGNALLING, ONE, 0, 0xFFC1_0000),  # made quiet
    (INFINITY, QUIET, 0, 0x7FC1_0000),
    (INFINITY, ONE, 0xFF80_0000, 0xFFC0_0000),
    (ONE, ONE, 0x7F80_0001, 0x7FC0_0001),
    (0x7F7F, 0x4000, 0, 0x7F80_0000),  # overflow
]


@pytest.mark.parametrize(("x", "y", "c", "wanted"), SPECIAL_PRODUCTS, ids=hex)
def test_special_numbers(emulated: Instruction, x: int, y: int, c: int, wanted: int) -> None:
    assert hex(one_product(emulated, x, y, c)) == hex(wanted)


@pytest.mark.parametrize(("exponent", "least"), [(-152, True), (-151, True), (-150, False)])
def test_subnormal_means_after_rounding_with_an_endless_exponent(
    emulated: Instruction, exponent: int, least: bool
) -> None:
    """2^-126 - 2^exponent: half a unit of the numbers below it is 2^-151, and that is a tie, to even."""
    a, b = np.zeros((16, 32), np.uint16), np.zeros((16, 32), np.uint16)
    power = to_bfloat16(np.exp2(np.array([-63, -75, exponent + 75], np.float32)))
    a[:, 0], b[0, 0::2] = power[0], power[0]
    a[:, 2], b[1, 0::2] = power[1] | 0x8000, power[2]
    found = emulated(a, b, np.zeros((16, 16), np.uint32))
    assert (found == (0x0080_0000 if least else 0)).all()


def every_kind(rng: np.random.Generator, round_number: int) -> tuple[Bits, Bits, Sums]:
    """Elements of many kinds in turn: any bits, subnormal products, special values, cancellation."""
    a, b, c = random_bits(rng, False)
    kind = round_number % 4
    if kind == 0:
        a, b = (rng.integers(0, 1 << 16, (16, 32)).astype(np.uint16) for _ in range(2))
        c = rng.integers(0, 1 << 32, (16, 16), dtype=np.uint64).astype(np.uint32)
    if kind == 1:
        a, b = ((x & 0x807F | rng.integers(55, 70, (16, 32)).astype(np.uint16) << 7) for x in (a, b))
        c = c & 0x80FF_FFFF
    if kind == 2:
        values = np.array([0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFC1, 0, 0x8000, 0x7F7F], np.uint16)
        for x in (a, b):
            some = rng.random(x.shape) < 0.02
            x[some] = rng.choice(values, int(some.sum()))
    if kind == 3:
        a, b = a & 0xFF83, b & 0xFF83
    return a, b, c


def test_the_emulated_instruction_has_the_bits_of_the_real_one(emulated: Instruction, tmp_path: Path) -> None:
    real = Instruction(real_tiles(), tmp_path)
    rng = np.random.default_rng(2)
    for i in range(2000):
        a, b, c = every_kind(rng, i)
        shape = (16, 16, 16) if i % 2 else tuple(int(size) for size in rng.integers(1, 17, 3))
        np.testing.assert_array_equal(emulated(a, b, c, shape), real(a, b, c, shape))
        codes = random_bytes(rng)
        np.testing.assert_array_equal(emulated.of_bytes(*codes, shape), real.of_bytes(*codes, shape))


def test_the_emulated_kernels_have_the_bits_of_the_real_ones() -> None:
    real, emulated = kernels_or_skip(real_tiles()), kernels_or_skip(EMULATED)
    torch.manual_seed(0)
    for rows, n, k in ((1, 64, 64), (5, 100, 33), (17, 257, 100), (48, 64, 2816), (300, 130, 1100)):
        weight, bias, x = (torch.randn(*size).bfloat16() for size in ((n, k), (n,), (rows, k)))
        assert torch.equal(*(kernels.pack(dense_weight(weight), bias)(x) for kernels in (real, emulated)))
    for scheme in (Integers(8, None, 128), Integers(4, 128, 8)):
        weight = quantise(dense_weight(torch.randn(130, 1152).bfloat16()), scheme)
        for rows in (5, 16, 17, 70):
            x = torch.randn(rows, 1152).bfloat16()
            assert torch.equal(*(kernels.pack(weight)(x) for kernels in (real, emulated)))
    for shape in (Shape(), Shape(8, 2, 80, 72), Shape(3, 1, 64, 128, block_size=32)):
        requests = [random_request(shape, length, torch.bfloat16, length) for length in (300, 40)]
        outputs = [attend(kernels, shape, requests) for kernels in (real, emulated)]
        assert torch.equal(*outputs)


def attend(kernels: CpuKernels, shape: Shape, requests: list[Request]) -> torch.Tensor:
    """A chunk of one request, and one token of the other."""
    paged = page(shape, requests, [(100, 300), (39, 40)], store=kernels.store_kv)
    return kernels.paged_attention(paged.q, paged.cache, paged.batch, shape.head_dim**-0.5)


@pytest.mark.every_set
@pytest.mark.parametrize("isa", list(filter(has_tiles, INSTRUCTION_SETS)), ids=lambda isa: isa.name)
def test_a_library_for_tiles_says_whether_it_may_use_them(isa: InstructionSet) -> None:
    """On any CPU: it compiles, loads, and asks the system; after a no, no instruction of it ever runs."""
    if isa not in supported_instruction_sets():  # the library is asked one question
        isa = optimised_less(isa, "-O0")
    try:
        library = load(build(isa))
    except BuildError as error:
        pytest.skip(str(error))  # an assembler older than the instructions
    if library.pagewire_prepare():
        with pytest.raises(InstructionsRefusedError, match=isa.name):
            open_library(isa)
    else:  # the system permits tiles; which products a CPU has of them, its flags say
        assert any(map(has_tiles, supported_instruction_sets()))
