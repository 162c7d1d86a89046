"""Numbers that no product multiplies with, held as integers in small groups, and what that costs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels.data.floats import float8_weight, has_nan
from pagewire.kernels.data.integers import NOT_FINITE, Integers, relative_error, row_blocks
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.linear import quantise
from pagewire.workers.checkpoint.formats.format import known_group, wider

logger = logging.getLogger("pagewire.worker")

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MULTIPLE, SMALLEST_GROUP = 32, 64
"""Columns of 8-bit floats that are kept: they are a multiple of the first, and the second or more share a scale."""
EXPONENT_BIAS = 127
SCALES = torch.bfloat16
"""The dtype of scales: float16 would lose those of small weights."""

_logged: set[str] = set()


def reexpressed(kind: str, blocks: Iterable[Tensor], dtype: torch.dtype) -> Weight:
    """A matrix [N, K] as integers of the scheme `wider`; the first of its kind is logged with its error.

    kind: what the numbers were, for the log. blocks: floats [n, K], one below the other; each is dropped once it is
    converted. dtype: of the product's inputs and outputs.

    Raises:
        ValueError: a number is not finite.
    """
    made: list[Weight] = []
    for block in blocks:
        made.append(
            as_integers(kind, dense_weight(block, dtype), Integers(8, wider(block.shape[1]).group, 128))
        )
    return Weight.joined(made)


def as_integers(kind: str, weight: Weight, scheme: Integers) -> Weight:
    """A weight as integers of a scheme without a table; the log says once for each kind what that costs.

    Raises:
        ValueError: a number is not finite.
    """
    made = quantise(weight, scheme, SCALES)
    if kind not in _logged:
        _, some = next(row_blocks(*weight.shape))
        error = relative_error(made.slice(0, some), weight.slice(0, some))
        groups = f"groups of {scheme.group}" if scheme.group else "rows"
        form = f"integers of {scheme.bits} bits in {groups}"
        log_once(kind, f"{kind} are held as {form}, which changes weights by {error:.2%} of their norm")
    return made


def log_once(key: str, text: str) -> None:
    """Log what concerns every matrix of a checkpoint once for a process. key: texts of one key are one."""
    if key not in _logged:
        _logged.add(key)
        logger.info("%s", text)


def fp8_weight(
    values: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None
) -> Weight:
    """A matrix of 8-bit floats, held in 8 bits as integers; the log says what that costs.

    values: float8 [N, K]. scales: what they are multiplied with, for the whole matrix [] or [1], for each row [N]
    or [N, 1], or for each block [N / rows, K / columns], rounded up. dtype: of the product's inputs and outputs.
    block: rows and columns of a block; None: the fewest that fit the scales.

    Raises:
        ValueError: values are of another dtype, scales fit no such shape, or a number is not finite.
    """
    if values.dtype not in FLOAT8 or values.dim() != 2:
        raise ValueError(f"{tuple(values.shape)} of {values.dtype} is no matrix of 8-bit floats")
    blocks = _scaled(values, *_grid(values, scales.float(), block))
    return reexpressed(f"8-bit floats ({str(values.dtype).removeprefix('torch.float8_')})", blocks, dtype)


def kept_fp8_weight(
    values: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None
) -> Weight | None:
    """A matrix of 8-bit floats as it is, with a scale in float32 for each row, or each group of its columns.

    Arguments as of `fp8_weight`; scales may also be exponents (float8_e8m0fnu, or uint8).

    Returns:
        None if no kernel multiplies with such numbers: e5m2, columns that are no multiple of 32, and scales for
        other numbers of columns than multiples of 64. Smaller groups would take more memory than integers.

    Raises:
        ValueError: scales fit no such shape, or a number is not finite.
    """
    num_rows, num_in = values.shape
    if values.dtype != torch.float8_e4m3fn or num_in % MULTIPLE:
        return None
    factors, rows, columns = _grid(values, as_numbers(scales), block)
    group = None if columns >= num_in else known_group(columns, num_in)
    if (group is not None and group < SMALLEST_GROUP) or (group is None and factors.shape[1] > 1):
        return None
    if has_nan(values.view(torch.uint8)) or not factors.isfinite().all():
        raise ValueError(NOT_FINITE)
    by_row = factors[torch.arange(num_rows, device=factors.device) // rows]
    if group is not None:
        by_row = by_row.repeat_interleave(columns // group, 1)[:, : num_in // group].contiguous()
    return float8_weight(values, by_row, group, dtype)


def as_numbers(scales: Tensor) -> Tensor:
    """Scales in float32. Bytes are exponents of 2 with a bias of 127; the one that is no number is infinite."""
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - EXPONENT_BIAS)


def rounded_to_fp8(weight: Weight, keeps_floats: bool = False) -> Weight:
    """A dense matrix rounded to e4m3 with a scale for each row, and held as a checkpoint of such numbers is.

    keeps_floats: as these numbers, where kernels multiply with them; else as integers.
    """
    most = torch.finfo(torch.float8_e4m3fn).max
    device = weight.parts[0].device
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(weight.shape[0], 1, device=device)
    for start, stop in row_blocks(*weight.shape):
        rows = replace(weight.slice(start, stop), dtype=torch.float32).dense()
        reach = rows.abs().amax(1, keepdim=True)
        scales[start:stop] = torch.where(reach > 0, reach / most, 1.0)
        values[start:stop] = (rows / scales[start:stop]).to(torch.float8_e4m3fn)
    kept = kept_fp8_weight(values, scales, weight.dtype) if keeps_floats else None
    return fp8_weight(values, scales, weight.dtype) if kept is None else kept


def _grid(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, int, int]:
    """Scales as a matrix, and how many rows and columns share one."""
    rows, columns = values.shape
    if scales.dim() == 4:  # [N / rows, 1, K / columns, 1], as ModelOpt has them
        scales = scales[:, 0, :, 0]
    if scales.numel() == 1:
        return scales.reshape(1, 1), rows, columns
    if scales.numel() == rows and scales.shape[0] == rows:
        return scales.reshape(rows, 1), 1, columns
    if scales.dim() == 2:
        size = block or (-(-rows // scales.shape[0]), -(-columns // scales.shape[1]))
        if tuple(scales.shape) == (-(-rows // size[0]), -(-columns // size[1])):
            return scales, *size
    raise ValueError(
        f"scales {tuple(scales.shape)} do not fit a matrix {tuple(values.shape)}, blocks {block}"
    )


def _scaled(values: Tensor, scales: Tensor, rows: int, columns: int) -> Iterator[Tensor]:
    """Blocks of rows of the dense matrix."""
    for start, stop in row_blocks(*values.shape):
        by_row = scales[torch.arange(start, stop) // rows]
        yield values[start:stop].float() * by_row.repeat_interleave(columns, 1)[:, : values.shape[1]]
