"""A model that runs: a network, or a base model of transformers, and the head that makes logits of its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.workers.caches.kv import Pages, in_pages
from pagewire.workers.network.network import Network
from pagewire.workers.network.road import Road
from pagewire.workers.ranks.stages import Stage
from pagewire.workers.step.context import RowsContext, StepContext

Head: TypeAlias = Callable[[Tensor], Tensor]
"""A linear layer, or code of transformers (`ModuleHead`): hidden states [n, H] to logits [n, V]."""


class ModelBase(Protocol):
    """Tokens to hidden states: a `Network`, or modules of transformers with their own forward."""

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding that may take the place of a token's; 0: none may."""
        ...

    @property
    def name(self) -> str:
        """What it is called in errors."""
        ...

    @property
    def network(self) -> Network | None:
        """Itself as plain data; None: it has other code, and nothing of what networks alone have."""
        ...

    @property
    def road(self) -> Road:
        """How its layers run, and why."""
        ...

    @property
    def words(self) -> Any:
        """The module that looks tokens up."""
        ...

    @property
    def tables(self) -> list[Any]:
        """The modules of PyTorch that have weights of it beside `Network.num_bytes`."""
        ...

    def __call__(self, input_ids: Tensor, positions: Tensor, step: StepContext, /) -> Tensor:
        """Hidden states [T, H] of the tokens int64 [T] of a step at positions int64 [T]."""
        ...


@dataclass
class Model:
    """Tokens to hidden states, and hidden states to logits, if it generates and is the last stage of a pipeline.

    A rank of a group has its part of both.
    """

    base: ModelBase
    head: Head | None
    """Hidden states [n, H] to logits [n, V]; None where a later stage has it, or the states are pooled."""
    path: str = ""
    """Of the base in the module that was loaded; empty if it was a base itself."""
    output: str = ""
    """The name of the output layer there, where the head is that layer alone."""
    stage: Stage | None = None
    """The part of a pipeline that it is; None: it is whole."""
    encodes: bool = False
    """Its tokens attend to later ones, too, so prompts run as a whole, and nothing is cached."""
    first_position: int = 0
    """Of a prompt's first token: RoBERTa and its descendants count from behind the padding token."""
    pages: Pages = field(default_factory=Pages, init=False)

    @property
    def is_last(self) -> bool:
        """False for a stage before the last, which has no results."""
        return self.stage is None or self.stage.is_last

    @property
    def first_layer(self) -> int:
        """The number of its first layer in the whole model."""
        return 0 if self.stage is None else self.stage.layers.start

    def laid_out(self, batch: AttentionBatch, positions: Tensor) -> AttentionBatch:
        """A step's attention as the model needs it, on the host; positions: int64 [T], from 0 on in each prompt."""
        return in_pages(batch, positions) if self.encodes else batch

    def received(self, num_tokens: int) -> Tensor | None:
        """The hidden states [T, H] that the stage before has made of a step; None where the model begins.

        It waits for them.
        """
        return None if self.stage is None else self.stage.receive(num_tokens)

    def hidden_states(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Final hidden states [T, H] of the tokens int64 [T] of a step; or those that go to the next stage."""
        states = self.own_states(input_ids, step)
        self.send(states)
        return states

    def own_states(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """As `hidden_states`, but nothing is sent."""
        positions = step.positions
        if self.encodes:
            step.use(self.pages)
            positions = positions + self.first_position if self.first_position else positions
        with step:
            return self.base(input_ids, positions, step)

    def send(self, states: Tensor) -> None:
        """Send hidden states [T, H] to the next stage, if there is one."""
        if self.stage is not None:
            self.stage.send(states)

    @property
    def network(self) -> Network | None:
        """The base as plain data; None: code of transformers runs in its place."""
        return self.base.network

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Logits [n, V] of hidden states [n, H].

        adapters: those of the n rows. Where they bring tokens, there are as many logits more, which are -inf in
        rows without these tokens.
        """
        assert self.head is not None, "the model generates, and this is its last stage"
        if adapters is None:
            return self.head(hidden)
        with RowsContext(adapters):
            logits = self.head(hidden)
        adapters.close(logits)
        return logits
