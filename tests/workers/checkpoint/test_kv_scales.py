"""Scales of keys and values: from the configuration, or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.paging import UNSCALED, KVScales
from pagewire.workers.caches.kv import KVShape, allocate_caches
from pagewire.workers.checkpoint.kv_scales import kv_scales
from pagewire.workers.device.cpu import CpuDevice
from pagewire.workers.errors import LoadError
from tests.workers.driver import load_runner

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ATTENTION = "model.layers.{}.self_attn.{}"


def written(folder: Path, **scales: float | list[float]) -> WorkerConfig:
    """A checkpoint of these scales: `k_scale_0` is that of layer 0's keys."""
    tensors = {}
    for name, value in scales.items():
        kind, _, layer = name.rpartition("_")
        tensors[ATTENTION.format(layer, kind.replace("__", "."))] = torch.tensor(value)
    save_file(tensors, folder / "model.safetensors")
    return WorkerConfig(str(folder))


def test_the_checkpoints_scales(tmp_path: Path) -> None:
    config = written(tmp_path, k_scale_0=0.5, v_scale_0=[0.25], attn__kv_scale_1=2.0)
    assert kv_scales(config, E4M3, 2) == [KVScales(0.5, 0.25), KVScales(2.0, 2.0)]
    assert kv_scales(config, E5M2, 2) == kv_scales(config, torch.int8, 2) == []
    proj = written(tmp_path, k_proj__k_scale_0=0.5, v_proj__v_scale_0=0.25)
    assert kv_scales(proj, E4M3, 1) == [KVScales(0.5, 0.25)]


def test_a_configurations_scales_come_first(tmp_path: Path) -> None:
    written(tmp_path, k_scale_0=0.5, v_scale_0=0.25)
    config = WorkerConfig(str(tmp_path), kv_scales=[0.75])
    assert kv_scales(config, E4M3, 1) == [KVScales(0.75, 0.75)]
    with pytest.raises(LoadError, match="1 scaling factors for 2 layers"):
        kv_scales(config, E4M3, 2)
    with pytest.raises(LoadError, match=r"fp8 \(e4m3\), not of torch.int8"):
        kv_scales(config, torch.int8, 1)


def test_layers_have_the_caches_and_scales_of_the_keys_that_they_read() -> None:
    shapes = [KVShape(1, 16, 16, E4M3, source) for source in (None, None, 0)]
    scales = [KVScales(float(layer), 1.0) for layer in range(4)]
    caches = allocate_caches(shapes, 2, 16, CpuDevice(), scales[1:])
    assert [cache.scales for cache in caches] == [scales[1], scales[2], scales[1]]
    assert caches[2] is caches[0] and caches[1] is not caches[0]
    assert allocate_caches(shapes[:1], 2, 16, CpuDevice())[0].scales == UNSCALED


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"k_scale_0": 0.5, "v_scale_0": 0.5}, "not for layer 1"),
        ({"k_scale_0": 0.5, "kv_scale_1": 0.5}, "not for layer 0"),
        (
            {"kv_scale_0": -1.0, "kv_scale_1": 0.5},
            r"layers.0.self_attn.kv_scale of the checkpoint is not one number",
        ),
        ({"kv_scale_0": 1.0, "kv_scale_1": float("nan")}, "not one number above 0"),
        ({"kv_scale_0": 1.0, "kv_scale_1": [0.5, 0.5]}, "not one number above 0"),
    ],
)
def test_scales_that_cannot_be_used(tmp_path: Path, scales: dict[str, float], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        kv_scales(written(tmp_path, **scales), E4M3, 2)


def test_no_scales_and_no_file(tmp_path: Path) -> None:
    assert kv_scales(WorkerConfig(str(tmp_path)), E4M3, 2) == []
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert kv_scales(WorkerConfig(str(tmp_path)), E4M3, 2) == []


def test_a_checkpoint_with_scales_loads_where_they_are_not_needed(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    scales = {
        ATTENTION.format(layer, kind): torch.tensor(0.5)
        for layer in (0, 1)
        for kind in ("k_scale", "v_scale")
    }
    save_file(tensors | scales, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert load_runner(tmp_path)[0].model.kv_scales == []
