"""The layout of a page is an exchange of chunks, and reading it has no bank conflicts."""

import pytest
import torch

from pagewire.kernels.cuda.layout import CHUNK_BYTES, exchange_chunks, swizzle

CHUNKS = sorted({size * width // CHUNK_BYTES for size in range(32, 257, 16) for width in (1, 2)})


@pytest.mark.parametrize("chunks", CHUNKS)
def test_eight_rows_are_in_eight_sets_of_banks(chunks: int) -> None:
    """An ldmatrix reads the same chunk of 8 rows, the first of which is a multiple of 8."""
    rows, chunk = torch.arange(64)[:, None], torch.arange(chunks)
    places = swizzle(chunks, rows, chunk)
    assert (places.sort(dim=1).values == chunk).all()
    banks = (rows * chunks + places) % 8
    assert (banks.view(8, 8, chunks).sort(dim=1).values == torch.arange(8)[:, None]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_exchange_is_its_own_inverse(dtype: torch.dtype) -> None:
    cache = torch.randn(3, 2, 32, 80).to(dtype)
    exchanged = exchange_chunks(cache)
    assert not torch.equal(exchanged.float(), cache.float()) or dtype.itemsize == 1
    assert torch.equal(exchange_chunks(exchanged).float(), cache.float())


def test_rows_must_be_whole_chunks() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        exchange_chunks(torch.zeros(1, 1, 16, 12, dtype=torch.bfloat16))
