"""Kernels over logits in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

FRACTION_BITS = 44
"""Bits of the fraction of a token's mass."""

LOG2_E = 1.44269504
LN_2 = (0.693359375, -2.12194440e-4)  # in two parts: the first has so few bits that its products are exact
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def largest(x: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `Kernels.largest`."""
    if allowed is not None:
        x = only_allowed(x, allowed)
    values = x.amax(1)
    # argmax of a comparison is the first True; argmax of 16-bit floats is slow on CPUs.
    return values.float(), (x == values[:, None]).to(torch.uint8).argmax(1)


def only_allowed(x: Tensor, allowed: Tensor) -> Tensor:
    """See `Kernels.only_allowed`."""
    bits = allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=x.device) & 1
    return x.float().masked_fill(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf)


def fixed_point_probabilities(depths: Tensor) -> Tensor:
    """See `Kernels.fixed_point_probabilities`."""
    # exp(r - n log 2) is 2**-n times Cephes' polynomial for exp(r).
    depths = depths.clamp(max=32)
    n = (depths * LOG2_E).round()
    r = (n * LN_2[0] - depths) + n * LN_2[1]
    p = torch.full_like(r, EXP[0])
    for coefficient in EXP[1:]:
        p = p.mul_(r).add_(coefficient)
    p = p.mul_(r * r).add_(r).add_(1)
    power = (n.neg_().int().add_(127 + FRACTION_BITS) << 23).view(torch.float32)
    return p.mul_(power).long()
