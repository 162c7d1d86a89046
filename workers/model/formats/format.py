"""What a reader of a quantised checkpoint does: it makes a `Weight` of the tensors that hold a matrix together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pagewire.kernels.weight import Weight


class Format(Protocol):
    """A way in which quantised matrices lie in a checkpoint. Each is held by tensors of one module, its parts.

    A module whose only tensor of these is a float `weight` is dense: no format is asked about it.
    """

    @property
    def name(self) -> str:
        """The name of the format, as `quantization=` says it: "awq", "gptq", ..."""

    @property
    def suffixes(self) -> frozenset[str]:
        """The last parts of the names of the tensors that make a matrix: {"qweight", "qzeros", "scales"}.

        They may have dots: "weight.absmax". One that begins with an underscore makes a stack of matrices
        (`StackFormat`): "_blocks" of `experts.gate_up_proj_blocks`, which is a part of `experts.gate_up_proj`.
        """

    def check(self, names: Iterable[str]) -> None:
        """Refuse a checkpoint before anything of it is read. names: of all its tensors.

        Raises:
            ValueError: it holds what is not served; the text names that.
        """

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The shape of the dense weight. name: of the module; tensors: by suffix; large ones should not be touched.

        Raises:
            ValueError: the tensors do not fit each other.
        """

    def weight(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        """The matrix [N, K]. name: of the module; tensors: by suffix; dtype: of the product's inputs and outputs.

        Raises:
            ValueError: the tensors do not fit each other.
        """


@runtime_checkable
class StackFormat(Format, Protocol):
    """A format that also holds stacks of matrices, such as all experts of a layer, in one set of tensors."""

    @property
    def transposed(self) -> bool:
        """True if the dense weight of a stack is [E, K, N]; else it is [E, N, K], as `shape` says it."""

    def stacked(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[Weight]:
        """The matrices [N, K] of a stack, one by one. name: of the dense weight; else as `weight`."""
