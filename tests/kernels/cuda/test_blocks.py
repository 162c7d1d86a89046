"""Copies of blocks on the emulated device."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.cuda.blocks import cache_addresses, copy_blocks
from pagewire.kernels.paging import allocate_kv
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedDevice, guarded

NUM_BLOCKS = 7


def check(
    device: EmulatedDevice, heads: int = 3, block_size: int = 16, size: int = 80, seed: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    caches = []
    for _ in range(2):
        for cache in allocate_kv(NUM_BLOCKS, heads, block_size, size, size, torch.bfloat16, "cpu"):
            caches.append(guarded(cache.copy_(torch.randn(cache.shape, generator=generator))))
    order = torch.randperm(NUM_BLOCKS, generator=generator)
    pairs = order[: 2 * (seed % 4)].view(-1, 2)
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[pairs[:, 1]] = cache[pairs[:, 0]]
    copy_blocks(device, cache_addresses(caches), pairs, caches[0][0].nbytes)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 4), st.sampled_from([16, 32, 64]), st.sampled_from([32, 80, 128]), st.integers(0, 1000),
    st.sampled_from(ORDERS),
)  # fmt: skip
def test_blocks_are_copied_and_nothing_else(
    heads: int, block_size: int, size: int, seed: int, order: tuple[int, int]
) -> None:
    check(EmulatedDevice(order), heads, block_size, size, seed)


def test_what_does_not_fit_is_refused() -> None:
    device, addresses = EmulatedDevice(), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match="int64 expected"):
        copy_blocks(device, addresses, torch.zeros(1, 2, dtype=torch.int32), 64)
    with pytest.raises(ValueError, match="pairs"):
        copy_blocks(device, addresses, torch.zeros(2, 3, dtype=torch.int64), 64)
    with pytest.raises(ValueError, match="40 bytes"):
        copy_blocks(device, addresses, torch.zeros(1, 2, dtype=torch.int64), 40)
    with pytest.raises(ValueError, match="blocks of one size"):
        cache_addresses([torch.zeros(4, 64), torch.zeros(4, 32)])


FAULTS = [
    Edit("blocks.cu", "p.pairs[2 * blockIdx.y] *", "p.pairs[2 * blockIdx.y + 1] *"),
    Edit("blocks.cu", "held[i] = source[first + i * THREADS]", "held[i] = source[first]"),
    Edit("blocks.cu", "if (first + i * THREADS < p.block_chunks) target", "target"),
    Edit("blocks.cu", "THREADS * CHUNKS + threadIdx.x", "THREADS + threadIdx.x"),
    Edit("blocks.cu", "p.caches[blockIdx.z]", "p.caches[0]"),
]


@pytest.mark.parametrize("edit", FAULTS, ids=lambda edit: edit.old[:40])
def test_faults_are_caught(catch: Callable[..., None], edit: Edit) -> None:
    def several(device: EmulatedDevice) -> None:
        for seed in (1, 2, 3):
            check(device, heads=5, block_size=64, size=80, seed=seed)

    several(EmulatedDevice())
    catch(several, edit)
