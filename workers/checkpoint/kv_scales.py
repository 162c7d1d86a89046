"""Scales of keys and values for a KV cache of 8-bit floats, from the configuration or the checkpoint.

Quantisers write them beside the attention's weights: `k_scale` and `v_scale`, or one `kv_scale` for both, in the
attention itself, in a module of its own, or in `k_proj` and `v_proj`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.paging import KVScales
from pagewire.workers.checkpoint.headers import INDEX, SINGLE
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError

logger = logging.getLogger("pagewire.worker")

NAME = re.compile(r"\.(\d+)\.(?:self_attn|attention)\.(?:\w+\.)?(k_scale|v_scale|kv_scale)$")
"""The end of the name of a checkpoint's scale: its layer, and what it is of."""


def kv_scales(config: WorkerConfig, kv_dtype: torch.dtype, num_layers: int) -> list[KVScales]:
    """The scales of each layer; empty if all are 1.

    Raises:
        LoadError: scales are given for a KV cache that takes none, or for another number of layers; the checkpoint
            has them for some layers only, or they are no numbers above 0.
    """
    if kv_dtype != torch.float8_e4m3fn:
        if config.kv_scales:
            raise LoadError(f"quantization_param_path is for a KV cache of fp8 (e4m3), not of {kv_dtype}")
        return []
    if config.kv_scales:
        if len(config.kv_scales) != num_layers:
            raise LoadError(f"{len(config.kv_scales)} scaling factors for {num_layers} layers")
        return [KVScales(factor, factor) for factor in config.kv_scales]
    if not any((Path(config.model_path) / name).is_file() for name in (INDEX, SINGLE)):
        return []
    return scales_of(Checkpoint(config.model_path), num_layers)


def scales_of(checkpoint: Checkpoint, num_layers: int) -> list[KVScales]:
    """The scales in a checkpoint; empty if there are none. Raises LoadError as `kv_scales`."""
    found: dict[int, dict[str, float]] = {}
    for name, layer, kind in _names(checkpoint.names):
        scale = checkpoint.read(name)
        if scale.numel() != 1 or not 0 < float(scale) < math.inf:
            raise LoadError(f"{name} of the checkpoint is not one number above 0")
        found.setdefault(layer, {})[kind] = float(scale)
    if not found:
        return []
    scales = [_pair(found.get(layer, {}), layer) for layer in range(num_layers)]
    least, most = min(map(min, scales)), max(map(max, scales))
    logger.info("the KV cache has the checkpoint's scales, %.3g to %.3g", least, most)
    return scales


def _names(names: Iterable[str]) -> Iterable[tuple[str, int, str]]:
    for name in names:
        if match := NAME.search(name):
            yield name, int(match[1]), match[2]


def _pair(found: Mapping[str, float], layer: int) -> KVScales:
    k, v = (found.get(kind, found.get("kv_scale")) for kind in ("k_scale", "v_scale"))
    if k is None or v is None:
        raise LoadError(f"the checkpoint has scales of keys and values, but not for layer {layer}")
    return KVScales(k, v)
