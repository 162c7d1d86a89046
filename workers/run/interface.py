"""The ways of a step beside the general one, as steps are launched in them.

Each is chosen and made in `workers/process/wiring.py`; `route.py` asks it whether it takes a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from pagewire.ipc.wire.worker_messages import StepPlan
from pagewire.kernels.data.deltas import AdapterRows
from pagewire.kernels.data.paging import Cache
from pagewire.workers.adapters.interface import WorkerAdapters
from pagewire.workers.batch.flat_batch import Batch
from pagewire.workers.batch.slots import Slots
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.run.step import FinishedStep


@dataclass(frozen=True)
class Quiet:
    """Whether the core wants nothing.

    check: true if it does not. descriptors: at most two files; one can be read once it does, if check was called.
    """

    check: Callable[[], bool]
    descriptors: Sequence[int]


class DecodingWay(Protocol):
    """Runs plans whose rows only decode, from rows to tokens; see `decoding.Decoding`."""

    @property
    def why_not(self) -> str:
        """Why it takes no plan of this model; empty: it takes some."""
        ...

    def use(self, loaded: LoadedModel, caches: Sequence[Cache], states: Sequence[Tensor]) -> None:
        """Decode with this model from now on, and with these caches of its layers and their states."""

    def refusal(self, plan: StepPlan) -> str:
        """Why it does not take a plan that was applied to the slots; empty: it does."""
        ...

    def run(self, plan: StepPlan, quiet: Quiet | None) -> FinishedStep | Tensor:
        """Run a plan that it does not refuse. quiet: None: it stays so.

        Where its logits cannot be sampled, its hidden states [R, H] are returned: layers have changed their states.
        """
        ...

    def forget(self) -> None:
        """Let go of the model and its caches."""


class EncodingWay(Protocol):
    """Runs plans of prompts that are pooled; see `encoding.Encoding`."""

    def use(self, loaded: LoadedModel) -> None:
        """Encode with this model from now on."""

    def refusal(self, plan: StepPlan) -> str:
        """Why it does not take a plan that was applied to the slots; empty: it does."""
        ...

    def run(self, plan: StepPlan) -> FinishedStep:
        """Run a plan that it does not refuse."""
        ...

    def forget(self) -> None:
        """Let go of the model."""


class RecordedShape(NamedTuple):
    """What a recorded step has room for."""

    num_tokens: int
    num_requests: int
    num_each: int
    """The most tokens of a request."""

    def has_room(self, other: RecordedShape) -> bool:
        """True if it has room for a step of another shape."""
        (tokens, requests, each), (most_tokens, most_requests, most_each) = other, self
        return tokens <= most_tokens and requests <= most_requests and each <= most_each


class RecordedSteps(Protocol):
    """Steps of some shapes, each of which can be replayed; see `graphs.StepGraphs`."""

    def shape_for(self, plan: StepPlan, slots: Slots, adapters: WorkerAdapters) -> RecordedShape | str:
        """The recorded shape to which the requests of a plan are padded, or why no recorded step can run it."""
        ...

    def replay(self, shape: RecordedShape, batch: Batch, adapters: AdapterRows | None = None) -> Tensor:
        """Hidden states [tokens, H] of a batch that is padded to a shape. The next replay overwrites them.

        adapters: the rows of the batch that have adapters; None: none has.
        """
        ...
