"""What all steps of a worker share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagewire.workers.adapters.interface import WorkerAdapters
from pagewire.workers.batch.slots import Relay, Slots
from pagewire.workers.device.interface import Device, PendingTokens, TokenSampler
from pagewire.workers.media.interface import WorkerMedia
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.run.extension import ExtensionClass
from pagewire.workers.run.model import WorkerModel
from pagewire.workers.run.profiling import StepProfiler
from pagewire.workers.sample.typical import TypicalAcceptance
from pagewire.workers.speculation.interface import Drafter


@dataclass(frozen=True)
class ModelParts:
    """What a model may have, as steps take it; what it has not is stood in for by something that does nothing."""

    adapters: WorkerAdapters
    extension: ExtensionClass
    media: WorkerMedia
    drafter: Drafter


@dataclass(frozen=True)
class StepEnvironment:
    """The model that steps run, its parts, and what they keep of sequences.

    sampler: of the model's logits, which logits processors get first if there are any.
    collective: the operations of this rank with the others of its group.
    typical: accepts proposed tokens that were not drawn; None: none is accepted.
    """

    model: WorkerModel
    parts: ModelParts
    slots: Slots
    device: Device
    sampler: TokenSampler
    collective: Collective
    typical: TypicalAcceptance | None
    relay: Relay
    profiler: StepProfiler

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, the drafter's included; 0 while they are dropped."""
        return self.model.weight_bytes + self.parts.drafter.weight_bytes

    def keep_tokens(self, slots: Tensor, sampled: PendingTokens) -> None:
        """Keep sampled tokens on the device for the next step, which may start before the host has read them."""
        if self.device.asynchronous:
            self.relay.keep(slots, sampled.token_ids.to(self.device.torch_device))
