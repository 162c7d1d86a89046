"""The stages of a pipeline: each runs some of a model's layers, and hands hidden states on to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.workers.errors import LoadError
from pagewire.workers.ranks.interface import Collective


@dataclass(frozen=True)
class Stage:
    """The part of a pipeline that a rank is in.

    layers: the numbers of its layers. number, count: which of the stages it is. ranks: all ranks of the group.
    width, dtype, device: of hidden states [T, width], between layers.
    """

    layers: range
    number: int
    count: int
    ranks: Collective
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True if it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True if it has the final norm and the output layer."""
        return self.number == self.count - 1

    @property
    def _distance(self) -> int:
        """From a rank to that of the next stage which has the same part of its layers."""
        return self.ranks.size // self.count

    def receive(self, num_tokens: int) -> Tensor | None:
        """Hidden states [T, width] of the stage before, once it has sent them; None for the first stage."""
        states = self.zeros(num_tokens)
        return None if states is None else self.ranks.receive(states, self.ranks.rank - self._distance)

    def zeros(self, num_tokens: int) -> Tensor | None:
        """Memory for hidden states [T, width] of the stage before; None for the first stage."""
        if self.is_first:
            return None
        return torch.zeros(num_tokens, self.width, dtype=self.dtype, device=self.device)

    def send(self, states: Tensor) -> None:
        """Send hidden states [T, width] to the next stage, if there is one.

        Raises:
            LoadError: they are of another shape or dtype than the next stage expects.
        """
        if self.is_last:
            return
        if states.shape[1:] != (self.width,) or states.dtype != self.dtype:
            raise LoadError(
                f"hidden states of {list(states.shape[1:])} in {states.dtype} between its layers, not of "
                f"{[self.width]} in {self.dtype}, cannot go from stage to stage"
            )
        self.ranks.send(states, self.ranks.rank + self._distance)
