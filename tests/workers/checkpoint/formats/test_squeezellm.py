"""SqueezeLLM: tables of rows, packed bit by bit, and its sparse matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewire.kernels.data import integers
from pagewire.kernels.data.weight import Weight
from pagewire.workers.checkpoint.formats import squeezellm
from tests.workers.checkpoint.formats.reading import is_told, shape_of

FORM = squeezellm.of({"quant_method": "squeezellm", "wbits": 4})
ROWS, COLUMNS = 12, 96


def saved(bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a matrix, and what they stand for. Bit i of a column's stream is bit i % 32 of word i / 32."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(2**bits, (ROWS, COLUMNS), generator=generator)
    tables = torch.randn(ROWS, 2**bits, generator=generator)
    words = [[0] * ROWS for _ in range(COLUMNS * bits // 32)]
    for n, row in enumerate(codes.tolist()):
        for k, code in enumerate(row):
            for bit in range(bits):
                place = k * bits + bit
                words[place // 32][n] |= (code >> bit & 1) << place % 32
    signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in words]
    tensors = {"qweight": torch.tensor(signed, dtype=torch.int32), "lookup_table": tables.half()}
    return tensors, tensors["lookup_table"].float().gather(1, codes)


def with_outliers(tensors: dict[str, Tensor], dense: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same with a sparse matrix, and with two whole rows."""
    generator = torch.Generator().manual_seed(0)
    sparse = torch.randn(dense.shape, generator=generator) * (
        torch.rand(dense.shape, generator=generator) < 0.05
    )
    sparse[3] = 0
    rows, cols = sparse.nonzero(as_tuple=True)
    ends = torch.bincount(rows, minlength=ROWS).cumsum(0)
    full = torch.randn(COLUMNS, 2, generator=generator)
    more = {
        "rows": torch.cat((torch.zeros(1), ends)).int(),
        "cols": cols.int(),
        "vals": sparse[rows, cols],
        "full_rows": full,
        "full_row_indices": torch.tensor([7, 2], dtype=torch.int32),
        "startrows": torch.zeros(128, dtype=torch.int32),
    }
    expected = dense + sparse
    expected[7] += full[:, 0]
    expected[2] += full[:, 1]
    return tensors | more, expected


def error(weight: Weight, dense: Tensor) -> float:
    return float((weight.scheme.dense(weight.parts, torch.float32) - dense).norm() / dense.norm())


@pytest.mark.parametrize("bits", [3, 4])
def test_tables_of_rows(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, dense = saved(bits)
    assert shape_of(FORM, "a", tensors) == (ROWS, COLUMNS)
    weight = FORM.weight("a", tensors, torch.bfloat16)
    assert 0 < error(weight, dense) < 0.007 and is_told(FORM, tensors, weight)
    tensors, dense = with_outliers(tensors, dense)
    assert tensors.keys() == FORM.suffixes
    assert 0 < error(FORM.weight("a", tensors, torch.bfloat16), dense) < 0.007
    monkeypatch.setattr(integers, "BLOCK", COLUMNS * 5)
    assert 0 < error(FORM.weight("a", tensors, torch.bfloat16), dense) < 0.007


def test_tables_that_do_not_fit_are_refused() -> None:
    tensors, _ = saved(4)
    for wrong in (tensors["lookup_table"][:-1], tensors["lookup_table"][:, :4]):
        with pytest.raises(ValueError, match="do not fit"):
            shape_of(FORM, "a", tensors | {"lookup_table": wrong})
