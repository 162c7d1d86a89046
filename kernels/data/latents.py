"""Keys and values of all heads as products of one latent, with a matrix of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.weight import Linear

HeadProducts = Sequence[Linear] | Tensor
"""A product of each head: linear layers of equal shape, or where PyTorch multiplies them matrices [H, K, N]."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The linear layer [T, rank] to [T, H (nope + Dv)] that makes keys and values of latents, for the other sides.

    Queries are multiplied by its part for keys in place of the latents, and weighted sums of latents by that for
    values: see `pagewire.kernels.latents`.
    """

    keys: HeadProducts
    """[n, nope] to [n, rank]."""
    values: HeadProducts
    """[n, rank] to [n, Dv]."""

    @property
    def num_heads(self) -> int:
        """H."""
        return len(self.keys)

    @property
    def nope(self) -> int:
        """Elements of a query that are not rotated."""
        return _shape(self.keys)[0]

    @property
    def v_head_dim(self) -> int:
        """Elements of a head's values."""
        return _shape(self.values)[1]

    @property
    def in_features(self) -> int:
        """Elements of a latent."""
        return _shape(self.values)[0]

    @property
    def out_features(self) -> int:
        """Those of keys and values of all heads."""
        return self.num_heads * (self.nope + self.v_head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of latents, keys and values."""
        return self.keys.dtype if isinstance(self.keys, Tensor) else self.keys[0].dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(_num_bytes(products) for products in (self.keys, self.values))

    def __call__(self, x: Tensor) -> Tensor:
        """Latents [..., rank] to keys and values [..., H (nope + Dv)], slowly: so DoRA learns the weight."""
        keys, values = (_matrices(products, x) for products in (self.keys, self.values))
        return functional.linear(x, torch.cat([keys, values.mT], 1).flatten(0, 1))


def _shape(products: HeadProducts) -> tuple[int, int]:
    """Elements of what a head's product takes and gives."""
    if isinstance(products, Tensor):
        return products.shape[1], products.shape[2]
    return products[0].in_features, products[0].out_features


def _num_bytes(products: HeadProducts) -> int:
    return products.nbytes if isinstance(products, Tensor) else sum(each.num_bytes for each in products)


def _matrices(products: HeadProducts, like: Tensor) -> Tensor:
    """The matrices [H, K, N]."""
    if isinstance(products, Tensor):
        return products
    unit = torch.eye(products[0].in_features, dtype=like.dtype, device=like.device)
    return torch.stack([linear(unit) for linear in products])
