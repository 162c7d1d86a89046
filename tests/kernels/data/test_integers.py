"""Quantised weights: how they are cut and joined, and what quantising costs."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.data.integers import INT8, Integers, integer_weight, quantise, relative_error
from pagewire.kernels.data.weight import Weight, dense_weight

INT4 = Integers(4, 32, 8)
INT4_MINIMUM = Integers(4, 32, 0)
SCHEMES = (
    INT8,
    Integers(8, 32, 128),
    Integers(8, 16, 0),
    Integers(6, 16, 32),
    INT4,
    INT4_MINIMUM,
    Integers(4, 128, 8),
)
NF4_LIKE = Integers(4, 64, 128, tuple(range(8, 248, 15)))


def random_weight(rows: int = 24, columns: int = 256, seed: int = 0) -> Weight:
    return dense_weight(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_weight_is_quantised_to_its_nearest(scheme: Integers) -> None:
    weight = random_weight()
    error = relative_error(quantise(weight, scheme), weight)
    assert 0 < error < (0.01 if scheme.bits == 8 else 0.16)


def test_what_the_scheme_can_hold_is_held_exactly() -> None:
    values = torch.arange(-127, 128.0).repeat(2, 1)[:, :224] / 4
    values[:, 0] = 127 / 4
    weight = dense_weight(values)
    assert relative_error(quantise(weight, INT8), weight) == 0.0


def test_rows_of_zeros_stay_zeros() -> None:
    for scheme in SCHEMES:
        assert quantise(dense_weight(torch.zeros(2, 128)), scheme).dense().eq(0).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_cut_joined_and_taken_it_is_the_same(scheme: Integers) -> None:
    weight = quantise(random_weight(), scheme)
    dense = weight.dense()
    assert torch.equal(weight.rows(1, 3).dense(), dense[8:16])
    assert torch.equal(weight.columns(1, 2).dense(), dense[:, 128:])
    assert torch.equal(Weight.joined([weight.slice(0, 5), weight.slice(5, 24)]).dense(), dense)
    index = torch.tensor([3, 3, 20])
    assert torch.equal(weight.take(index).dense(), dense[index])


def test_a_group_is_not_cut() -> None:
    weight = quantise(random_weight(columns=96), INT4)
    with pytest.raises(ValueError, match="cut a group of 32"):
        weight.columns(0, 2)


def test_codes_of_a_table_stand_for_its_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)[:, :64]
    scales = torch.full((2, 2), 0.5)
    weight = integer_weight(NF4_LIKE, codes, scales, None, torch.float32)
    assert weight.dense()[0, :4].tolist() == [-60.0, -60.0, -52.5, -60.0]


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    for wrong in (
        (Integers(8, 32, 128), codes, torch.ones(4, 3), None),
        (Integers(8, 32, 128), codes.int(), scales, None),
        (Integers(8, 32, 128), codes, scales, torch.ones(4, 2).half()),
        (Integers(8, 48, 128), codes, scales, None),
        (Integers(5, 32, 128), codes, scales, None),
        (Integers(8, None, 128), torch.zeros(1, 65_537, dtype=torch.uint8), torch.ones(1, 1), None),
        (Integers(8, 32, 128, tuple(range(16))), codes, scales, None),
    ):
        with pytest.raises(ValueError, match=r"no weight of scheme|no kernel"):
            integer_weight(*wrong, torch.float32)
