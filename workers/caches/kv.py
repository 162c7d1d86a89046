"""Where keys and values lie: the shapes of layers' caches, and the pages of models that keep none.

A model that encodes, whose tokens attend to later ones, too, runs whole prompts. All prompts of a step run as one
packed sequence, without padding: one call of attention over all of them. The keys and values of a layer lie in
pages that the next layer overwrites. Which pages a prompt has is decided on the host (`in_pages`), so that on a GPU
nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels.data.kv_codes import row_width
from pagewire.kernels.data.paging import UNSCALED, AttentionBatch, Cache, KVScales, kv_block_bytes
from pagewire.workers.caches.memory import Allocator

PAGE = 16  # tokens


@dataclass(frozen=True)
class KVShape:
    """Shape and dtype of one layer's KV cache.

    source: the layer whose keys and values it reads, as the place in the list of shapes; None: it has its own.
    values_in_keys: values are the first elements of keys, which are all that is stored.
    index_dim: elements of the key that its indexer has for each token, in `index_dtype`; 0: it has none.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    source: int | None = None
    values_in_keys: bool = False
    index_dim: int = 0
    index_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, k: Tensor, v: Tensor, index: Tensor | None = None) -> KVShape:
        """That of keys [T, Hkv, D] and values [T, Hkv, Dv], which may be a view of the keys' first elements.

        index: the keys of an indexer [T, size].
        """
        values_in_keys = v.shape[2] < k.shape[2] and v.data_ptr() == k.data_ptr() != 0
        shape = cls(k.shape[1], k.shape[2], v.shape[2], v.dtype, values_in_keys=values_in_keys)
        return shape if index is None else replace(shape, index_dim=index.shape[1], index_dtype=index.dtype)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens; 0 if it is another layer's."""
        if self.source is not None:
            return 0
        sizes = [self.head_dim] if self.values_in_keys else [self.head_dim, self.v_head_dim]
        index = 0 if self.index_dtype is None else block_size * self.index_dim * self.index_dtype.itemsize
        return kv_block_bytes(self.num_kv_heads, block_size, sizes, self.dtype) + index

    def allocate(
        self, num_blocks: int, block_size: int, device: Allocator, scales: KVScales = UNSCALED
    ) -> Cache:
        """A zeroed cache of `num_blocks` blocks of `block_size` tokens on a device."""
        shape = (num_blocks, self.num_kv_heads, block_size)

        def zeros(size: int) -> Tensor:
            return device.zeros((*shape, row_width(size, self.dtype)), self.dtype)

        k = zeros(self.head_dim)
        cache = (
            Cache.of_keys(k, self.v_head_dim, scales)
            if self.values_in_keys
            else Cache(k, zeros(self.v_head_dim), scales)
        )
        if self.index_dtype is None:
            return cache
        return replace(cache, index=device.zeros((num_blocks, block_size, self.index_dim), self.index_dtype))


def allocate_caches(
    shapes: Sequence[KVShape],
    num_blocks: int,
    block_size: int,
    device: Allocator,
    scales: Sequence[KVScales] = (),
) -> list[Cache]:
    """The caches of layers of these shapes, see `KVShape.allocate`; a layer that reads another's has the same one.

    scales: of these layers, and maybe of later ones; empty for 1.
    """
    own = {
        place: shape.allocate(num_blocks, block_size, device, scales[place] if scales else UNSCALED)
        for place, shape in enumerate(shapes)
        if shape.source is None
    }
    return [own[place if shape.source is None else shape.source] for place, shape in enumerate(shapes)]


def memory_of(caches: Sequence[Cache]) -> list[Tensor]:
    """The tensors of caches, each once, though layers may have the same ones."""
    return list({x.data_ptr(): x for cache in caches for x in cache.memory}.values())


class Pages:
    """Memory for the keys and values of one layer at a time: [num_pages, num_kv_heads, PAGE, size] each."""

    def __init__(self) -> None:
        self._caches: dict[KVShape, Cache] = {}

    def of(self, shape: KVShape, num_pages: int, device: torch.device) -> Cache:
        """A cache of at least `num_pages` pages on a device, which is always the same one."""
        cache = self._caches.get(shape)
        if cache is None or len(cache.k) < num_pages:
            sizes = (shape.head_dim, shape.v_head_dim)
            k, v = (
                torch.zeros(num_pages, shape.num_kv_heads, PAGE, size, dtype=shape.dtype, device=device)
                for size in sizes
            )
            cache = self._caches[shape] = Cache(k, v)
        return cache


def in_pages(batch: AttentionBatch, positions: Tensor) -> AttentionBatch:
    """A batch of whole prompts with pages for the keys and values of each, one behind the other; on the host.

    positions: int64 [T], from 0 on in each prompt.
    """
    lengths = batch.query_start_loc.diff().long()
    counts = -(-lengths // PAGE)
    firsts, num_pages = counts.cumsum(0) - counts, int(counts.sum())
    table = firsts[:, None] + torch.arange(int(counts.max()))
    return AttentionBatch(
        query_start_loc=batch.query_start_loc,
        seq_lens=lengths.int(),
        block_table=table.clamp(max=num_pages - 1).int(),
        slot_mapping=torch.repeat_interleave(firsts * PAGE, lengths) + positions,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_query_len,
    )
