"""Copies of whole blocks of the KV cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.cuda.launch import Device, pack
from pagewire.kernels.cuda.source import Variant

THREADS = 256
CHUNKS = 4
MAX_PAIRS = 65535
VARIANT = Variant("blocks.cu", f"copy_blocks<{CHUNKS}>", "CopyBlocks")


def variants() -> list[Variant]:
    """The only one."""
    return [VARIANT]


def copy_blocks(device: Device, caches: Tensor, pairs: Tensor, block_bytes: int) -> None:
    """Copies blocks to blocks of the same cache, for the K and V caches of all layers.

    Args:
        caches: int64 [N], addresses on the device, from `cache_addresses`.
        pairs: int64 [P, 2], the source and the target of each copy, on the device. No block is both, and none twice
            a target.
        block_bytes: of a block in one cache.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or a block is not a multiple of 16 bytes.
    """
    if caches.dtype != torch.int64 or pairs.dtype != torch.int64:
        raise TypeError(f"copy_blocks: int64 expected, not {caches.dtype} and {pairs.dtype}")
    if caches.dim() != 1 or pairs.dim() != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        raise ValueError(f"copy_blocks: caches {tuple(caches.shape)}, pairs {tuple(pairs.shape)}")
    if block_bytes % 16 or max(len(pairs), len(caches)) > MAX_PAIRS:
        raise ValueError(f"copy_blocks: {len(pairs)} copies of {block_bytes} bytes in {len(caches)} caches")
    pieces = -(-block_bytes // (16 * THREADS * CHUNKS))
    if len(pairs) and len(caches) and pieces:
        parameters = pack(VARIANT, caches=caches, pairs=pairs, block_chunks=block_bytes // 16)
        device.launch(VARIANT, (pieces, len(pairs), len(caches)), (THREADS,), parameters)


def cache_addresses(caches: Sequence[Tensor]) -> Tensor:
    """Where caches lie, for `copy_blocks`; all have blocks of one size.

    Raises:
        ValueError: they are not contiguous, not aligned to 16 bytes, or their blocks differ in size.
    """
    sizes = {cache[0].nbytes for cache in caches}
    if len(sizes) != 1 or not all(c.is_contiguous() and c.data_ptr() % 16 == 0 for c in caches):
        raise ValueError(f"caches are contiguous, with blocks of one size, not {sorted(sizes)} bytes")
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=caches[0].device)
