"""The marlin layout: symmetric integers of 4 bits in the order in which a GPU kernel multiplies them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pagewire.workers.checkpoint.formats.checks import MARLIN_TILE as TILE
from pagewire.workers.checkpoint.formats.grouped import GroupedIntegers
from pagewire.workers.checkpoint.formats.packing import pairs, unpacked

BITS = 4


def marlin_integers(
    name: str, tensors: Mapping[str, Tensor], words: str, scales: str, group: int
) -> GroupedIntegers:
    """The matrix whose tensors `marlin_shape` describes."""
    num_in = tensors[words].shape[0] * TILE
    codes = pairs(marlin_codes(tensors[words]).T)
    ordered = marlin_scales(tensors[scales]).T
    return GroupedIntegers(
        f"{name}.{scales}", BITS, num_in, codes, ordered, None, num_in if group == -1 else group
    )


def marlin_codes(words: Tensor) -> Tensor:
    """The codes of a matrix in the order of its columns and rows.

    The kernel multiplies tiles of 16 x 16 on tensor cores. Four tiles, which are 64 outputs, lie in 1,024 codes,
    eight in a word. Word after word they belong to tile j of 4 in lane i of 32, which needs, of its column i // 4
    and of the column 8 further, the rows 2 * (i % 4) + (0, 1, 8, 9). A word has these eight codes in the order
    0 2 4 6 1 3 5 7, since the kernel takes codes from both halves of a word at once.

    Args:
        words: int32 [K / 16, 2 * N], N a multiple of 64.

    Returns:
        uint8 [K, N].
    """
    num_in, num_out = words.shape[0] * TILE, words.shape[1] // 2
    lane, tile, column, row = torch.meshgrid(
        torch.arange(32), torch.arange(4), torch.tensor([0, 8]), torch.tensor([0, 1, 8, 9]), indexing="ij"
    )
    rows, columns = 2 * (lane % 4) + row, lane // 4 + column
    order = (256 * tile + TILE * rows + columns).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    codes = unpacked(words, BITS).reshape(-1, order.numel())[:, order.argsort()]
    return codes.reshape(num_in // TILE, num_out // TILE, TILE, TILE).transpose(1, 2).reshape(num_in, num_out)


def marlin_scales(scales: Tensor) -> Tensor:
    """The scales [G, N] in the order of the outputs; the layout has them in the order in which lanes need them.

    A lane needs those of 8 outputs of 64, or of 32 if there is a single group.
    """
    if len(scales) > 1:
        order = torch.arange(64).reshape(8, 8).T.flatten()
    else:
        order = (2 * torch.arange(4)[:, None] + torch.tensor([0, 1, 8, 9, 16, 17, 24, 25])).flatten()
    return scales.reshape(-1, order.numel())[:, order.argsort()].reshape(scales.shape)
