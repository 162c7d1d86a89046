"""AQLM: groups of weights are sums of vectors from codebooks. They are held in 8 bits (`reexpress.py`).

For each group of weights, such as 8 inputs of one output, each codebook has a code, which picks one of its vectors.
Their sum times the scale of the output is the group (Egiazarian et al. 2024, "Extreme Compression of Large Language
Models via Additive Quantization", section 3).
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


@dataclass(frozen=True)
class Aqlm:
    """Matrices as `codes`, `codebooks` and `scales`, with any numbers of codebooks, bits and sizes of groups."""

    name: str = "aqlm"
    suffixes: frozenset[str] = frozenset({"codes", "codebooks", "scales"})

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`: every form of AQLM is served."""

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        out_groups, in_groups, num_codebooks = tensors["codes"].shape
        num_books, _, outs, ins = tensors["codebooks"].shape
        if num_books != num_codebooks:
            raise ValueError(f"its codes are of {num_codebooks} codebooks, of which it holds {num_books}")
        return (out_groups * outs, in_groups * ins), wider(in_groups * ins)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        from pagewire.workers.checkpoint.formats.reexpress import reexpressed

        self.stored(name, described(tensors))
        return reexpressed("sums of codebooks' vectors", _dense(**tensors), dtype)


def _dense(codes: Tensor, codebooks: Tensor, scales: Tensor) -> Iterator[Tensor]:
    """Blocks of rows of the matrix.

    codes: signed integers [N / outs, K / ins, books], modulo `size`. codebooks: [books, size, outs, ins]. scales:
    [N / outs, 1 or K / ins, 1 or outs, 1 or ins].
    """
    from pagewire.kernels.data.integers import row_blocks

    num_books, size, outs, ins = codebooks.shape
    groups, in_groups, _ = codes.shape
    for start, stop in row_blocks(groups, in_groups * ins * outs):
        index = codes[start:stop].long() % size
        block = sum(codebooks[book].float()[index[..., book]] for book in range(num_books))
        block = block * scales[start:stop].float()
        yield block.transpose(1, 2).reshape((stop - start) * outs, in_groups * ins)


def of(config: Mapping[str, Any]) -> Aqlm:
    """The format of a `quantization_config` of method `aqlm`; its tensors say all that it says."""
    return Aqlm()
