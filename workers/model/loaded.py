"""A model that is loaded, and how long the phases of loading it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pagewire.kernels.paging import KVScales
from pagewire.workers.model.attention import KVShape
from pagewire.workers.model.model import Model
from pagewire.workers.model.pooler import Pooler
from pagewire.workers.model.shards import Cut
from pagewire.workers.model.stack import DecoderStack


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

    kv_scales: see `StepContext`. kv_shapes: of each layer; empty for an encoder.
    pooler: of a model that pools; None: it generates.
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
    pooler: Pooler | None = None
    cuts: dict[str, Cut] = field(default_factory=dict)

    @property
    def is_stack(self) -> bool:
        """True if its layers run as a `DecoderStack`."""
        return isinstance(self.model.base, DecoderStack)
