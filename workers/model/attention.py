"""Attention of a Hugging Face module over the paged KV cache.

`attend` is registered in transformers' `AttentionInterface` under `NAME`; the step's metadata reaches it as the
keyword argument `paged` of the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.attention import AttentionBatch, kv_block_bytes, paged_attention, store_kv
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError

NAME = "pagewire"


@dataclass(frozen=True)
class KVShape:
    """The KV cache of one layer, per token."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens."""
        return kv_block_bytes(self.num_kv_heads, block_size, self.head_dim, self.v_head_dim, self.dtype)

    def allocate(self, num_blocks: int, block_size: int, device: Device) -> tuple[Tensor, Tensor]:
        """K and V, zeroed."""
        shape = (num_blocks, self.num_kv_heads, block_size)
        return device.zeros((*shape, self.head_dim), self.dtype), device.zeros(
            (*shape, self.v_head_dim), self.dtype
        )


class StepContext:
    """One step's attention: which tokens, and the layers' caches they go to."""

    __slots__ = ("batch", "caches")

    def __init__(self, batch: AttentionBatch, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.batch, self.caches = batch, caches

    def cache(self, layer: int, shape: KVShape, window: int | None) -> tuple[Tensor, Tensor]:
        """K and V of a layer of this shape, whose queries see `window` keys."""
        return self.caches[layer]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] of a layer, then q [T, Hq, D] looks: [T, Hq, Dv]."""
        shape = KVShape(k.shape[1], k.shape[2], v.shape[2], v.dtype)
        k_cache, v_cache = self.cache(layer, shape, window)
        store_kv(k, v, k_cache, v_cache, self.batch.slot_mapping)
        return paged_attention(
            q, k_cache, v_cache, self.batch, scale, window=window, softcap=softcap, sinks=sinks
        )


@dataclass
class DryRunRecorder:
    """What a dry run learns: each layer's cache, and how often and with which window it was called."""

    num_blocks: int
    block_size: int
    device: Device
    shapes: dict[int, KVShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    num_calls: dict[int, int] = field(default_factory=dict)
    caches: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def step(self, batch: AttentionBatch) -> StepContext:
        """A step that is recorded here."""
        return _RecordingContext(batch, self)


class _RecordingContext(StepContext):
    __slots__ = ("recorder",)

    def __init__(self, batch: AttentionBatch, recorder: DryRunRecorder) -> None:
        super().__init__(batch, recorder.caches)  # type: ignore[arg-type]
        self.recorder = recorder

    def cache(self, layer: int, shape: KVShape, window: int | None) -> tuple[Tensor, Tensor]:
        recorder = self.recorder
        if layer not in recorder.shapes:
            recorder.shapes[layer] = shape
            recorder.caches[layer] = shape.allocate(recorder.num_blocks, recorder.block_size, recorder.device)
        recorder.windows[layer] = window
        recorder.num_calls[layer] = recorder.num_calls.get(layer, 0) + 1
        return super().cache(layer, shape, window)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged: StepContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] to [1, T, Hq, Dv].

    Raises:
        LoadError: the model does not hand keyword arguments down, or builds a mask of its own.
    """
    if paged is None:
        raise LoadError("its layers do not hand keyword arguments down to attention")
    if attention_mask is not None:
        raise LoadError("it builds its own attention mask or bias")
    if len(query) != 1:
        raise LoadError("it runs attention over several batches at once")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if not q.dtype == k.dtype == v.dtype:  # norms of some models leave queries and keys in float32
        q, k = q.to(v.dtype), k.to(v.dtype)
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer: Any = module.layer_idx
    return paged.attend(layer, q, k, v, scale, window=sliding_window, softcap=softcap, sinks=s_aux)[
        None
    ], None


def register() -> None:
    """Make `attend` known to transformers under `NAME`; no mask is made for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
