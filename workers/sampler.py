"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from pagewire.ipc.messages import LogprobRows
from pagewire.ipc.params import SamplingParams
from pagewire.workers.logprobs import logprob_rows
from pagewire.workers.random import uniform

__all__ = ["SampleOutput", "SamplingSlot", "logprob_rows", "sample"]


@dataclass
class SampleOutput:
    """One token per row; by row, the log probabilities where asked for, and what went wrong.

    A row with an error has token id 0, which means nothing, and no log probabilities.
    """

    token_ids: list[int]
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class SamplingSlot:
    """What the sampler keeps of one sequence. It holds no reference to `tokens`: the row is the caller's."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
        tokens: NDArray[Any],
        num_prompt_tokens: int,
        num_tokens: int,
        vocab_size: int,
    ) -> None:
        self.params, self.seed, self.num_tokens = params, seed, num_tokens

    def append(self, token_id: int) -> None:
        """A token was added to the sequence (the caller writes it into its own row)."""
        self.num_tokens += 1


def sample(logits: torch.Tensor, slots: Sequence[SamplingSlot]) -> SampleOutput:
    """Draw one token per row of `logits` [R, V] (any float dtype) for `slots` [R]."""
    output = SampleOutput([0] * len(slots))
    for row, slot in enumerate(slots):
        x = logits[row]
        if not bool(torch.isfinite(x.amax())):
            output.errors[row] = "logits are not finite"
        elif slot.params.temperature == 0:
            output.token_ids[row] = int(x.argmax())
        else:
            x = x.float()
            masses = ((x - x.amax()) / slot.params.temperature).exp().double().cumsum(0)
            u = float(uniform([slot.seed], [slot.num_tokens])[0])
            output.token_ids[row] = int((masses <= u * masses[-1]).sum())
        if slot.params.logprobs is not None and row not in output.errors:
            output.logprobs[row] = logprob_rows(
                logits[row : row + 1], [output.token_ids[row]], slot.params.logprobs
            )
    return output
