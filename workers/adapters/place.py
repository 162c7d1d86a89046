"""Where a module's outputs are among those of a model's products."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from pagewire.kernels.adapted import Adapted
from pagewire.kernels.data.deltas import Delta, panels
from pagewire.workers.adapters.division import own_rows, whole_shape
from pagewire.workers.ranks.cut import Cut


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a module's outputs are: those from `first` on, `num_out` in number, of a linear layer of the model.

    linear: None for a module of another stage.
    is_output: it is the output layer, which is not one of "all-linear". is_optional: "all-linear" may mean it or
    not, as it is a linear layer in some versions of transformers only.
    cut: how the module is divided over the ranks. This one has `num_out` outputs and `num_in` inputs.
    order: int64 [num_out], which of this rank's outputs of the module each one here is; None: they are the same.
    factor: float32 [num_out]: what the module gives is multiplied by it here; None: it is not.
    """

    linear: Adapted | None
    first: int
    num_out: int
    num_in: int
    is_output: bool = False
    cut: Cut | None = None
    is_optional: bool = False
    order: Tensor | None = None
    factor: Tensor | None = None

    @property
    def is_elsewhere(self) -> bool:
        """True if another stage of the pipeline has the module: this one only checks the adapter's tensors."""
        return self.linear is None

    @property
    def whole(self) -> tuple[int, int]:
        """The outputs and inputs of the module on all ranks."""
        return whole_shape((self.num_out, self.num_in), self.cut)

    def elsewhere(self) -> Place:
        """The place for a rank of another stage, with the sizes of the whole module."""
        num_out, num_in = self.whole
        return Place(None, 0, num_out, num_in, self.is_output, is_optional=self.is_optional)

    def own_rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor [N, ...] with one for each output of the module, in the order here."""
        return self.in_order(own_rows(tensor, self.cut))

    def in_order(self, rows: Tensor) -> Tensor:
        """This rank's rows [num_out, ...], one for each of its outputs, in the order here."""
        return rows if self.order is None else rows[self.order]

    def bias(self, device: torch.device) -> Tensor:
        """The module's own bias on this rank, float32 [num_out]; zeros if it has none. device: of the model."""
        if self.linear is None:
            return torch.zeros(self.num_out)
        row = self.linear.linear(torch.zeros(1, self.num_in, dtype=self.linear.dtype, device=device))
        own = row[0, self.first : self.first + self.num_out].float().cpu()
        return own if self.factor is None else own / self.factor

    def multiplied(self, delta: Delta) -> Delta:
        """A change of what the module gives, as one of what is here."""
        if (factor := self.factor) is None:
            return delta
        shift = None if delta.shift is None else delta.shift * factor
        if delta.b is None:
            return replace(delta, a=(delta.a * factor[:, None]).to(delta.a.dtype), shift=shift)
        return replace(delta, b=panels((delta.second * factor[:, None]).to(delta.a.dtype)), shift=shift)
