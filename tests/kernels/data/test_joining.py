"""Matrices in different schemes, joined: the numbers stay the same."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from pagewire.kernels.data.floats import float8_weight
from pagewire.kernels.data.integers import Integers, integer_weight, quantise
from pagewire.kernels.data.joining import joined, with_rounded_rows
from pagewire.kernels.data.weight import DENSE, Weight, dense_weight

NUM_IN = 128
SCHEMES = {
    "int8 by row": Integers(8, None, 128),
    "int8": Integers(8, 32, 128),
    "int8 in small groups": Integers(8, 16, 128),
    "int8 from 0": Integers(8, 64, 0),
    "int6": Integers(6, 16, 32),
    "int6 from 0": Integers(6, 32, 0),
    "int4": Integers(4, 128, 8),
    "int4 from 0": Integers(4, 32, 0),
    "int4 by row": Integers(4, None, 8),
    "table": Integers(4, 32, 128, tuple(range(4, 256, 16))),
}


def weight_of(scheme: Integers, scale_dtype: torch.dtype = torch.float16) -> Weight:
    """A random weight; its numbers are exact in float32."""
    generator = torch.Generator().manual_seed(scheme.bits)
    if scheme.table is None:
        matrix = torch.randn(6, NUM_IN, generator=generator)
        return quantise(dense_weight(matrix), scheme, scale_dtype)
    codes = torch.randint(0, 256, (6, NUM_IN // 2), generator=generator).to(torch.uint8)
    scales = torch.rand(6, NUM_IN // 32, generator=generator).to(scale_dtype)
    return integer_weight(scheme, codes, scales, None, torch.float32)


@pytest.mark.parametrize("names", list(combinations(SCHEMES, 2)), ids=" and ".join)
def test_integers_are_joined_exactly(names: tuple[str, str]) -> None:
    parts = [weight_of(SCHEMES[name]) for name in names]
    whole = joined([*parts, parts[0]])
    groups = [SCHEMES[name].group for name in names]
    assert isinstance(whole.scheme, Integers)
    narrow = all(name.startswith(("int4", "int6")) for name in names)
    assert (whole.scheme.bits, whole.scheme.zero) == ((6, 32) if narrow else (8, 128))
    assert whole.scheme.group == min((group for group in groups if group is not None), default=None)
    exact = torch.cat([part.dense() for part in (*parts, parts[0])])
    assert torch.allclose(whole.dense(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_equal_schemes_stay_and_scales_take_a_common_dtype(name: str) -> None:
    parts = [weight_of(SCHEMES[name], dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    for several in (parts[:1] * 2, parts):
        whole = joined(several)
        assert whole.scheme == SCHEMES[name]
        assert torch.equal(whole.dense(), torch.cat([part.dense() for part in several]))
    assert joined(parts[:1] * 2).parts[1].dtype == torch.float16


@pytest.mark.parametrize("rounds", [(True, True), (True, False), (False, False)], ids=str)
def test_rows_are_rounded_only_if_they_are_for_all(rounds: tuple[bool, bool]) -> None:
    """And in no case are the weights held in another way for it."""
    floats = torch.randn(4, NUM_IN).to(torch.float8_e4m3fn)
    for weight in (
        weight_of(SCHEMES["int8 by row"]),
        float8_weight(floats, torch.ones(4, 1), None, torch.float32),
    ):
        whole = joined([with_rounded_rows(weight, each) for each in rounds])
        assert whole.scheme == with_rounded_rows(weight, all(rounds)).scheme
        assert torch.equal(whole.dense(), weight.dense().repeat(2, 1))


def test_beside_plain_numbers_all_are_plain() -> None:
    parts = [dense_weight(torch.randn(3, NUM_IN)), weight_of(SCHEMES["int4"])]
    whole = joined(parts)
    assert whole.scheme is DENSE
    assert torch.equal(whole.dense(), torch.cat([part.dense() for part in parts]))
    with pytest.raises(ValueError, match="cannot be joined"):
        joined([parts[0], dense_weight(torch.randn(3, 64))])
