"""A model that is loaded, how its layers run, and how long the phases of loading it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pagewire.ipc.wire.sources import SourceInfo
from pagewire.kernels.data.paging import Cache, KVScales
from pagewire.workers.caches.kv import KVShape, allocate_caches
from pagewire.workers.caches.memory import Allocator
from pagewire.workers.caches.states import StateShape
from pagewire.workers.network.model import Model
from pagewire.workers.network.pooler import Pooler
from pagewire.workers.network.road import Road
from pagewire.workers.ranks.cut import Cut


@dataclass
class Phases:
    """Measures the phases of the start. `report` is called with name and seconds of each; `seconds` keeps them."""

    report: Callable[[str, float], None]
    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)

    def end(self, name: str) -> None:
        """End the current phase under this name; the next one begins."""
        now = time.monotonic()
        self.seconds[name] = now - self._since
        self._since = now
        self.report(name, self.seconds[name])


@dataclass(frozen=True)
class LoadedModel:
    """A model that has passed the proof (`proof.py`), with its properties.

    kv_shapes: of each layer; empty if none attends to earlier tokens. kv_scales: of each layer of the whole model;
        empty for 1.
    state_shapes: of the states of all layers, in the order in which layers ask for them.
    short_length: see `transforms.short_length`. pooler: of a model that pools; None: it generates.
    source: what the encoder of an encoder-decoder reads; None: it is another model.
    cuts: how parameters are divided over the ranks, by name; what is not there, every rank has as a whole.
    """

    model: Model
    architecture: str
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_token_id: int | None
    kv_shapes: list[KVShape]
    kv_scales: list[KVScales]
    weight_bytes: int
    state_shapes: list[StateShape] = field(default_factory=list)
    short_length: int = 0
    pooler: Pooler | None = None
    source: SourceInfo | None = None
    cuts: dict[str, Cut] = field(default_factory=dict)

    def allocate(self, num_blocks: int, block_size: int, device: Allocator) -> list[Cache]:
        """Zeroed caches of its layers, of `num_blocks` blocks of `block_size` tokens each."""
        scales = self.kv_scales[self.model.first_layer :]
        return allocate_caches(self.kv_shapes, num_blocks, block_size, device, scales)

    @property
    def is_stack(self) -> bool:
        """True if its layers run as the stack of a `Network`."""
        return self.model.network is not None

    @property
    def road(self) -> Road:
        """How its layers run."""
        return self.model.base.road
