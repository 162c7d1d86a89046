"""Which tensors of a dense checkpoint are the matrices of linear layers, by the module that runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pagewire.ipc.files.model_configs import read_foreign
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.checkpoint.conversion import Conversion, conversions
from pagewire.workers.checkpoint.formats.online import ROUTERS
from pagewire.workers.checkpoint.mapped import MappedCheckpoint
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.module.configuration import load_config
from pagewire.workers.module.matrices import is_experts
from pagewire.workers.network.build_module import module_on_meta

STACKS = ("gate_up_proj", "up_proj", "down_proj")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Linears:
    """The tensors of a checkpoint that are quantised, and the modules that are not."""

    chosen: frozenset[str]
    """Names of tensors [N, K], as they lie in the checkpoint."""
    ignored: frozenset[str]
    """Names of other modules with a matrix, such as embeddings and the output layer."""


def find_linears(folder: Path, checkpoint: Checkpoint) -> Linears:
    """The linear layers of a model, but for its output layer and what chooses among experts.

    Raises:
        ValueError: the model is not served, the checkpoint does not fit it, or it has no such layer.
    """
    worker_config = WorkerConfig(str(folder))
    causal = module_on_meta(worker_config, load_config(worker_config), torch.float32)
    foreign = read_foreign(folder, trust_remote_code=False)
    source = checkpoint if foreign is None else MappedCheckpoint(checkpoint, foreign)
    found, _ = conversions(causal, source.names, source.on_meta)
    places = {} if foreign is None else foreign.excerpts(checkpoint.names)
    output = causal.get_output_embeddings()
    chosen: set[str] = set()
    ignored: set[str] = set()
    for name, module in causal.named_modules():
        if module is output:
            ignored.add(name)
        elif type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS:
            chosen.update(source for source, _ in found[f"{name}.weight"].sources)
        elif is_experts(module):
            chosen.update(_experts(name, module, found))
    chosen = {places[name].tensor if name in places else name for name in chosen}
    for name in checkpoint.names:
        tensor = checkpoint.on_meta(name)
        if name.endswith(".weight") and tensor.dim() == 2 and name not in chosen:
            ignored.add(name.removesuffix(".weight"))
        elif name in chosen and (tensor.dim() != 2 or tensor.dtype not in FLOATS):
            raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, not a matrix of floats")
    if not chosen:
        raise ValueError("the model has no linear layers that could be quantised")
    return Linears(frozenset(chosen), frozenset(ignored))


def _experts(name: str, module: nn.Module, found: dict[str, Conversion]) -> set[str]:
    """The tensors of a module of experts.

    Raises:
        ValueError: they lie in one tensor, for which compressed-tensors has no form that is read everywhere.
    """
    names: set[str] = set()
    for stack in (stack for stack in STACKS if hasattr(module, stack)):
        if (members := found[f"{name}.{stack}"].members()) is None:
            raise ValueError(
                f"{name} holds its experts in one tensor, which is not quantised here; "
                "quantise the model while it is loaded: --quantization int8 or int4"
            )
        names.update(tensor for member in members for tensor in member)
    return names
