"""A model that pools: hidden states of tokens, and the head of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.deltas import AdapterRows
from pagewire.workers.model.dense import FUNCTIONS, Dense, chain
from pagewire.workers.model.model import Model
from pagewire.workers.model.transforms import LinearModule


class Headless(nn.Module):
    """A base model in the place of a causal one, whose "logits" are its hidden states."""

    base_model_prefix = "base"

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.config = base, base.config

    def forward(self, **inputs: Any) -> SimpleNamespace:
        """Hidden states [1, T, H] as `logits`."""
        return SimpleNamespace(logits=self.base(**inputs)[0])


class PooledStub(nn.Module):
    """Stands in for the base of a classifier, and returns the hidden states that it is given.

    pooler: the part of the base, if any, that prepares the first token's state for the classifier, as BERT's.
    """

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> PooledStubOutput:
        """`inputs_embeds` [n, 1, H] in the form of a base model's output."""
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return PooledStubOutput((inputs_embeds, pooled))


class PooledStubOutput(tuple[Any, ...]):
    """A base model's output: hidden states, and BERT's pooled state."""

    @property
    def last_hidden_state(self) -> Tensor:
        """Hidden states [n, 1, H]."""
        return self[0]  # type: ignore[no-any-return]

    @property
    def pooler_output(self) -> Tensor:
        """BERT's pooled state [n, H]."""
        return self[1]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> None:
        """None for all other outputs: caches, attentions."""
        if name.startswith("__"):
            raise AttributeError(name)


class PoolingModel(Model):
    """A model whose second half, if it has one, makes scores of classes from pooled hidden states.

    That half is the classifier with its base replaced by a stub, which passes on the pooled state as a sequence of
    one token: the first token and the last are then the same.

    classifies: it has such a half. classifier: its linear layers, where they are all that it computes.
    """

    classifier: Sequence[Dense] | None = None

    def __init__(self, module: Any, batch_invariant: bool) -> None:
        self.classifies = hasattr(module, module.base_model_prefix)
        super().__init__(module if self.classifies else Headless(module), batch_invariant)
        pooler = getattr(self.base, "pooler", None)
        setattr(self.causal, self.causal.base_model_prefix, PooledStub(pooler if self.classifies else None))
        if self.classifies and getattr(self.config, "pad_token_id", None) is None:
            self.config.pad_token_id = 0  # without one, transformers classifies a single sequence at a time

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """The hidden states [n, H] themselves, by which the model is proven."""
        return hidden

    def shorten_logits(self) -> None:
        """Nothing to do: there are no logits."""

    def scores(self, pooled: Tensor) -> Tensor:
        """Logits float32 [n, L] of classes, from pooled hidden states [n, H]."""
        if self.classifier is not None:
            return chain(self.classifier, pooled)
        with self.arithmetic():
            return self.causal(inputs_embeds=pooled[:, None]).logits.reshape(len(pooled), -1).float()  # type: ignore[no-any-return]

    def shorten_scores(self) -> None:
        """Compute scores by the classifier's linear layers alone, where that gives the module's own to the bit."""
        linears = [child.product for child in self.causal.modules() if isinstance(child, LinearModule)]
        if not self.classifies or len(linears) not in (1, 2):
            return
        states = torch.randn(5, linears[0].in_features, generator=torch.Generator().manual_seed(0))
        states = states.to(linears[0].dtype)
        expected = self.scores(states)
        for between in (None, *FUNCTIONS) if len(linears) == 2 else (None,):
            layers = [Dense(linears[0], between), *(Dense(linear, None) for linear in linears[1:])]
            fits = all(a.out_features == b.in_features for a, b in pairwise(linears))
            if fits and torch.equal(chain(layers, states), expected):
                self.classifier = layers
                return


def base_of(module: Any) -> Any:
    """The base of a classifier, or the module itself if it is a base."""
    return getattr(module, module.base_model_prefix, module)


def position_offset(base: Any) -> int:
    """The position of a prompt's first token: RoBERTa and its descendants count from behind the padding token."""
    embeddings: Any = getattr(base, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_inputs_embeds"):
        return int(embeddings.padding_idx) + 1
    return 0


def normalized_rows(x: Tensor) -> Tensor:
    """Rows float32 [n, D], each divided by its length. A row's bits do not depend on the others."""
    from pagewire.kernels.ops import rms_norm

    size = x.shape[-1]
    return rms_norm(x.contiguous(), torch.full((size,), size**-0.5, device=x.device), 1e-24)
