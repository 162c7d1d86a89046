"""Weights as integers of 8, 6 or 4 bits with a scale, and often an offset, for each group of columns.

The formats of quantised checkpoints are read as one of these schemes; none of them has kernels of its own. On the
CPU the product over such a weight quantises its input, too, and is defined by
`reference.quantised.quantised_linear`; on a GPU the input keeps 16 bits (`cuda.linear`) unless the checkpoint says
that activations are quantised (`cuda.quantised_linear`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels.data.weight import Parts, Weight

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_COLUMNS = 1 << 16
"""Of a group: 127 times 255 times as many is less than 2^31, so that sums fit 32 bits."""
BLOCK = 1 << 18
"""About how many numbers are converted at a time: they stay in a core's cache."""
NOT_FINITE = "it holds numbers that are not finite"
"""The text of the error for them."""


@dataclass(frozen=True, slots=True)
class Integers:
    """`W[n, k] = scale[n, g] * (value(code[n, k]) - zero) + offset[n, g]`, where column k is in group g.

    The parts are:

    - codes: uint8 [N, K]; uint8 [N, K / 2] with 4 bits, the even column in the low half of a byte. Codes of 6 bits
      lie closer only where a product reads them
    - scales: [N, K / group], or [N, 1] without groups, in float16, bfloat16 or float32
    - offsets: like scales; absent where every offset is 0
    """

    bits: int
    """8, 6 or 4."""
    group: int | None
    """How many columns share a scale: 16, 32, 64 or 128; None: all of a row."""
    zero: int
    """The value that stands for 0 (without the offset): 128 for signed 8 bits, 32 for 6 bits, 8 for 4 bits."""
    table: tuple[int, ...] | None = None
    """With 4 bits, the values of the 16 codes, from 0 to 255; None: a code is its own value."""
    rounds_rows: bool = False
    """The checkpoint says that activations have 8 bits, too: a GPU may round the rows of the product."""

    @property
    def name(self) -> str:
        """Names differ if schemes do."""
        form = "table4" if self.table else f"int{self.bits}"
        values = "" if self.table is None else f"{list(self.table)}"
        rows = " with rounded rows" if self.rounds_rows else ""
        return f"{form}/{self.group or 'row'}-{self.zero}{values}{rows}"

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 2 if self.bits == 4 else 1

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
        codes, *scales = parts
        step = self.group or self.per_byte
        if start % step or stop % step:
            raise ValueError(f"columns {start} to {stop} cut a group of {step}")
        cut = codes[:, start // self.per_byte : stop // self.per_byte]
        if self.group is None:
            return (cut, *scales)
        return (cut, *(part[:, start // self.group : stop // self.group] for part in scales))

    def joined(self, parts: Sequence[Parts]) -> Parts:
        """See `Scheme.joined`. A matrix without offsets gets zeros if others have some.

        Raises:
            ValueError: the dtypes of the scales differ.
        """
        if len({part[1].dtype for part in parts}) > 1:
            raise ValueError("weights whose scales are of different dtypes cannot be joined")
        most = max(map(len, parts))
        complete = [part if len(part) == most else (*part, torch.zeros_like(part[1])) for part in parts]
        return tuple(torch.cat(same) for same in zip(*complete, strict=True))

    def values(self, parts: Parts) -> Tensor:
        """`value(code)`, uint8 [N, K]."""
        codes = parts[0]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        if self.table is None:
            return codes
        return torch.tensor(self.table, dtype=torch.uint8, device=codes.device)[codes.long()]

    def dense(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """See `Scheme.dense`. Computed in float32."""
        values = self.values(parts).float().sub_(self.zero)
        groups = torch.unflatten(values, 1, (parts[1].shape[1], -1))
        groups.mul_(parts[1].float()[..., None])
        if len(parts) > 2:
            groups.add_(parts[2].float()[..., None])
        return values.to(dtype)


INT8 = Integers(8, None, 128)
"""What most 8-bit formats hold: signed integers, a scale for each output."""


def integer_weight(
    scheme: Integers, codes: Tensor, scales: Tensor, offsets: Tensor | None, dtype: torch.dtype
) -> Weight:
    """A weight from its parts, as `Integers` describes them; dtype: of the product's inputs and outputs.

    Raises:
        ValueError: the shapes or dtypes of the parts do not fit the scheme, or the scheme has no product.
    """
    check_scheme(scheme)
    num_rows, num_in = codes.shape[0], codes.shape[1] * scheme.per_byte
    groups = (num_rows, num_in // (scheme.group or num_in))
    if num_in > MOST_COLUMNS and scheme.group is None:
        raise ValueError(
            f"a scale for {num_in} columns: no kernel adds up more than {MOST_COLUMNS}; use groups"
        )
    fits = codes.dtype == torch.uint8 and num_in % (scheme.group or 1) == 0
    for part in (scales, offsets):
        fits &= part is None or (tuple(part.shape) == groups and part.dtype in SCALE_DTYPES)
    if not fits or (offsets is not None and offsets.dtype != scales.dtype):
        raise ValueError(
            f"codes {tuple(codes.shape)} of {codes.dtype} and scales {tuple(scales.shape)} of {scales.dtype} "
            f"are no weight of scheme {scheme.name}"
        )
    parts = (codes, scales) if offsets is None else (codes, scales, offsets)
    return Weight(scheme, parts, (num_rows, num_in), dtype)


def check_scheme(scheme: Integers) -> None:
    """Raise ValueError if no kernel multiplies with such a scheme."""
    if (
        scheme.bits not in (4, 6, 8)
        or scheme.group not in (None, 16, 32, 64, 128)
        or not 0 <= scheme.zero <= 255
        or (scheme.table is not None and (scheme.bits != 4 or len(scheme.table) != 16))
    ):
        raise ValueError(f"no kernel multiplies with {scheme}")


def row_blocks(num_rows: int, num_in: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """First and last + 1 of blocks of rows, each of a multiple of `multiple` rows but for the last one.

    A block has about `BLOCK` numbers.
    """
    step = max(1, BLOCK // max(1, num_in * multiple)) * multiple
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def check_quantisable(weight: Weight, scheme: Integers) -> None:
    """Raise ValueError if a weight cannot become one of a scheme: it has a table, or K is not whole groups."""
    check_scheme(scheme)
    if scheme.table is not None:
        raise ValueError("numbers are quantised without a table")
    step = scheme.group or scheme.per_byte
    if weight.shape[1] % step:
        raise ValueError(f"{weight.shape[1]} columns are no multiple of a group of {step}")


def quantise(weight: Weight, scheme: Integers, scale_dtype: torch.dtype = torch.float16) -> Weight:
    """Any weight as the nearest one of a scheme without a table; `relative_error` tells what that costs.

    Codes are symmetric; with zero 0 they go from the least value of a group, its offset, to the largest. Scales are
    rounded to `scale_dtype` first, so that codes fit the rounded ones. This defines the bits; `kernels/linear.py`
    gives the same ones faster.

    Raises:
        ValueError: the scheme has a table, K is no multiple of the group, or a number is not finite.
    """
    check_quantisable(weight, scheme)
    blocks = [weight.slice(start, stop) for start, stop in row_blocks(*weight.shape)]
    return Weight.joined([_quantised(block, scheme, scale_dtype) for block in blocks])


def _quantised(weight: Weight, scheme: Integers, scale_dtype: torch.dtype) -> Weight:
    """See `quantise`; the whole matrix is in memory in float32."""
    num_in, most = weight.shape[1], 2**scheme.bits - 1
    dense = replace(weight, dtype=torch.float32).dense().contiguous()
    if not torch.stack(dense.aminmax()).isfinite().all():
        raise ValueError(NOT_FINITE)
    groups = torch.unflatten(dense, 1, (-1, scheme.group or num_in))
    offsets = None
    if scheme.zero:
        reach = groups.abs().amax(-1)
        scales = _rounded(reach / (most - scheme.zero), scale_dtype)
        steps = groups / scales.float()[..., None]
        codes = (steps.round() + scheme.zero).clamp(1, most)
    else:
        low, high = groups.amin(-1), groups.amax(-1).clamp(min=0)
        offsets = torch.where(low < 0, low, 0.0).to(scale_dtype)  # and never -0
        scales = _rounded((high - offsets.float()) / most, scale_dtype)
        steps = (groups - offsets.float()[..., None]) / scales.float()[..., None]
        codes = steps.round().clamp(0, most)
    codes = codes.to(torch.uint8).flatten(1)
    if scheme.bits == 4:
        pairs = codes.view(torch.int16)  # the even column in the low byte
        codes = (pairs | pairs >> 4).to(torch.uint8)
    return integer_weight(scheme, codes, scales, offsets, weight.dtype)


def relative_error(weight: Weight, original: Weight) -> float:
    """How far a weight is from another, as a share of the other's norm."""
    exact = replace(original, dtype=torch.float32).dense()
    return float(
        (replace(weight, dtype=torch.float32).dense() - exact).norm() / exact.norm().clamp_min(1e-30)
    )


def _rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in a dtype, none of them 0 or infinite: a group of zeros has the scale 1."""
    limits = torch.finfo(dtype)
    return torch.where(scales > 0, scales.clamp(limits.smallest_normal, limits.max), 1.0).to(dtype)
