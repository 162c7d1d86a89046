"""HQQ: matrices that were packed by its layout are read as they were; settings that do not fit are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.workers.checkpoint.formats.hqq import HqqFormat
from pagewire.workers.errors import LoadError
from tests.workers.checkpoint.formats import rounding
from tests.workers.checkpoint.formats.reading import NAME, assert_exact, matrix, read, scheme
from tests.workers.checkpoint.formats.rounding import Rounded, rounded


def number(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


@pytest.mark.parametrize("group", [64, -1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_groups_along_rows_are_exact(bits: int, group: int) -> None:
    original = rounded(matrix(61 if bits == 3 else 64), bits, group, symmetric=False)
    tensors = rounding.hqq(original)
    if group == -1:
        del tensors["group_size"]
    weight = read(HqqFormat(), tensors)
    assert_exact(weight, original)
    assert scheme(weight).bits == (8 if bits == 8 else 4)


def test_zeros_are_any_floats() -> None:
    original = rounded(matrix(), 4, 64, symmetric=False, dtype=torch.float32)
    shifted = replace(original, zeros=original.zeros + 0.375)
    weight = read(HqqFormat(), rounding.hqq(shifted))
    torch.testing.assert_close(weight.dense().double(), shifted.dense(), rtol=1e-5, atol=1e-6)


def test_words_that_are_saved_as_floats_are_the_same() -> None:
    original = rounded(matrix(), 4, 64, symmetric=False)
    tensors = rounding.hqq(original)
    assert_exact(read(HqqFormat(), tensors | {"W_q": tensors["W_q"].view(torch.float16)}), original)


def test_groups_across_rows_are_held_in_8_bits() -> None:
    """HQQ makes the matrix one with a row for each place in a group: columns of that have a scale each."""
    weight = matrix()
    across = rounded(weight.reshape(32, -1).T, 4, -1, symmetric=False)
    tensors = rounding.hqq(Rounded(4, across.codes.T.contiguous(), across.scales, across.zeros, across.index))
    tensors |= {"shape": torch.tensor(weight.shape), "axis": number(0), "group_size": number(32)}
    tensors["W_q"] = tensors["W_q"].reshape(16, -1)
    tensors |= {name: tensors[name].reshape(1, -1) for name in ("scale", "zero")}
    dense = across.dense().T.reshape(weight.shape)
    found = read(HqqFormat(), tensors)
    assert (found.dense() - dense).norm() / dense.norm() < 0.01
    assert (found.dense() - weight).norm() / weight.norm() < 0.2


def test_what_does_not_fit_is_refused() -> None:
    tensors = rounding.hqq(rounded(matrix(), 4, 64, symmetric=False))
    damages: list[tuple[dict[str, Any], str]] = [
        ({"nbits": number(5)}, "with 5 bits and axis 1"),
        ({"axis": number(2)}, "axis 2"),
        ({"shape": torch.tensor([64, 256, 1])}, "of shape"),
        ({"shape": torch.tensor([64, 128])}, "does not hold"),
        ({"shape": torch.ones(9)}, "must be a few integers"),
        ({"group_size": number(96)}, "groups of 96"),
        ({"group_size": number(0)}, "groups of 0"),
        ({"W_q": tensors["W_q"][1:]}, "does not hold"),
        ({"scale": tensors["scale"][1:]}, "scale must be 256 floats"),
        ({"zero": tensors["zero"].int()}, "zero must be 256 floats"),
    ]
    for damage, words in damages:
        with pytest.raises(LoadError, match=words):
            HqqFormat().weight(NAME, tensors | damage, torch.float32)
    with pytest.raises(LoadError, match="quantised scales or zeros"):
        HqqFormat().check([f"{NAME}.zero_scale"])
    with pytest.raises(LoadError, match="q_proj has W_q, but no axis"):
        HqqFormat().check([f"{NAME}.W_q"])
