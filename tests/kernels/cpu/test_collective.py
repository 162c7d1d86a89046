"""Sums and exchanges through shared memory, for every instruction set: the bits of the ordered sum in torch."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from pagewire.kernels.cpu.collective import SharedMemoryGroup, region_bytes
from pagewire.kernels.cpu.kernels import CpuKernels

SIZE = 3


def ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def run(group: SharedMemoryGroup) -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for length in (*range(1, 70), 4095, 40_001, 300_000):
            parts = [(torch.randn(length, generator=generator) * 100).to(dtype) for _ in range(group.size)]
            total, expected = group.all_reduce(parts[group.rank].clone()), ordered_sum(parts)
            assert torch.equal(total, expected), (dtype, length)
            assert torch.equal(group.all_gather(parts[group.rank][None]), torch.cat(parts)[None])
            assert torch.equal(
                group.broadcast(parts[group.rank].clone(), length % SIZE), parts[length % SIZE]
            )


def test_operations_have_the_bits_of_the_ordered_sum(kernels: CpuKernels) -> None:
    library = kernels._library
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, region_bytes(library, SIZE))
    groups = [SharedMemoryGroup(library, descriptor, rank, SIZE) for rank in range(SIZE)]
    os.close(descriptor)
    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(run, groups))
