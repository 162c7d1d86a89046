"""Weights as 8-bit floats (e4m3) with a scale for each row, or for each group of its columns.

Only GPUs multiply with such numbers (`kernels.linear.multiplies_floats`). Elsewhere 8-bit floats are held as
integers, see `workers/checkpoint/formats/reexpress.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.data.weight import Parts, Weight

GROUPS = (None, 128, 64, 32, 16)
"""Numbers of columns that may share a scale; None: all of a row."""
NO_NUMBER = 0x7F
"""The magnitude of e4m3's NaN; all other codes are numbers, as it has no infinities."""


@dataclass(frozen=True, slots=True)
class Floats:
    """`W[n, k] = scale[n, g] * code[n, k]`, where column k is in group g.

    The parts are:

    - codes: uint8 [N, K], the bits of float8_e4m3fn. As bytes, since PyTorch does not index or join those
    - scales: float32 [N, K / group], or [N, 1] without groups
    """

    group: int | None
    """How many columns share a scale: one of `GROUPS`."""
    rounds_rows: bool = False
    """See `Integers.rounds_rows`."""

    @property
    def name(self) -> str:
        """Names differ if schemes do."""
        return f"e4m3/{self.group or 'row'}{' with rounded rows' if self.rounds_rows else ''}"

    def rows(self, parts: Parts, start: int, stop: int) -> Parts:
        """See `Scheme.rows`."""
        return tuple(part[start:stop] for part in parts)

    def take(self, parts: Parts, index: Tensor) -> Parts:
        """See `Scheme.take`."""
        return tuple(part[index] for part in parts)

    def columns(self, parts: Parts, start: int, stop: int) -> Parts:
        """See `Scheme.columns`.

        Raises:
            ValueError: a group would be cut.
        """
        codes, scales = parts
        if self.group is None:
            return codes[:, start:stop], scales
        if start % self.group or stop % self.group:
            raise ValueError(f"columns {start} to {stop} cut a group of {self.group}")
        return codes[:, start:stop], scales[:, start // self.group : stop // self.group]

    def joined(self, parts: Sequence[Parts]) -> Parts:
        """See `Scheme.joined`."""
        return tuple(torch.cat(same) for same in zip(*parts, strict=True))

    def dense(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """See `Scheme.dense`. Computed in float32."""
        codes, scales = parts
        values = codes.view(torch.float8_e4m3fn).float()
        torch.unflatten(values, 1, (scales.shape[1], -1)).mul_(scales[..., None])
        return values.to(dtype)


def float8_weight(
    values: Tensor, scales: Tensor, group: int | None, dtype: torch.dtype, rounds_rows: bool = False
) -> Weight:
    """A weight of 8-bit floats, without a copy of them.

    values: float8_e4m3fn [N, K]. scales: float32 [N, K / group], or [N, 1] without groups. dtype: of the product's
    inputs and outputs. rounds_rows: see `Floats`.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is no such group.
    """
    fits = values.dtype == torch.float8_e4m3fn and values.dim() == 2 and group in GROUPS
    if fits:
        num_rows, num_in = values.shape
        width = group or num_in
        fits = num_in % width == 0 and tuple(scales.shape) == (num_rows, num_in // width)
    if not fits or scales.dtype != torch.float32:
        raise ValueError(
            f"values {tuple(values.shape)} of {values.dtype} and scales {tuple(scales.shape)} of {scales.dtype} "
            f"are no weight of 8-bit floats in groups of {group}"
        )
    return Weight(Floats(group, rounds_rows), (values.view(torch.uint8), scales), (num_rows, num_in), dtype)


def in_smaller_groups(weight: Weight, group: int) -> Weight:
    """A weight of 8-bit floats with the same numbers, in groups of a divisor of the columns that share a scale now.

    Raises:
        ValueError: there is no such group.
    """
    scheme, (codes, scales) = weight.scheme, weight.parts
    assert isinstance(scheme, Floats) and scheme.group is not None
    smaller = scales.repeat_interleave(scheme.group // group, dim=1)
    return float8_weight(codes.view(torch.float8_e4m3fn), smaller, group, weight.dtype, scheme.rounds_rows)


def has_nan(codes: Tensor) -> bool:
    """True if a code, uint8 [N, K], is no number."""
    return bool((codes & NO_NUMBER == NO_NUMBER).any())
