"""Keys and values of all heads as products of one latent, with a matrix of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.weight import Linear

HeadProducts = Sequence[Linear] | Tensor
"""A product of each head: linear layers of equal shape, or where PyTorch multiplies them matrices [H, K, N]."""


@dataclass(eq=False)
class LatentHeads:
    """The linear layer [T, rank] to [T, H (nope + Dv)] that makes keys and values of latents, for the other sides.

    Queries are multiplied by its part for keys in place of the latents, and weighted sums of latents by that for
    values: see `pagewire.kernels.latents`. num_heads: H. nope: elements of a query that are not rotated.
    v_head_dim: elements of a head's values.
    """

    keys: HeadProducts
    """[n, nope] to [n, rank]."""
    values: HeadProducts
    """[n, rank] to [n, Dv]."""

    in_features: int = field(init=False)
    """Elements of a latent."""
    out_features: int = field(init=False)
    """Those of keys and values of all heads."""
    dtype: torch.dtype = field(init=False)
    """Of latents, keys and values."""
    num_bytes: int = field(init=False)
    """Of all matrices."""

    def __post_init__(self) -> None:
        self.num_heads, (self.nope, self.in_features) = len(self.keys), _shape(self.keys)
        self.v_head_dim = _shape(self.values)[1]
        self.out_features = self.num_heads * (self.nope + self.v_head_dim)
        self.dtype = self.keys.dtype if isinstance(self.keys, Tensor) else self.keys[0].dtype
        self.num_bytes = sum(_num_bytes(products) for products in (self.keys, self.values))

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
