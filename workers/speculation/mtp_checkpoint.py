"""Reads the multi-token-prediction (MTP) layers of the checkpoint that is served.

A layer is a decoder layer of the model's own class with a few parts beside, all of them under its number. So the
model is built once more with a few layers more, without memory, and of these its last ones alone are read: renamed,
stacked, dequantised and packed as those of the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from pagewire.ipc.gguf.file import is_gguf
from pagewire.ipc.host.heap import release_spare_memory
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu.memory import forget_mapped_files
from pagewire.kernels.linear import multiplies_floats
from pagewire.workers.checkpoint.headers import WITHOUT_HEADERS
from pagewire.workers.checkpoint.mtp_layers import mtp_prefixes
from pagewire.workers.checkpoint.source import WeightSource
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.module import attention
from pagewire.workers.module.configuration import load_config
from pagewire.workers.module.parallel_layers import fit_modules
from pagewire.workers.module.shards import Shards
from pagewire.workers.module.transforms import tabulate_rotary
from pagewire.workers.module.weights import CheckpointWeights
from pagewire.workers.network.build_module import (
    module_on_meta,
    quantisation,
    read_by_transformers,
    weight_source,
)
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.parts import module_bytes, transform_parts
from pagewire.workers.ranks.agreement import own_turn
from pagewire.workers.ranks.interface import Collective

SERVED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
OTHER_LAYOUTS = ("ernie4_5_moe", "mimo_v2_flash", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types that are served, with MTP layers that lie elsewhere in the checkpoint and have other parts."""
INSTEAD = "take the method 'ngram', 'suffix' or 'draft_model'"


class MtpLayers(NamedTuple):
    """The layers, packed on a device.

    layers: transformers' decoder layers, with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm` as further parts;
        and with `embed_tokens` and `shared_head.head` where these are not the model's.
    rotary: the module of their angles. first: the number of the first of them. num_bytes: of all weights.
    """

    layers: list[Any]
    rotary: nn.Module
    first: int
    num_bytes: int


@torch.inference_mode()
def read_layers(
    worker_config: WorkerConfig, target: LoadedModel, device: Device, collective: Collective
) -> MtpLayers:
    """The MTP layers of the model that is served, or a rank's part of them.

    collective: of the ranks that divide the model.

    Raises:
        LoadError: there are none, weights are missing or broken, or they cannot be read from such a checkpoint.
    """
    config = load_config(worker_config)
    check(worker_config, config)
    first, count = config.num_hidden_layers, num_layers(config)
    larger = load_config(_with_layers(worker_config, config, count))
    try:
        keeps_floats = multiplies_floats(target.dtype, device.torch_device)
        form, quantise = quantisation(worker_config, larger, keeps_floats)
        source = weight_source(worker_config, larger, form, keeps_floats)
        names = list(source.names)
        causal = module_on_meta(worker_config, larger, target.dtype)
        prefixes = [f"{causal.base_model_prefix}.layers.{first + i}." for i in range(count)]
        check_present(prefixes, names)
        own = [name for name in names if name.startswith(tuple(prefixes))]
        own = [name for name in own if not is_copy(name, source, names, target.dtype)]
        shards = None if collective.size == 1 else Shards(causal, collective)
        layers = _parts_alone(causal, first)
        for layer, prefix in zip(layers, prefixes, strict=True):
            _add_parts(layer, prefix, own, larger, target.dtype)
        weights = CheckpointWeights(causal, source, target.dtype, quantise, names=own)
    except LoadError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        text = f"the multi-token-prediction layers of {worker_config.model_path} cannot be read"
        raise LoadError(f"{text}: {first_line(error)}") from error
    attention.register()
    causal.set_attn_implementation(attention.NAME)
    base = getattr(causal, causal.base_model_prefix)
    if shards is not None:
        shards.keep_only(tuple(prefixes))
        weights.divide(shards)
        fit_modules(base, causal.base_model_prefix, shards)
    base.rotary_emb.to(device.torch_device)
    tabulate_rotary(base, target.max_model_len)
    with own_turn(collective, worker_config.parallel):
        for layer in layers:
            transform_parts(layer, weights, device.torch_device)
    forget_mapped_files(worker_config.model_path)
    release_spare_memory()
    return MtpLayers(layers, base.rotary_emb, first, module_bytes(layers))


def num_layers(config: Any) -> int:
    """The number of MTP layers by a model's configuration."""
    count = getattr(config, "num_nextn_predict_layers", None)
    return count if isinstance(count, int) else 0


def check(worker_config: WorkerConfig, config: Any) -> None:
    """Refuse models and checkpoints whose MTP layers are not served.

    Raises:
        LoadError: says why, and what works instead.
    """
    kind, reason = config.get_text_config().model_type, None
    if kind not in SERVED:
        why = "its checkpoints hold them in another layout; " if kind in OTHER_LAYOUTS else ""
        raise LoadError(
            f"the multi-token-prediction layers of {kind} are not served: {why}those of {', '.join(SERVED)} are; "
            f"{INSTEAD}"
        )
    if num_layers(config) < 1:
        reason = "its config.json names none (num_nextn_predict_layers)"
    elif is_gguf(worker_config.model_path):
        reason = "GGUF files are read without them"
    elif worker_config.load_format in WITHOUT_HEADERS:
        reason = f"load_format is {worker_config.load_format!r}"
    else:
        reason = read_by_transformers(worker_config, config)
    if reason is not None:
        raise LoadError(f"no multi-token-prediction layers are read, since {reason}: {INSTEAD}")


def check_present(prefixes: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a checkpoint without the layers that its configuration names: some are quantised without them.

    Raises:
        LoadError: says which are missing.
    """
    found = mtp_prefixes(names)
    if missing := [prefix for prefix in prefixes if prefix not in found]:
        raise LoadError(
            "the checkpoint lacks the multi-token-prediction layers that its config.json names "
            f"({', '.join(f'{prefix}*' for prefix in missing)}): {INSTEAD}"
        )


def is_copy(name: str, source: WeightSource, names: Sequence[str], dtype: torch.dtype) -> bool:
    """True for an embedding or output layer of an MTP layer that is, to the bit, the model's own."""
    originals: tuple[str, ...]
    if name.endswith(".shared_head.head.weight"):
        originals = ("lm_head.weight", "model.embed_tokens.weight")  # the second one where they are tied
    elif name.endswith(".embed_tokens.weight"):
        originals = ("model.embed_tokens.weight",)
    else:
        return False
    original = next((full for full in originals if full in names), None)
    if original is None:
        return False
    one, other = source.weight(name, dtype), source.weight(original, dtype)
    same = one.scheme == other.scheme and [part.shape for part in one.parts] == [p.shape for p in other.parts]
    same = same and all(torch.equal(*parts) for parts in zip(one.parts, other.parts, strict=True))
    source.let_go()
    return same


def _with_layers(worker_config: WorkerConfig, config: Any, count: int) -> WorkerConfig:
    """The configuration with `count` further layers, all of which have experts if the model has any."""
    changes: dict[str, Any] = {"num_hidden_layers": config.num_hidden_layers + count}
    if (kinds := getattr(config, "mlp_layer_types", None)) is not None:
        changes["mlp_layer_types"] = [*kinds, *["sparse"] * count]
    return msgspec.structs.replace(worker_config, hf_overrides={**worker_config.hf_overrides, **changes})


def _parts_alone(causal: Any, first: int) -> list[Any]:
    """The layers of a module from this number on, all else but the rotary module being dropped."""
    base = getattr(causal, causal.base_model_prefix)
    for name, child in list(causal.named_children()):
        if child is not base:
            setattr(causal, name, nn.Identity())
    for name, _ in list(base.named_children()):
        if name not in ("layers", "rotary_emb"):
            setattr(base, name, nn.Identity())
    for index in range(first):
        base.layers[index] = nn.Identity()
    return list(base.layers[first:])


def _add_parts(layer: Any, prefix: str, names: Iterable[str], config: Any, dtype: torch.dtype) -> None:
    """Add the parts that an MTP layer has beside those of a decoder layer, without memory."""
    size, vocab_size = config.hidden_size, config.vocab_size
    norm, eps = type(layer.input_layernorm), config.rms_norm_eps
    with torch.device("meta"):
        layer.shared_head = nn.Module()
        for part, name in ((layer, "enorm"), (layer, "hnorm"), (layer.shared_head, "norm")):
            setattr(part, name, norm(size, eps=eps).to(dtype))
        layer.eh_proj = nn.Linear(2 * size, size, bias=False, dtype=dtype)
        if f"{prefix}shared_head.head.weight" in names:
            layer.shared_head.head = nn.Linear(size, vocab_size, bias=False, dtype=dtype)
        if f"{prefix}embed_tokens.weight" in names:
            layer.embed_tokens = nn.Embedding(vocab_size, size, dtype=dtype)
