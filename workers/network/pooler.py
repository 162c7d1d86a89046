"""Makes the results of prompts from the hidden states of their tokens.

A result's bits depend on its prompt alone: not on other rows of a step, nor on how the prompt was cut into chunks.
A mean is a sum of integers, which may be added in any order: hidden states are rounded to multiples of 2**-30.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagewire.ipc.wire.pooling import TOKEN_TASKS, PoolingInfo, PoolingParams
from pagewire.kernels.data.elementwise import elementwise
from pagewire.kernels.data.weight import Linear
from pagewire.kernels.ops import fixed_sums, rms_norm
from pagewire.workers.network.pooling_spec import PoolingSpec

FRACTION = 2.0**30  # of the integers of a mean; a sum may reach 2**33
NOT_FINITE = "the model's hidden states are not finite"


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Tanh": torch.tanh,
    "GELU": torch.nn.functional.gelu,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Dense:
    """A linear layer after the pooling, and the function of `FUNCTIONS` applied to its result."""

    product: Linear
    activation: str | None

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [n, K] to float32 [n, N]."""
        y = self.product(x.to(self.product.dtype)).float()
        return y if self.activation is None else elementwise(FUNCTIONS[self.activation], y)


def chain(layers: Sequence[Dense], x: Tensor) -> Tensor:
    """Rows [n, K] through layer after layer to float32 [n, N]; their bits do not depend on each other."""
    for layer in layers:
        x = layer(x)
    return x


@dataclass
class PoolingSlot:
    """What was pooled so far of a prompt that is computed in chunks.

    total: int64 [H], the sum of a mean. first: float [H], the state of the first token. parts: float32 [n, D] of
    the chunks, vectors of tokens.
    """

    task: PoolingParams
    num_tokens: int
    total: Tensor | None = None
    first: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)


@dataclass
class Pooler:
    """Pools rows by a specification."""

    spec: PoolingSpec
    info: PoolingInfo
    dense: list[Dense]
    """Linear layers behind the pooling, or the head of a reward model."""
    scores: Callable[[Tensor], Tensor] | list[Dense] | None
    """The classifier behind the base model, also as a module (`ModuleScores`); None: there is none."""
    dtype: torch.dtype
    """Of hidden states."""

    def add(
        self, slot: PoolingSlot, hidden: Tensor, start: int, token_ids: Tensor | None = None
    ) -> Tensor | None:
        """Add the hidden states [n, H] of tokens [start, start + n). Returns the result if they end the prompt.

        token_ids: int64 [n], of these tokens, on the host; only rewards of steps need them.

        Raises:
            ValueError: the hidden states, or what becomes of them, are not finite.
        """
        ends = start + len(hidden) == slot.num_tokens
        if slot.task.task in TOKEN_TASKS:
            if self.spec.step_tag_id is not None:
                assert token_ids is not None
                hidden = hidden[(token_ids == self.spec.step_tag_id).to(hidden.device)]
            slot.parts.append(self._finish(hidden.float(), slot.task))
            return torch.cat(slot.parts) if ends else None
        pooled = self._pool(slot, hidden, start)
        return self._finish(pooled[None], slot.task)[0] if ends else None

    def together(self, slots: Sequence[PoolingSlot], hidden: Tensor, ends: Tensor) -> Tensor | None:
        """The results [n, D] of whole prompts that stand one behind the other, as `add` returns each.

        None where each is to be added by itself: they do not want the same, or vectors of tokens, some states are
        not finite, or layers follow on a GPU, where a row's bits may depend on the others.

        Args:
            slots: [n]. hidden: [T, H], of all their tokens. ends: int64 [n], of the prompts in it, ascending.
        """
        task = slots[0].task
        layers_follow = self.spec.kind != "embed" or len(self.dense) > 0
        if task.task in TOKEN_TASKS or (layers_follow and not hidden.is_cpu):
            return None
        if any(slot.task is not task and slot.task != task for slot in slots):
            return None
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        if self.spec.pooling_type != "MEAN":
            places = starts if self.spec.pooling_type == "CLS" else ends - 1
            states = hidden.index_select(0, places).float()
        else:
            if (totals := fixed_sums(hidden, ends, FRACTION)) is None:
                return None
            states = (totals.double() / FRACTION / (ends - starts)[:, None]).float()
        try:
            return self._finish(states, task)
        except ValueError:
            return None

    def _pool(self, slot: PoolingSlot, hidden: Tensor, start: int) -> Tensor:
        """The pooled state float32 [H] of the tokens so far; it counts once they are all. Raises as `add`."""
        if self.spec.pooling_type == "LAST":
            return hidden[-1].float()
        if self.spec.pooling_type == "CLS":
            if start == 0:
                slot.first = hidden[0].float()
            assert slot.first is not None, "the first token is computed first"
            return slot.first
        part = fixed_sums(hidden, torch.tensor([len(hidden)], device=hidden.device), FRACTION)
        if part is None:
            raise ValueError(NOT_FINITE)
        slot.total = part[0] if slot.total is None or start == 0 else slot.total + part[0]
        return (slot.total.double() / FRACTION / (start + len(hidden))).float()

    def _finish(self, states: Tensor, task: PoolingParams) -> Tensor:
        """Results float32 [n, D] of pooled states, or of the states of tokens, float32 [n, H]; as `add`."""
        results = self._results(states, task)
        if not (finite(states.double()) and finite(results.double())):
            raise ValueError(NOT_FINITE)
        return results

    def _results(self, states: Tensor, task: PoolingParams) -> Tensor:
        if self.spec.kind != "embed":
            scores = self._scores(states)
            activates = self.info.activation if task.activation is None else task.activation
            return activated(scores, self.spec.activation) if activates else scores
        states = chain(self.dense, states)
        dimensions = task.dimensions or self.info.dimensions
        if dimensions is not None:
            states = states[:, :dimensions]
        normalizes = self.info.normalize if task.normalize is None else task.normalize
        return normalized_rows(states) if normalizes else states

    def _scores(self, states: Tensor) -> Tensor:
        """Logits float32 [n, L] of states float32 [n, H]: by the head of a reward model, or of the classifier."""
        if not len(states):
            return states.new_zeros(0, self.info.size)
        if self.dense:
            return chain(self.dense, states)
        assert self.scores is not None, "a model that scores has a classifier or layers for rewards"
        states = states.to(self.dtype)
        return chain(self.scores, states) if isinstance(self.scores, list) else self.scores(states)


def finite(x: Tensor) -> bool:
    """True if float64 numbers that were float32 are finite: their sum, which cannot overflow, tells it."""
    return math.isfinite(x.sum().item())


def activated(scores: Tensor, name: str) -> Tensor:
    """Scores float32 [n, L] of logits. A row's bits do not depend on the others."""
    if name == "sigmoid":
        return elementwise(torch.sigmoid, scores)
    if name == "softmax":
        return torch.stack([torch.softmax(row, 0) for row in scores]) if len(scores) else scores
    return scores


def normalized_rows(x: Tensor) -> Tensor:
    """Rows float32 [n, D], each divided by its length. A row's bits do not depend on the others."""
    size = x.shape[-1]
    return rms_norm(x.contiguous(), torch.full((size,), size**-0.5, device=x.device), 1e-24)
