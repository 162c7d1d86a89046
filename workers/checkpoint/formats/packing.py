"""Small integers packed into larger ones, as files of quantised weights hold them."""

from __future__ import annotations

import torch
from torch import Tensor


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The integers of `bits` bits (1 to 8) in a stream of words: the first in the lowest bits of the first word.

    An integer may begin in one word and end in the next.

    Args:
        words: int32 [..., W].

    Returns:
        uint8 [..., W * 32 // bits]; bits that are left over at the end of a row are dropped.
    """
    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream
    if bits == 4:
        return split_pairs(stream)
    count = stream.shape[-1] * 8 // bits
    padded = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % bits))
    # As many bytes as an integer has bits hold eight integers.
    eights = padded.reshape(*padded.shape[:-1], -1, bits)
    together = torch.zeros(eights.shape[:-1], dtype=torch.int64)
    for byte in range(bits):
        together |= eights[..., byte].long() << 8 * byte
    values = [(together >> bits * place & 2**bits - 1).to(torch.uint8) for place in range(8)]
    return torch.stack(values, dim=-1).flatten(-2)[..., :count]


def pairs(codes: Tensor) -> Tensor:
    """Integers of 4 bits, uint8 [N, K], two in a byte, uint8 [N, K / 2]: the even column in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def split_pairs(stream: Tensor) -> Tensor:
    """Integers of 4 bits, two in a byte [..., B], as uint8 [..., 2 * B]."""
    return torch.stack((stream & 15, stream >> 4), dim=-1).flatten(-2)


def pairs_of_rows(stream: Tensor) -> Tensor:
    """Repack integers of 4 bits: each byte holds two of a column, where it held two of a row.

    Args:
        stream: uint8 [K, N / 2]; K is even.

    Returns:
        uint8 [K / 2, N]: the even row in the low half.
    """
    even, odd = stream[0::2], stream[1::2]
    return torch.stack((even & 15 | odd << 4, even >> 4 | odd & 240), dim=-1).flatten(-2)


def awq_gemm(words: Tensor, zeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in pairs uint8 [N, K / 2], zeros uint8 [N, G] and scales [N, G] of AWQ's layout gemm.

    words: int32 [K, N / 8]. zeros: int32 [G, N / 8]. scales: [G, N].
    """
    codes = _by_output(pairs_of_rows(words.contiguous().view(torch.uint8)))
    return codes, _by_output(unpacked(zeros, 4)), scales.T


def _by_output(stored: Tensor) -> Tensor:
    """Rows [R, N] of words with eight outputs in the order 0 2 4 6 1 3 5 7, as [N, R] in their own order."""
    words = stored.reshape(len(stored), -1, 2, 4)
    return words.permute(1, 3, 2, 0).reshape(-1, len(stored))
