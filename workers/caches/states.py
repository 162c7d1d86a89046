"""States that layers hand from token to token, beside keys and values: their shapes, their memory, a step's share.

A layer may have several: a short convolution's last inputs, a matrix of each head. The states of all layers after
one token of one sequence lie in one *state slot*, a row of each tensor here. Layers ask for their states in the
same order in each step, so a state is known by its place in that order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from pagewire.kernels.data.states import MixerStates, StateBatch
from pagewire.workers.caches.memory import Allocator
from pagewire.workers.errors import LoadError

StateShape: TypeAlias = tuple[int, ...]
"""The shape of a state after one token; its numbers are float32."""


def state_bytes(shapes: Sequence[StateShape]) -> int:
    """Bytes of a state slot."""
    return sum(math.prod(shape) for shape in shapes) * torch.float32.itemsize


def allocate_states(shapes: Sequence[StateShape], num_states: int, device: Allocator) -> list[Tensor]:
    """Zeroed states float32 [num_states, *shape] of these shapes on a device.

    Raises:
        OSError: not enough memory.
    """
    return [device.zeros((num_states, *shape), torch.float32) for shape in shapes]


class StepStates:
    """The states of a step: which rows read and write which slots, and the memory of these.

    memory: float32 [num_states, *shape] of each state, in the order in which layers ask for them.
    """

    def __init__(self, batch: StateBatch, memory: Sequence[Tensor]) -> None:
        self.batch, self.memory = batch, memory
        self._num_taken = 0

    def take(self, shape: StateShape) -> Tensor:
        """The next layer's states float32 [num_states, *shape]."""
        place = self._num_taken
        self._num_taken += 1
        return self.memory_at(place, shape)

    def of_layers(self, shapes: Sequence[Sequence[StateShape]]) -> MixerStates:
        """The next states, those of several layers after each other."""
        return MixerStates(self.batch, [[self.take(shape) for shape in own] for own in shapes])

    def memory_at(self, place: int, shape: StateShape) -> Tensor:
        """The states at a place in the order."""
        return self.memory[place]


@dataclass
class RecordedStates:
    """The states that layers ask for in a dry run, which get memory when they are first asked for.

    shapes: in the order in which layers ask.
    """

    num_states: int
    device: Allocator
    shapes: list[StateShape] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)

    def step(self, batch: StateBatch) -> StepStates:
        """The states of a step that is recorded here."""
        return _RecordedStep(batch, self)


class _RecordedStep(StepStates):
    def __init__(self, batch: StateBatch, recorded: RecordedStates) -> None:
        super().__init__(batch, recorded.memory)
        self._recorded = recorded

    def memory_at(self, place: int, shape: StateShape) -> Tensor:
        recorded = self._recorded
        if place == len(recorded.shapes):
            recorded.shapes.append(shape)
            recorded.memory += allocate_states([shape], recorded.num_states, recorded.device)
        if recorded.shapes[place] != shape:
            raise LoadError("its layers do not ask for their states in the same order in each step")
        return super().memory_at(place, shape)
