"""Matrices that are stored in different ways, as one: they are brought to a scheme that holds all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from pagewire.kernels.data import floats
from pagewire.kernels.data.floats import Floats
from pagewire.kernels.data.integers import Integers, integer_weight
from pagewire.kernels.data.weight import Weight, dense_weight


def joined(weights: Sequence[Weight]) -> Weight:
    """Matrices of equal K as one, one below the other, in the first form that holds all of them.

    That is their own scheme where it is the same, but that rows are rounded only if they are for all of them; 8
    bits in the smallest of their groups where all are integers, or 6 bits where none has more, which hold each of
    them exactly; plain numbers in `dtype` if any of them is dense.

    Raises:
        ValueError: they differ in K or dtype.
    """
    if not all(_rounds_rows(weight) for weight in weights):
        weights = [with_rounded_rows(weight, False) for weight in weights]
    names = {weight.scheme.name for weight in weights}
    schemes = [weight.scheme for weight in weights if isinstance(weight.scheme, Integers)]
    if len(schemes) < len(weights):
        if len(names) > 1:
            weights = [dense_weight(weight.dense()) for weight in weights]
        return Weight.joined(weights)
    if len(names) > 1:
        groups = [scheme.group for scheme in schemes if scheme.group is not None]
        bits = 6 if all(scheme.bits <= 6 and scheme.table is None for scheme in schemes) else 8
        weights = [in_more_bits(weight, bits, min(groups, default=None)) for weight in weights]
    if len({weight.parts[1].dtype for weight in weights}) > 1:
        weights = [_with_float32_scales(weight) for weight in weights]
    return Weight.joined(weights)


def _rounds_rows(weight: Weight) -> bool:
    return isinstance(weight.scheme, Integers | Floats) and weight.scheme.rounds_rows


def with_rounded_rows(weight: Weight, rounds_rows: bool = True) -> Weight:
    """The same weight, with `rounds_rows` of its scheme; one of another scheme stays as it is."""
    scheme = weight.scheme
    if not isinstance(scheme, Integers | Floats):
        return weight
    return replace(weight, scheme=replace(scheme, rounds_rows=rounds_rows))


def in_more_bits(weight: Weight, bits: int, group: int | None) -> Weight:
    """A weight of integers in 8 bits around 128, or in 6 bits around 32, with the same numbers.

    bits: enough for its values. group: columns of a scale, a divisor of those that the weight has now.

    Raises:
        ValueError: it is dense, or K is no multiple of the group.
    """
    scheme = weight.scheme
    if not isinstance(scheme, Integers):
        raise ValueError(f"a weight of scheme {scheme.name} holds no integers")
    num_in, zero = weight.shape[1], 2 ** (bits - 1)
    _, scales, *offsets = weight.parts
    repeats = (scheme.group or num_in) // (group or num_in)
    scales, *offsets = (part.repeat_interleave(repeats, dim=1) for part in (scales, *offsets))
    values = scheme.values(weight.parts).short() + (zero - scheme.zero)
    if values.amin() < 0 or values.amax() >= 2**bits:  # around another zero: what is missing is an offset
        values -= zero - scheme.zero
        scales = scales.float()
        offsets = [sum((part.float() for part in offsets), scales * (zero - scheme.zero))]
    return integer_weight(
        Integers(bits, group, zero),
        values.to(torch.uint8),
        scales,
        offsets[0] if offsets else None,
        weight.dtype,
    )


def column_slice(weight: Weight, start: int, stop: int) -> Weight:
    """The columns from `start` to before `stop`. Where they cut a group, it becomes smaller ones of equal scales.

    Raises:
        ValueError: the groups would have fewer than 16 columns, or a byte of two codes would be cut.
    """
    scheme = weight.scheme
    group = scheme.group if isinstance(scheme, Integers | Floats) else None
    if group is not None and (start % group or stop % group):
        smaller = in_smaller_groups if isinstance(scheme, Integers) else floats.in_smaller_groups
        weight = smaller(weight, math.gcd(group, start, stop))
    return weight.column_slice(start, stop)


def in_smaller_groups(weight: Weight, group: int) -> Weight:
    """A weight of integers with the same numbers, in groups of a divisor of the columns that share a scale now.

    Raises:
        ValueError: no kernel has groups of so few columns.
    """
    scheme = weight.scheme
    assert isinstance(scheme, Integers) and scheme.group is not None
    codes, *rest = weight.parts
    repeats = scheme.group // group
    scales, *offsets = (part.repeat_interleave(repeats, dim=1) for part in rest)
    smaller = replace(scheme, group=group)
    return integer_weight(smaller, codes, scales, offsets[0] if offsets else None, weight.dtype)


def _with_float32_scales(weight: Weight) -> Weight:
    codes, *rest = weight.parts
    return Weight(weight.scheme, (codes, *(part.float() for part in rest)), weight.shape, weight.dtype)
