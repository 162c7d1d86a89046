"""The one seam between devices: memory, what runs when, and how tokens are drawn there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from pagewire.ipc.messages import WorkerConfig

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagewire.workers.sample.masks import TokenMasks
    from pagewire.workers.sample.sampler import SampleOutput, SamplingSlot


class Event(Protocol):
    """A point in the work of a device."""

    def reached(self) -> bool:
        """Is all work done that was given before?"""

    def wait(self) -> None:
        """Until it is reached."""

    def seconds_since(self, earlier: Self) -> float:
        """Between two points, both reached, of the same device."""


class PendingTokens(Protocol):
    """Tokens on their way to the host."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [R], where they were drawn."""

    def reached(self) -> bool:
        """Are they there?"""

    def finish(self) -> SampleOutput:
        """Wait for them."""


class TokenSampler(Protocol):
    """Draws tokens where the logits are."""

    def launch(self, logits: Tensor, slots: Sequence[SamplingSlot], masks: TokenMasks) -> PendingTokens:
        """Start choosing one token per row, see `sampler.sample`. One launch at a time."""


class Device(Protocol):
    """Where the model runs. What is called returns at once where the device works on its own."""

    name: str
    torch_device: torch.device
    num_threads: int
    """Of the CPU."""
    asynchronous: bool
    """Whether it works on its own while the host goes on."""
    batch_invariant: bool
    """Whether the bits of a token's logits depend on its request alone."""

    @property
    def activities(self) -> Sequence[ProfilerActivity]:
        """What a profile records."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in memory of its own.

        Raises:
            OSError: there is not so much memory.
        """

    def populate(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Prepare tensors of zeros for being written from their beginnings on, milliseconds at a time."""

    def kv_dtypes(self, dtype: torch.dtype) -> Sequence[torch.dtype]:
        """What the KV cache of a model of this dtype may hold."""

    def prepare(self, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> None:
        """Compile what a model of these dtypes needs, with progress in the log.

        Raises:
            LoadError: it cannot be compiled.
        """

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the host, there. They may be changed at once; the copies must not."""

    def record_event(self) -> Event:
        """The point behind all work given so far."""

    def sampler(self, max_rows: int, vocab_size: int, max_most_likely: int) -> TokenSampler:
        """For at most so many rows, and so many most likely tokens of each."""

    def can_record(self, dtype: torch.dtype) -> bool:
        """Whether the work of a model of this dtype can be recorded, with something to gain."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What does again what `work` does, over the same memory: its result is the same tensor each time."""

    def kv_budget(self, config: WorkerConfig, vocab_size: int, widest_step: Callable[[], object]) -> int:
        """Bytes for the KV cache, the weights being there. widest_step: runs a step of the largest size.

        Raises:
            LoadError: what was asked for makes no sense.
        """

    def give_back(self) -> None:
        """Let others have the memory that is free."""

    def memory(self) -> dict[str, int]:
        """Bytes: of the device, free on it, and taken by this process."""
