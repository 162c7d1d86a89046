"""Logits processors and methods of workers, as an operator would write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagewire import logits_process
from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


def pushed(strength: float, prompt: list[int], output: list[int], row: Tensor) -> Tensor:
    """Logits [V] after a push on tokens that follow from all tokens so far."""
    first = (sum(prompt) * 7 + sum((i + 1) * token for i, token in enumerate(output))) % len(row)
    row[first :: 3 + len(output) % 5] += strength
    return row


class Pusher(LogitsProcessor):
    """Of the batch; `extra_args` has the strength, or says how it fails."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
        self.num_rows = 0

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("push") == "invalid":
            raise ValueError("push must be a number")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.rows[index]
        for index, params, prompt, output in batch_update.added:
            self.rows[index] = (params, prompt, output)
        for source, target, how in batch_update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL and target not in self.rows
            self.rows[target] = self.rows.pop(source)
        self.num_rows = batch_update.batch_size

    def apply(self, logits: Tensor) -> Tensor:
        assert len(logits) == self.num_rows == len(self.rows)
        for index, (params, prompt, output) in self.rows.items():
            strength = (params.extra_args or {}).get("push", 2.0)
            if strength == "broken":
                logits.fill_(0)  # what a failed call leaves behind must not matter
                self.rows.clear()
                raise RuntimeError("a bug")
            pushed(strength, prompt, output, logits[index])
        return logits


class AsDocumented(logits_process.LogitsProcessor):
    """Of one sequence, on the base that vLLM's documents have."""

    def __call__(self, input_ids: list[int], scores: Tensor) -> Tensor:
        scores[7 + len(input_ids)] += 1000.0
        return scores


def push(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    """Of one sequence."""
    return pushed(2.0, prompt, output, logits)


class OnlyLater:
    """Of one sequence, as a class: token 0 is not the first one."""

    def __call__(self, output: list[int], logits: Tensor) -> Tensor:
        if not output:
            logits[0] = -torch.inf
        return logits


def without_result(output: list[int], logits: Tensor) -> None:
    """Forgets to return."""


class Sharper(Pusher):
    """Changes no largest logit."""

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        assert all(params.temperature > 0 for params, _, _ in self.rows.values())
        return logits * 3


class Weights:
    """Methods of workers."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def rank_and_vocabulary(self, add: int, *, scale: float = 1.0) -> list[float]:
        return [self._worker.collective.rank + add, self._worker.model.vocab_size * scale]

    def unsendable(self) -> object:
        return object()
