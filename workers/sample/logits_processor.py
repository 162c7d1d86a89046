"""The interface of logits processors, which programs implement: that of vLLM's (`vllm.v1.sample.logits_processor`).

A processor is named at the start of the engine (`logits_processors`), and runs in the workers. There are two forms:

- for the whole batch: a class with the methods of `LogitsProcessor`, called once a step for all of its sequences;
- for one sequence: a function `(output token ids, logits [V]) -> logits [V]`, or one of three arguments, the
  prompt's token ids first; or a class whose objects, made without arguments, are such functions.

What a processor does must be a function of a sequence's parameters and tokens, and of nothing else: a sequence is
added again, with its tokens so far, after a preemption, after a worker was lost, and behind each draft that is
verified. It must not depend on the other sequences of the batch either.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pagewire.ipc.wire.params import SamplingParams


class MoveDirectionality(Enum):
    """How rows of the batch change places."""

    UNIDIRECTIONAL = auto()
    """One takes the place of the other, which is gone."""
    SWAP = auto()
    """Both change places. pagewire never moves rows so."""


# Index, parameters, the prompt's tokens, and the output's: a list that grows with the sequence.
AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int], list[int]]
MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]


class BatchUpdate(NamedTuple):
    """The changes of a processor's batch since the last step; to be applied in the order removed, added, moved.

    batch_size: rows now. removed: indices. added: new rows. moved: (from, to, how).
    """

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[AddedRequest] = ()
    moved: Sequence[MovedRequest] = ()


class LogitsProcessor:
    """Base of processors of the whole batch.

    config: the worker's `WorkerConfig`. device: on which the logits are. is_pin_memory: tensors that are copied
    to it should be in pinned memory.
    """

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Nothing by itself; a subclass takes the same arguments."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Check the parameters of a request before its first row.

        Raises:
            ValueError: the request ends with this error.
        """

    def is_argmax_invariant(self) -> bool:
        """True if the largest logit stays the largest: then greedy sequences are left out."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take over the changes of the batch; called before `apply`. None: there are none."""
        raise NotImplementedError

    def apply(self, logits: Tensor) -> Tensor:
        """The logits to sample from, of logits float32 [rows, V], which may be changed in place."""
        raise NotImplementedError


class PerSequence(LogitsProcessor):
    """A processor of single sequences as one of the batch.

    function: see this module; takes two arguments, or three with the prompt.
    """

    def __init__(self, function: Any, with_prompt: bool) -> None:
        self._function, self._with_prompt = function, with_prompt
        self._rows: dict[int, tuple[list[int], ...]] = {}

    def is_argmax_invariant(self) -> bool:
        """See `LogitsProcessor`."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See `LogitsProcessor`."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, _, prompt, output in batch_update.added:
            self._rows[index] = (prompt, output) if self._with_prompt else (output,)
        for source, target, _ in batch_update.moved:
            self._rows[target] = self._rows.pop(source)

    def apply(self, logits: Tensor) -> Tensor:
        """See `LogitsProcessor`."""
        for index, tokens in self._rows.items():
            result = self._function(*tokens, logits[index])
            logits[index] = checked(result, (logits.shape[1],))
        return logits


def checked(result: object, shape: tuple[int, ...]) -> Tensor:
    """What a processor has returned.

    Raises:
        TypeError: it is no tensor of numbers. ValueError: it is of another shape.
    """
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise TypeError(f"it must return a tensor of floats, got {type(result).__name__}")
    if result.shape != shape:
        raise ValueError(f"it must return a tensor of shape {list(shape)}, got {list(result.shape)}")
    return result.to(torch.float32)
