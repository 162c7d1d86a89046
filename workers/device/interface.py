"""The interface that a device implements: memory, order of work, and sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.device.gpu_memory import GpuMemory

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagewire.workers.sample.masks import TokenMasks
    from pagewire.workers.sample.sampler import SampleOutput, SamplingSlot


class Event(Protocol):
    """A position in the device's queue of work (a CUDA event; on the CPU a timestamp)."""

    def reached(self) -> bool:
        """True if all work launched before the event is done."""

    def wait(self) -> None:
        """Block until the event is reached."""

    def seconds_since(self, earlier: Self) -> float:
        """Seconds between two events of the same device, both reached."""


class PendingTokens(Protocol):
    """Tokens that are being sampled, then copied to the host."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [R], on the device that sampled them."""

    def reached(self) -> bool:
        """True if `finish` would not have to wait."""

    def finish(self) -> SampleOutput:
        """Wait for the tokens and return them."""


class TokenSampler(Protocol):
    """Samples tokens on the device that has the logits."""

    def launch(self, logits: Tensor, slots: Sequence[SamplingSlot], masks: TokenMasks) -> PendingTokens:
        """Start to sample one token per row, as `sampler.sample`. Finish a launch before the next one."""


class KernelNeeds(NamedTuple):
    """What a model asks of the kernels of its device.

    dtype, kv_dtype: of its numbers, and of its KV cache. head_dims: the sizes of attention heads in its layers;
    empty if none attends without latents. latents: their elements as keys and as values, to the sizes of the heads
    that they can be expanded to. encodes: it is an encoder. recurrent: some layers keep states.
    mixture: some have experts. packed: weights may stay packed.
    indexed: of `latents`, those among which an indexer chooses the keys that a token sees.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dims: Collection[int]
    encodes: bool = False
    recurrent: bool = False
    mixture: bool = False
    packed: bool = True
    latents: Mapping[tuple[int, int], int] = MappingProxyType({})
    indexed: Set[tuple[int, int]] = frozenset()


class LoadedSizes(NamedTuple):
    """What a device has to know of a loaded model to share out its memory.

    weight_bytes: of all models of the worker. records: its steps will be recorded as graphs.
    """

    vocab_size: int
    weight_bytes: int
    records: bool


class Device(Protocol):
    """The device that runs the model. If it is asynchronous, calls return before their work is done."""

    name: str
    torch_device: torch.device
    num_threads: int
    """Number of CPU threads."""
    asynchronous: bool
    """True if work is queued and the host does not wait for it."""

    @property
    def batch_invariant(self) -> bool:
        """True if the logits of a token do not depend, to the bit, on the rest of its batch."""

    @property
    def plan(self) -> GpuMemory | None:
        """How its memory is shared out, once `kv_budget` has returned; None on a CPU."""

    @property
    def activities(self) -> Sequence[ProfilerActivity]:
        """The activities that the PyTorch profiler should record."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in memory of its own.

        Raises:
            OSError: not enough memory.
        """

    def populate(self, tensor: Tensor) -> bool:
        """Take the pages of a contiguous tensor from the system; False where that cannot be done ahead."""

    def kv_dtypes(self, dtype: torch.dtype) -> Sequence[torch.dtype]:
        """The dtypes that the KV cache of a model of this dtype may have."""

    def prepare(self, needs: KernelNeeds) -> None:
        """Compile the kernels that a model needs, with progress in the log.

        Raises:
            LoadError: they cannot be compiled, or the device has none for heads of such a size, or for latents in
                such a cache.
        """

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of host tensors on the device. The originals may be changed at once, the copies must not be."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory, uint8 [num_bytes], from which and to which the device copies by itself.

        Raises:
            OSError, RuntimeError: not enough memory.
        """

    def record_event(self) -> Event:
        """An event behind all work launched so far."""

    def sampler(self, max_rows: int, vocab_size: int, max_most_likely: int) -> TokenSampler:
        """A sampler for up to `max_rows` rows; log probabilities of up to `max_most_likely` tokens are fast."""

    def can_record(self, dtype: torch.dtype) -> bool:
        """True if steps of a model of this dtype can be recorded as graphs, and are faster then."""

    def why_it_waits(self, work: Callable[[], object]) -> str | None:
        """Why the host waits for the device within `work`, which then cannot be recorded; None if it does not."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record `work` as a graph. Returns its replay, which reads and writes the same memory each time."""

    def kv_budget(self, config: WorkerConfig, loaded: LoadedSizes, widest_step: Callable[[], object]) -> int:
        """Bytes for the KV cache, called once the weights are loaded. widest_step: runs a step of the largest size.

        Raises:
            LoadError: a setting of the size is invalid, or the step does not fit into memory.
        """

    def give_back(self) -> None:
        """Return unused memory to the system."""

    def memory(self) -> dict[str, int]:
        """Bytes: `total` of the device, `available`, and used by this `process`; a GPU's also by part."""
