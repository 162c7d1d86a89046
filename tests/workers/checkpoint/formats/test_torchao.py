"""torchao: the parts of its tensors make the matrix that was rounded; what is not served is refused by name."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.data.integers import Integers
from pagewire.workers.checkpoint.formats import torchao
from pagewire.workers.checkpoint.formats.torchao import SCALE, VALUES, ZERO, Torchao
from pagewire.workers.errors import LoadError
from tests.workers.checkpoint.formats import rounding
from tests.workers.checkpoint.formats.reading import NAME, assert_exact, matrix, read, scheme
from tests.workers.checkpoint.formats.rounding import rounded


@pytest.mark.parametrize("group", [32, 256])
def test_integers_of_4_bits(group: int) -> None:
    original = rounded(matrix(columns=512), 4, group, symmetric=False)
    weight = read(Torchao(), rounding.torchao_int4(original))
    assert_exact(weight, original)
    assert (scheme(weight).bits, scheme(weight).group) == (4, min(group, 128))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [-1, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_of_8_bits(symmetric: bool, group: int, bits: int) -> None:
    original = rounded(matrix(), bits, group, symmetric)
    tensors = rounding.torchao_int8(original)
    assert_exact(read(Torchao(), tensors), original)
    if symmetric:
        del tensors[ZERO]
        assert_exact(read(Torchao(), tensors), original)


def test_activations_of_8_bits() -> None:
    """By the class of the configuration, where there is one for all modules."""
    tensors = rounding.torchao_int8(rounded(matrix(), 8, -1))
    kinds = {"default": {"_type": "Int8DynamicActivationInt8WeightConfig", "_data": {}}}
    for others, rounds_rows in (({}, True), ({"lm_head": None}, False)):
        form = torchao.of({"quant_method": "torchao", "quant_type": kinds | others})
        scheme = read(form, tensors).scheme
        assert isinstance(scheme, Integers) and scheme.rounds_rows == rounds_rows


def test_a_scale_of_the_whole_matrix() -> None:
    codes = torch.arange(-128, 128).to(torch.int8).repeat(64, 1)
    weight = read(Torchao(), {VALUES: codes, SCALE: torch.full((1, 1), 0.25)})
    assert torch.equal(weight.dense(), codes * 0.25)


def test_floats_of_8_bits() -> None:
    values, scales = matrix().to(torch.float8_e4m3fn), torch.rand(64, 1) + 0.5
    dense = values.float() * scales
    weight = read(Torchao(), {VALUES: values, SCALE: scales})
    assert (weight.dense() - dense).norm() / dense.norm() < 0.01


def test_what_is_not_served_is_refused() -> None:
    for part, words in (
        ("scale_and_zero", "q_proj: int4 in the order of a GPU's tiles is not served, but .*'plain' is"),
        ("per_tensor_scale", "NVFP4 of torchao"),
        ("act_pre_scale", "multiplies activations"),
    ):
        with pytest.raises(LoadError, match=words):
            Torchao().check([f"{NAME}._weight_qdata", f"{NAME}._weight_{part}"])
    tensors = rounding.torchao_int4(rounded(matrix(), 4, 64, symmetric=False))
    for damage in (
        {VALUES: tensors[VALUES].view(torch.int32)},
        {SCALE: tensors[SCALE].to(torch.float8_e8m0fnu)},
        {SCALE: tensors[SCALE][:3], ZERO: tensors[ZERO][:3]},
        {ZERO: tensors[ZERO][:1]},
        {SCALE: tensors[SCALE][:0], ZERO: tensors[ZERO][:0]},
        {ZERO: tensors[ZERO].to(torch.int8)},
    ):
        with pytest.raises(LoadError, match=NAME):
            Torchao().weight(NAME, tensors | damage, torch.float32)
