"""The bits of a row do not depend on how many others there are."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.linear import dense_weight, pack

SIZES = [(33, 7), (257, 100), (512, 2816), (64, 8192), (32, 14336), (1000, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_do_not_depend_on_the_number_of_rows(size: tuple[int, int], dtype: torch.dtype) -> None:
    num_out, num_in = size
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    x = torch.randn(64, num_in, generator=generator).to(dtype)
    for bias in (None, torch.randn(num_out, generator=generator).to(dtype)):
        linear = pack(dense_weight(weight), bias)
        whole = linear(x)
        for n in (*range(1, 18), 31, 32, 33, 48, 63):
            assert torch.equal(linear(x[:n]), whole[:n]), n
            assert torch.equal(linear(x[-n:]), whole[-n:]), n
        wanted = torch.nn.functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        scale = wanted.abs().max()
        assert (whole.double() - wanted).abs().max() < scale * (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_functions_do_not_depend_on_the_number_of_rows(
    dtype: torch.dtype, num_threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for width in (4, 100, 2815):
            x = torch.randn(64, width, generator=generator).to(dtype)
            for function in (torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.gelu, torch.tanh):
                whole = elementwise(function, x)
                assert torch.allclose(whole.float(), function(x.float()), rtol=1e-2, atol=1e-2)
                for n in (1, 2, 3, 7, 13, 24, 36, 63):
                    assert torch.equal(elementwise(function, x[:n]), whole[:n])
                    assert torch.equal(elementwise(function, x[-n:]), whole[-n:])
    finally:
        torch.set_num_threads(before)


def test_a_gpu_gets_elements_as_they_are() -> None:
    """Its threads run the same code for every element, so nothing is padded."""
    x, given = torch.empty(3, 5, device="meta"), []
    elementwise(lambda y: given.append(y) or y, x)
    assert given[0] is x
