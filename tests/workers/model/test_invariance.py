"""A token's log probabilities do not depend, by one bit, on what ran beside it or how its prompt was chunked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagewire.ipc.params import SamplingParams
from pagewire.kernels.elementwise import elementwise
from pagewire.kernels.linear import dense_weight, pack

from ..architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from ..driver import Driver, load_runner
from ..parity import make_prompts

SERVED = [a for a in ARCHITECTURES if a.refused is None]
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", SERVED, ids=lambda a: a.name)
def test_neighbours_change_nothing(architecture: Architecture, dtype: str, tmp_path: Path) -> None:
    folder = architecture.write(tmp_path, dtype=dtype)
    runner, ready = load_runner(folder)
    assert ready.dtype == dtype
    params = SamplingParams(temperature=1.0, logprobs=3)
    prompts = make_prompts(VOCAB_SIZE)
    together = Driver(runner, budget=16).run(prompts, 6, params)
    for i, prompt in enumerate(prompts):
        [alone] = Driver(runner, budget=64).run([prompt], 6, params, seeds=[i])
        assert alone.output == together[i].output
        assert alone.logprobs == together[i].logprobs
