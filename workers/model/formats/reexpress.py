"""Numbers that no product multiplies with, held as integers in small groups, and what that costs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pagewire.kernels.integers import Integers, quantise, relative_error
from pagewire.kernels.weight import Weight, dense_weight

logger = logging.getLogger("pagewire.worker")

BLOCK = 1 << 18
"""About how many numbers are converted at a time: they stay in a core's cache."""
SCALES = torch.bfloat16
"""The dtype of scales: float16 would lose those of small weights."""

_logged: set[str] = set()


def wider(num_in: int) -> Integers:
    """The scheme that holds any numbers in 8 bits, for rows of `num_in` columns: groups of 32, of 16, or none."""
    return Integers(8, next((group for group in (32, 16) if num_in % group == 0), None), 128)


def row_blocks(num_rows: int, num_in: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """First and last + 1 of blocks of rows, each of a multiple of `multiple` rows but for the last one."""
    step = max(1, BLOCK // max(1, num_in * multiple)) * multiple
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def reexpressed(
    kind: str, blocks: Iterable[Tensor], dtype: torch.dtype, scheme: Integers | None = None
) -> Weight:
    """A matrix [N, K] as integers; the first of its kind is logged with its error.

    kind: what the numbers were, for the log. blocks: floats [n, K], one below the other; each is dropped once it is
    converted. dtype: of the product's inputs and outputs. scheme: one without a table; default: `wider`.

    Raises:
        ValueError: a number is not finite.
    """
    made: list[Weight] = []
    for block in blocks:
        if not torch.stack(block.aminmax()).isfinite().all():
            raise ValueError("it holds numbers that are not finite")
        original = dense_weight(block, dtype)
        made.append(quantise(original, scheme or wider(block.shape[1]), SCALES))
        if kind not in _logged:
            _log_error(kind, made[0], original)
    return Weight.joined(made)


def _log_error(kind: str, weight: Weight, original: Weight) -> None:
    scheme, error = weight.scheme, relative_error(weight, original)
    assert isinstance(scheme, Integers)
    form = f"integers of {scheme.bits} bits in " + (f"groups of {scheme.group}" if scheme.group else "rows")
    log_once(kind, f"{kind} are held as {form}, which changes weights by {error:.2%} of their norm")


def log_once(key: str, text: str) -> None:
    """Log what concerns every matrix of a checkpoint once for a process. key: texts of one key are one."""
    if key not in _logged:
        _logged.add(key)
        logger.info("%s", text)
