"""The sizes of a layer's attention in stack.cpp, and attention to latents as it takes it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels.cpu.experts import Matrices, is_packed, matrix
from pagewire.kernels.cpu.library import structure
from pagewire.kernels.cpu.tensors import norm_struct
from pagewire.kernels.data.deltas import plain
from pagewire.kernels.data.latents import LatentHeads
from pagewire.kernels.data.layer import Indexer, Latents, Layer
from pagewire.kernels.data.paging import Cache

LatentParameters, IndexerParameters = map(structure, ("Latents", "Indexer"))


@dataclass(frozen=True)
class IndexSizes:
    """The sizes of an indexer. size: elements of a key. num_chosen: keys that a token sees."""

    num_heads: int
    size: int
    num_chosen: int

    @classmethod
    def of(cls, indexer: Indexer) -> IndexSizes:
        """Those of an indexer."""
        return cls(indexer.weights.out_features, indexer.size, indexer.num_chosen)

    @property
    def scratch(self) -> int:
        """Elements per token of `index` of `StackCall`."""
        return self.size + self.num_heads * (self.size + 1)


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of a layer's attention; they are equal in all layers of a compiled stack that attend.

    head_dim: elements of a cached key. query_dim, value_dim: of a head's query, and of its values, as products of
    the layer make and take them. rank: elements of a latent; 0: keys and values are no latents. query_rank: of what
    a product of its own makes queries of; 0: the layer's first product makes queries. index: of its indexer.
    gated: behind all queries stands a gate for each. head_gates: behind the values stands one of each head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_dim: int
    value_dim: int
    rank: int = 0
    query_rank: int = 0
    index: IndexSizes | None = None
    gated: bool = False
    head_gates: bool = False

    @classmethod
    def of(cls, layer: Layer) -> AttentionSizes:
        """Those of a layer; without attention none but 0."""
        size, latents = layer.head_dim, layer.latents
        if latents is None:
            own = layer.num_heads, layer.num_kv_heads
            return cls(*own, size, size, size, gated=layer.gated_queries, head_gates=layer.head_gates)
        heads, query_rank = heads_of(latents), 0 if latents.queries is None else latents.queries.in_features
        query_dim = heads.nope + size - latents.rank
        return cls(
            layer.num_heads,
            layer.num_kv_heads,
            size,
            query_dim,
            heads.v_head_dim,
            latents.rank,
            query_rank,
            None if latents.indexer is None else IndexSizes.of(latents.indexer),
        )

    def shapes(self, hidden: int, input_size: int) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of a layer's products, whose first one takes input_size; hidden: of a state."""
        found = {"qkv": (self.qkv, input_size), "out": (hidden, self.num_heads * self.value_dim)}
        first = self.query_rank or self.num_heads * self.query_dim
        if self.query_rank:
            found["queries"] = self.num_heads * self.query_dim, self.query_rank
        if (index := self.index) is not None:
            found["index_keys"] = index.size, input_size
            found["index_queries"] = index.num_heads * index.size, first
            found["index_weights"] = index.num_heads, input_size
        return found

    @property
    def num_chosen(self) -> int:
        """Keys that an indexer chooses for a token."""
        return 0 if self.index is None else self.index.num_chosen

    @property
    def cached_values(self) -> int:
        """Elements of a cached value."""
        return self.rank or self.head_dim

    @property
    def rotated(self) -> int:
        """Elements of a head that angles may turn."""
        return self.head_dim - self.rank

    @property
    def qkv(self) -> int:
        """What the first product of a layer makes of a token."""
        if not self.rank:
            rows = ((1 + self.gated) * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
            return rows + self.num_heads * self.head_gates
        return (self.query_rank or self.num_heads * self.query_dim) + self.head_dim

    @property
    def scratch(self) -> tuple[int, int, int, int]:
        """Elements per token of `attended`, `queries`, `absorbed` and `index` of `StackCall`."""
        heads, rank = self.num_heads, self.rank
        if not rank:
            return heads * self.head_dim, 0, 0, 0
        nope = self.query_dim - self.rotated
        return (
            heads * max(nope + rank, self.value_dim),
            heads * max(self.query_dim, rank),
            heads * max(self.head_dim, rank + self.value_dim),
            0 if self.index is None else self.index.scratch,
        )


def common_sizes(layers: Sequence[Layer]) -> AttentionSizes | None:
    """The sizes of all layers that attend; None if they differ. Not all of them need to have an indexer."""
    found = [AttentionSizes.of(layer) for layer in layers if layer.mixer is None and layer.attends]
    forms = {replace(sizes, index=None) for sizes in found}
    indexes = {sizes.index for sizes in found if sizes.index is not None}
    if len(forms) > 1 or len(indexes) > 1:
        return None
    return replace(forms.pop(), index=next(iter(indexes), None)) if forms else AttentionSizes.of(layers[0])


def index_address(cache: Cache, latents: Latents | None, dtype: torch.dtype) -> int | None:
    """Where the keys of a layer's indexer lie; None if it has none.

    Raises:
        ValueError: the cache has none of their size.
    """
    if latents is None or latents.indexer is None:
        return None
    index, shape = cache.index, (cache.k.shape[0], cache.k.shape[2], latents.indexer.size)
    if index is None or index.shape != shape or index.dtype != dtype or not index.is_contiguous():
        raise ValueError(f"caches {shape} of {dtype} expected for keys of an indexer")
    return index.data_ptr()


def heads_of(latents: Latents) -> LatentHeads:
    """The matrices of heads, without what adapters change in them."""
    heads = plain(latents.heads)
    assert isinstance(heads, LatentHeads)
    return heads


class CompiledLatents:
    """What a layer has for attention to latents, as stack.cpp takes it.

    struct: valid as long as this object. dtypes: of all weights.
    """

    @classmethod
    def of(cls, library: ctypes.CDLL, latents: Latents) -> CompiledLatents | None:
        """None if not all weights are packed.

        Raises:
            ValueError: the heads differ in shape, or shapes and dtypes do not fit together.
        """
        heads = heads_of(latents)
        if isinstance(heads.keys, Tensor) or isinstance(heads.values, Tensor):
            return None
        keys, values = Matrices.of(library, heads.keys), Matrices.of(library, heads.values)
        others = (linear for name, linear in latents.linears().items() if name != "heads")
        if keys is None or values is None or not all(map(is_packed, others)):
            return None
        return cls(latents, keys, values)

    def __init__(self, latents: Latents, keys: Matrices, values: Matrices) -> None:
        if (len(values.structs), values.in_features, values.dtype) != (
            len(keys.structs),
            keys.out_features,
            keys.dtype,
        ):
            raise ValueError("matrices of as many heads for keys and for values of a latent expected")
        self._latents, self._keys, self._values = latents, keys, values
        self.struct = LatentParameters(
            norm=norm_struct(latents.norm, keys.out_features, keys.dtype),
            keys=ctypes.addressof(keys.structs),
            values=ctypes.addressof(values.structs),
        )
        self.struct.follows = latents.follows
        if (index := latents.indexer) is not None:
            self.struct.indexer = IndexerParameters(
                keys=matrix(index.keys),
                queries=matrix(index.queries),
                weights=matrix(index.weights),
                norm=norm_struct(index.norm, index.size, keys.dtype),
                num_chosen=index.num_chosen,
                interleaved=index.interleaved,
            )
        if (queries := latents.queries) is not None:
            self.struct.queries = matrix(queries)
            if latents.query_norm is not None:
                self.struct.query_norm = norm_struct(latents.query_norm, queries.in_features, keys.dtype)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of all weights."""
        latents = self._latents
        norms = [latents.norm, latents.query_norm, None if latents.indexer is None else latents.indexer.norm]
        found = {linear.dtype for linear in latents.linears().values()}
        return found | {norm.weight.dtype for norm in norms if norm is not None}
