"""Weights as a checkpoint holds them: cut, joined and packed, each the same as on the dense matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.data.integers import Integers, quantise
from pagewire.kernels.data.joining import column_slice
from pagewire.kernels.linear import Weight, dense_weight, pack
from pagewire.kernels.ops import linear
from pagewire.kernels.reference.kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def weights(draw: st.DrawFn, num_in: int | None = None) -> Weight:
    """Of one or several blocks, stored in one dtype and computed in another; N and K are multiples of 6."""
    num_in = draw(st.integers(1, 4)) * 6 if num_in is None else num_in
    sizes = draw(st.lists(st.integers(1, 4).map(lambda n: n * 6), min_size=1, max_size=3))
    stored, dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    blocks = [torch.randn(size, num_in, generator=generator).to(stored) for size in sizes]
    return Weight.joined([dense_weight(block, dtype) for block in blocks])


@given(weight=weights(), of=st.sampled_from([1, 2, 3, 6]))
def test_shares_are_those_of_the_dense_matrix(weight: Weight, of: int) -> None:
    dense = weight.dense()
    assert dense.shape == weight.shape and dense.dtype == weight.dtype
    for part in range(of):
        rows, columns = weight.rows(part, of), weight.columns(part, of)
        assert rows.shape == rows.dense().shape and columns.shape == columns.dense().shape
        assert torch.equal(rows.dense(), dense.chunk(of, 0)[part])
        assert torch.equal(columns.dense(), dense.chunk(of, 1)[part])
        assert torch.equal(rows.columns(part, of).dense(), columns.rows(part, of).dense())
    assert torch.equal(Weight.joined([weight.rows(part, of) for part in range(of)]).dense(), dense)


@given(data=st.data())
def test_joined_is_one_below_the_other(data: st.DataObject) -> None:
    first, second = data.draw(weights(12)), data.draw(weights(12))
    if first.dtype != second.dtype:
        with pytest.raises(ValueError, match="different forms cannot be joined"):
            Weight.joined([first, second])
        return
    whole = Weight.joined([first, second, first])
    assert torch.equal(whole.dense(), torch.cat([first.dense(), second.dense(), first.dense()]))
    assert whole.shape == (2 * first.shape[0] + second.shape[0], 12)


def test_nothing_is_copied_until_it_is_dense() -> None:
    matrix = torch.randn(12, 8)
    weight = Weight.joined([dense_weight(matrix), dense_weight(matrix)])
    addresses = {part.untyped_storage().data_ptr() for part in weight.rows(1, 2).columns(1, 2).parts}
    assert addresses == {matrix.untyped_storage().data_ptr()}
    assert dense_weight(matrix).dense() is matrix


def test_shares_that_are_not_whole_are_refused() -> None:
    weight = dense_weight(torch.zeros(6, 4))
    for part, of in ((0, 4), (2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"6 rows have no share {part} of {of}"):
            weight.rows(part, of)
    with pytest.raises(ValueError, match="4 columns have no share 0 of 3"):
        weight.columns(0, 3)
    with pytest.raises(ValueError, match="different forms"):
        Weight.joined([weight, dense_weight(torch.zeros(6, 5))])
    with pytest.raises(ValueError, match="a matrix"):
        dense_weight(torch.zeros(6))


@pytest.mark.usefixtures("served_kernels")
@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(weight=weights(), of=st.sampled_from([1, 2, 3]), bias=st.booleans())
def test_a_packed_weight_multiplies_as_the_dense_matrix(weight: Weight, of: int, bias: bool) -> None:
    x = torch.randn(5, weight.shape[1]).to(weight.dtype)
    b = torch.randn(weight.shape[0]) if bias else None
    product = pack(weight, b)
    assert (product.out_features, product.in_features) == weight.shape and product.dtype == weight.dtype
    expected = linear(x, weight.dense(), None if b is None else b.to(weight.dtype))
    assert torch.equal(product(x), expected)
    shares = [pack(weight.rows(part, of), None if b is None else b.chunk(of)[part])(x) for part in range(of)]
    assert torch.equal(torch.cat(shares, 1), expected)


@pytest.mark.usefixtures("served_kernels")
@pytest.mark.parametrize("sizes", [(1000, 100, 1500), (1024, 64), (3, 2049)], ids=str)
def test_blocks_of_any_size_are_packed_together(sizes: tuple[int, ...]) -> None:
    """More rows than are packed at a time, with blocks that end within a panel."""
    generator = torch.Generator().manual_seed(0)
    blocks = [dense_weight(torch.randn(size, 40, generator=generator)) for size in sizes]
    x = torch.randn(3, 40, generator=generator)
    weight = Weight.joined(blocks)
    assert torch.equal(pack(weight)(x), linear(x, weight.dense()))


def test_a_linear_knows_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = dense_weight(torch.zeros(10, 6), torch.bfloat16), torch.zeros(10)
    assert pack(weight, bias).num_bytes == 2 * (60 + 10)
    monkeypatch.setattr(cpu_kernels, "load", lambda: None)
    assert pack(weight, bias).num_bytes == 2 * (60 + 10)


def test_rows_that_do_not_fit_are_refused(best_kernels: CpuKernels) -> None:
    weight = dense_weight(torch.zeros(10, 6))
    for product in (best_kernels.pack(weight), reference.pack(weight)):
        for x in (torch.zeros(2, 5), torch.zeros(2, 6).double()):
            with pytest.raises(ValueError, match=r"rows of 6 torch.float32 expected, not"):
                product(x)


def test_a_bias_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a bias of shape"):
        pack(dense_weight(torch.zeros(10, 6)), torch.zeros(6))


@pytest.mark.parametrize(("bits", "zero"), [(8, 128), (4, 0)])
def test_columns_within_a_group_keep_their_numbers(bits: int, zero: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantise(dense_weight(torch.randn(8, 256, generator=generator)), Integers(bits, 128, zero))
    part = column_slice(weight, 64, 224)
    assert isinstance(part.scheme, Integers) and part.scheme.group == 32
    assert torch.equal(part.dense(), weight.dense()[:, 64:224])
    whole = column_slice(weight, 128, 256)
    assert isinstance(whole.scheme, Integers) and whole.scheme.group == 128
    with pytest.raises(ValueError, match="no kernel multiplies"):
        column_slice(weight, 0, 8)
