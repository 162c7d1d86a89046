"""The base of logits processors, where programs written for vLLM look for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class SequenceLogitsProcessor:
    """Base of processors of one sequence's logits. An engine takes a subclass by path, and requests name it.

    `LLM(..., logits_processors=["NAME=package.module:Class"])`, then `SamplingParams(logits_processors=["NAME"])`.
    Each worker makes an object without arguments. docs/extensions.md has the other forms.
    """

    def __call__(self, input_ids: list[int], scores: Tensor) -> Tensor:
        """The logits to sample the next token from.

        input_ids: the output's tokens so far. scores: logits, float32 [V], which may be changed in place.
        """
        raise NotImplementedError


LogitsProcessor = SequenceLogitsProcessor

__all__ = ["LogitsProcessor"]
