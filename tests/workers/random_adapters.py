"""Small random adapters of a tiny Llama, in PEFT's format, without PEFT."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewire.ipc.wire.lora import AdapterLoaded, LoadAdapter
from pagewire.workers.adapters.files import TENSORS
from pagewire.workers.adapters.interface import WorkerAdapters

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (64, 64), DOWN: (64, 100)}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"],
    "base_model_name_or_path": "some/llama",
}
Tensors = dict[str, Tensor]


def make_tensors(seed: int = 0, shapes: Mapping[str, tuple[int, int]] = SHAPES, rank: int = 4) -> Tensors:
    """Random matrices for modules of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (num_out, num_in) in shapes.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator)
    return tensors


def write(folder: Path, config: Mapping[str, Any] = CONFIG, tensors: Tensors | None = None) -> Path:
    """An adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = make_tensors() if tensors is None else tensors
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / TENSORS)
    return folder


def load(adapters: WorkerAdapters, order: LoadAdapter, awake: threading.Event) -> AdapterLoaded:
    """Load an adapter as a worker without steps does. awake: set by `wake` of the runner."""
    adapters.load(order)
    while not (messages := adapters.finished()):
        if not adapters.advance():
            assert awake.wait(60)
            awake.clear()
    (message,) = messages
    return message
