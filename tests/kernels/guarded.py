"""Kernels whose arguments end where memory ends that may be touched. A mistake ends the process.

python -m tests.kernels.guarded INSTRUCTION_SET
"""

import ctypes
import mmap
import sys
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.library import open_library
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.weight import dense_weight
from tests.kernels.cpu.test_quantised import SCHEMES, random_rows, random_weight
from tests.kernels.instruction_sets import TESTED
from tests.kernels.state_layers import state_batch, state_layers

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(x: Tensor) -> Tensor:
    """A copy of x behind which no byte may be read or written."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), dtype=torch.uint8)
    assert libc.mprotect(memory.data_ptr() + size, mmap.PAGESIZE, 0) == 0
    copy = memory[size - x.nbytes : size].view(x.dtype).view(x.shape)
    copy.copy_(x)
    return copy


def multiply_dense(kernels: CpuKernels) -> None:
    """Packed and not packed."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n, k in ((64, 64), (70, 50), (16, 1100)):
            weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
            linear = kernels.pack(dense_weight(weight), guarded(bias))
            for rows in (1, 3, 16, 17, 32, 33, 50):
                x = torch.randn(rows, k).to(dtype)
                assert torch.equal(linear(guarded(x)), linear(x))
                assert torch.equal(kernels.linear(guarded(x), guarded(weight), guarded(bias)), linear(x))


def multiply_quantised(kernels: CpuKernels) -> None:
    """Rows, bias and packed weight."""
    for scheme in SCHEMES:
        for n, k in ((64, 128), (70, 256)):
            weight = random_weight(scheme, n, k, torch.bfloat16, torch.float16, True)
            bias = torch.randn(n).bfloat16()
            linear, plain = kernels.pack(weight, guarded(bias)), kernels.pack(weight, bias)
            assert isinstance(linear, QuantisedLinear)
            linear.packed = guarded(linear.packed)
            for rows in (1, 3, 17, 50):
                x = random_rows(rows, k, torch.bfloat16)
                assert torch.equal(linear(guarded(x)), plain(x))


def quantise_and_back(kernels: CpuKernels) -> None:
    """Numbers, and the parts of what they become."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for scheme, k in (
            (Integers(8, 32, 128), 64),
            (Integers(8, None, 128), 51),
            (Integers(6, None, 32), 51),
            (Integers(6, 16, 0), 48),
            (Integers(4, None, 0), 54),
        ):
            numbers = torch.randn(5, k).to(dtype)
            made = kernels.quantise(dense_weight(guarded(numbers)), scheme, torch.bfloat16)
            copy = replace(made, parts=tuple(map(guarded, made.parts)))
            assert torch.equal(kernels.dense(copy), made.dense())


def run_layers_with_states(kernels: CpuKernels) -> None:
    """Inputs of all tokens, and states."""
    batch = state_batch([[(0, 3, -1, 0), (3, 4, 0, 1)], [(4, 5, 2, 2)]])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for layer in state_layers(5, dtype):
            state = torch.randn(3, *layer.state)
            plain = layer.run(kernels.states, layer.inputs, state.clone(), batch)
            assert torch.equal(
                layer.run(kernels.states, [*map(guarded, layer.inputs)], guarded(state), batch), plain
            )


def main() -> None:
    """Run all of them on one instruction set."""
    isa = TESTED[sys.argv[1]]
    kernels = CpuKernels(isa, open_library(isa))
    torch.manual_seed(0)
    multiply_dense(kernels)
    multiply_quantised(kernels)
    quantise_and_back(kernels)
    run_layers_with_states(kernels)
    print("done")


if __name__ == "__main__":
    main()
