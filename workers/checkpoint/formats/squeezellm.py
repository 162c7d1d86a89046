"""SqueezeLLM: each row has a table of 8 or 16 values, and there may be a sparse matrix of outliers to add.

Tables differ from row to row, so the weights are held in 8 bits (`reexpress.py`). Kim et al. 2023, "SqueezeLLM:
Dense-and-Sparse Quantization".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.workers.checkpoint.formats.format import (
    Dtype,
    Held,
    Parts,
    Tensor,
    Tensors,
    Weight,
    described,
    wider,
)

WORD = 32


@dataclass(frozen=True)
class SqueezeLlm:
    """Matrices of 3 or 4 bits as `qweight` and `lookup_table`.

    Outliers are `vals` at `cols`, from `rows[n]` to `rows[n + 1]` in row n, and `full_rows` [K, n], whole rows at
    `full_row_indices`. `startrows` shares work among a GPU's threads.
    """

    name: str = "squeezellm"
    suffixes: frozenset[str] = frozenset(
        {"qweight", "lookup_table", "rows", "cols", "vals", "full_rows", "full_row_indices", "startrows"}
    )

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`: every form of SqueezeLLM is served."""

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        words, num_rows = tensors["qweight"].shape
        num_tables, size = tensors["lookup_table"].shape
        if num_tables != num_rows or size not in (8, 16):
            raise ValueError(
                f"{num_tables} tables of {size} values do not fit {num_rows} rows of 3 or 4 bits"
            )
        num_in = words * WORD // _bits(size)
        return (num_rows, num_in), wider(num_in)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        from pagewire.workers.checkpoint.formats.reexpress import reexpressed

        (num_rows, num_in), _ = self.stored(name, described(tensors))
        return reexpressed("rows with tables of values", _dense(tensors, num_rows, num_in), dtype)


def _dense(tensors: Mapping[str, Tensor], num_rows: int, num_in: int) -> Iterator[Tensor]:
    """Blocks of rows of the matrix with its outliers."""
    from pagewire.kernels.data.integers import row_blocks

    tables = tensors["lookup_table"].float()
    for start, stop in row_blocks(num_rows, num_in):
        codes = _unpacked(tensors["qweight"][:, start:stop], _bits(tables.shape[1]))
        block = tables[start:stop].gather(1, codes.T)
        if "vals" in tensors:
            _add_outliers(block, tensors, start, stop)
        if "full_rows" in tensors:
            for index, row in zip(tensors["full_row_indices"].tolist(), tensors["full_rows"].T, strict=True):
                if start <= index < stop:
                    block[index - start] += row.float()
        yield block


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes int64 [K, n] in words int32 [K * bits / 32, n]: in each column a stream of bits, lowest first."""
    import torch

    first = torch.arange(words.shape[0] * WORD // bits) * bits
    word, shift = first // WORD, (first % WORD)[:, None]
    stream = words.long() & 0xFFFFFFFF
    low = stream[word] >> shift
    high = stream[(word + 1).clamp(max=len(words) - 1)] << (WORD - shift)
    codes: Tensor = (low | high) & (2**bits - 1)
    return codes


def _add_outliers(block: Tensor, tensors: Mapping[str, Tensor], start: int, stop: int) -> None:
    """Add the sparse matrix's rows from `start` to before `stop` to a block of the dense one."""
    import torch

    ends = tensors["rows"][start : stop + 1].long()
    within = slice(int(ends[0]), int(ends[-1]))
    rows = torch.repeat_interleave(torch.arange(stop - start), ends.diff())
    block.index_put_((rows, tensors["cols"][within].long()), tensors["vals"][within].float(), accumulate=True)


def _bits(size: int) -> int:
    return size.bit_length() - 1


def of(config: Mapping[str, Any]) -> SqueezeLlm:
    """The format of a `quantization_config` of method `squeezellm`; its tensors say all that it says."""
    return SqueezeLlm()
