"""Numbers that no product multiplies with, held as integers in small groups, and what that costs."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from pagewire.kernels.integers import Integers, relative_error, row_blocks
from pagewire.kernels.quantising import quantise
from pagewire.kernels.weight import Weight, dense_weight

logger = logging.getLogger("pagewire.worker")

SCALES = torch.bfloat16
"""The dtype of scales: float16 would lose those of small weights."""

_logged: set[str] = set()


def wider(num_in: int) -> Integers:
    """The scheme that holds any numbers in 8 bits, for rows of `num_in` columns: groups of 32, of 16, or none."""
    return Integers(8, next((group for group in (32, 16) if num_in % group == 0), None), 128)


def reexpressed(kind: str, blocks: Iterable[Tensor], dtype: torch.dtype) -> Weight:
    """A matrix [N, K] as integers of the scheme `wider`; the first of its kind is logged with its error.

    kind: what the numbers were, for the log. blocks: floats [n, K], one below the other; each is dropped once it is
    converted. dtype: of the product's inputs and outputs.

    Raises:
        ValueError: a number is not finite.
    """
    made: list[Weight] = []
    for block in blocks:
        made.append(as_integers(kind, dense_weight(block, dtype), wider(block.shape[1])))
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
