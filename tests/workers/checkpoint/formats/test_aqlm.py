"""AQLM, decoded group by group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewire.kernels.data import integers
from pagewire.kernels.data.weight import Weight
from pagewire.workers.checkpoint.formats import aqlm
from tests.workers.checkpoint.formats.reading import is_told, shape_of

FORM = aqlm.of({"quant_method": "aqlm", "in_group_size": 8})


def saved(bits: int, books: int, outs: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a matrix [24 * outs, 64], and what they stand for."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(2**bits, (24, 8, books), generator=generator)
    codebooks = torch.randn(books, 2**bits, outs, 8, generator=generator).half()
    scales = torch.rand(24, 1, 1, 1, generator=generator).half() + 0.1
    dense = torch.zeros(24 * outs, 64)
    for i, row in enumerate(codes.tolist()):
        for j, group in enumerate(row):
            vectors = sum(codebooks[book, code].float() for book, code in enumerate(group))
            dense[i * outs : (i + 1) * outs, j * 8 : j * 8 + 8] = vectors * scales[i].float().view(1, 1)
    signed = torch.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes).to(dtype)
    return {"codes": signed, "codebooks": codebooks, "scales": scales}, dense


def error(weight: Weight, dense: Tensor) -> float:
    return float((weight.scheme.dense(weight.parts, torch.float32) - dense).norm() / dense.norm())


@pytest.mark.parametrize(
    ("bits", "books", "outs", "dtype"),
    [(16, 1, 1, torch.int16), (8, 2, 1, torch.int8), (8, 2, 2, torch.int8)],
)
def test_sums_of_codebooks(
    bits: int, books: int, outs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, dense = saved(bits, books, outs, dtype)
    assert tensors.keys() == FORM.suffixes and shape_of(FORM, "a", tensors) == dense.shape
    weight = FORM.weight("a", tensors, torch.bfloat16)
    assert 0 < error(weight, dense) < 0.007 and is_told(FORM, tensors, weight)
    monkeypatch.setattr(integers, "BLOCK", 64 * 10)
    assert 0 < error(FORM.weight("a", tensors, torch.bfloat16), dense) < 0.007


def test_a_missing_codebook_is_noticed() -> None:
    tensors, _ = saved(8, 2, 1, torch.int8)
    with pytest.raises(ValueError, match="2 codebooks, of which it holds 1"):
        FORM.weight("a", tensors | {"codebooks": tensors["codebooks"][:1]}, torch.float32)
