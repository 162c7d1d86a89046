"""The part of a model that encodes pictures or sound: transformers' own module, without the layers for text.

features of the processor -> get_image_features or get_audio_features -> embeddings [n, E], laid over its places
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.ipc.families.media import FAMILIES, MediaFamily
from pagewire.ipc.wire.codec import Tensor as PlainTensor
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.media.encoders import ENCODERS
from pagewire.workers.media.slices import LayerGate, SlicedPass, cut_layers
from pagewire.workers.module.configuration import layer_windows, load_config, resolve_dtype
from pagewire.workers.module.text_base import base_path
from pagewire.workers.network.build_module import build_module
from pagewire.workers.network.encoder_layers import EncoderLayer, compile_layers

logger = logging.getLogger("pagewire.worker")

PROBED = (11, 29, 53)
"""Positions of time, height and width that differ in the angles of every frequency."""


@dataclass(frozen=True)
class EncodedMedium:
    """What the encoder has made of a medium.

    rows: [n, E], one for each place. deep: [n, E] for each of the first layers, added to its result (Qwen3-VL).
    error: why there is nothing; empty otherwise.
    """

    rows: Tensor
    deep: Sequence[Tensor] = ()
    error: str = ""


@dataclass
class Tower:
    """A wrapper of transformers, whose `get_image_features` or `get_audio_features` runs.

    module: the wrapper, filled but for its layers for text; None: this rank is on a later stage, and only counts
    positions. place_ids: by kind, the token whose place takes an embedding. axes: see `axes_of`; None: tokens have
    one position. is_part: the model is divided into stages. gate: stands before the layers.
    """

    family: MediaFamily
    module: Any
    wrapper: Any
    place_ids: Mapping[str, int]
    device: torch.device
    dtype: torch.dtype
    axes: Tensor | None = None
    num_bytes: int = 0
    is_part: bool = False
    gate: LayerGate = field(default_factory=lambda: LayerGate([]))
    _accepts: dict[str, set[str]] = field(default_factory=dict, init=False)

    def sliced(self, kind: str, features: Mapping[str, PlainTensor]) -> SlicedPass[EncodedMedium]:
        """A pass over a medium that runs in slices; it makes what `encode` makes."""
        return SlicedPass(partial(self.encode, kind, features), self.gate, self.device)

    @torch.inference_mode()
    def encode(self, kind: str, features: Mapping[str, PlainTensor]) -> EncodedMedium:
        """The embeddings of a medium; a medium that the module cannot take gives an error, not an exception."""
        try:
            return self._encode(kind, features)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            logger.warning("the encoder of media has failed: %s", error, exc_info=True)
            return EncodedMedium(
                torch.empty(0), error=f"the model cannot encode this {kind}: {first_line(error)}"
            )

    def _encode(self, kind: str, features: Mapping[str, PlainTensor]) -> EncodedMedium:
        own = ENCODERS.get((type(self.module).__name__, kind))
        run = getattr(self.module, f"get_{kind}_features") if own is None else partial(own, self.module)
        names = self._accepts.setdefault(kind, set(inspect.signature(inspect.unwrap(run)).parameters))
        given = {name: self._taken(value) for name, value in features.items() if name in names}
        found = run(**given) if own is not None else run(**given, return_dict=True)
        deep = [joined(part) for part in getattr(found, "deepstack_features", None) or ()]
        return EncodedMedium(joined(found.pooler_output), deep)

    def _taken(self, feature: PlainTensor) -> Tensor:
        """A feature as the module takes it, on the device; floating-point numbers in the module's dtype."""
        dtype = getattr(torch, feature.dtype)
        tensor = torch.frombuffer(bytearray(feature.data), dtype=dtype).view(feature.shape)
        return tensor.to(self.device, self.dtype if dtype.is_floating_point else dtype)

    def positions(self, token_ids: Sequence[int], grids: Sequence[Tensor]) -> Tensor:
        """Positions int64 [3, T] of a prompt's tokens. grids: int64 [n, 3] of each picture."""
        ids = torch.tensor([list(token_ids)])
        types = (ids == self.place_ids["image"]).int()
        positions, _ = self.wrapper.get_rope_index(
            ids, types, image_grid_thw=torch.cat(list(grids)) if grids else None
        )
        found: Tensor = positions[:, 0].long()
        return found


def joined(parts: Any) -> Tensor:
    """Embeddings [n, E] of one medium, which may come as several parts, or with further dimensions."""
    whole = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    return whole.contiguous()


def load_tower(config: WorkerConfig, device: Device) -> Tower | None:
    """The tower of a model; None, with a warning in the log, where this device cannot run what media need.

    Raises:
        LoadError: the model takes no media, or its weights are missing.
    """
    own = load_config(config)
    family = FAMILIES.get(own.model_type)
    if family is None or family.refused:
        raise LoadError(f"{own.model_type} takes no media")
    dtype = resolve_dtype(config, own)
    if family.whole and (reason := against_two_ways(own, device)):
        logger.warning("%s is served for text only: %s", own.model_type, reason)
        return None
    weights = build_module(config, own, dtype, device)
    causal = weights.causal
    path = base_path(causal)
    wrapper = causal.get_submodule(path.rpartition(".")[0]) if "." in path else causal.get_submodule(path)
    axes = axes_of(causal.get_submodule(path)) if family.positions else None
    is_first = config.parallel.stage == 0
    without_layers(causal, path, wrapper)
    layers = []
    if is_first:
        layers = compile_layers(wrapper, weights, device.torch_device)
        weights.fill(wrapper)
        wrapper.to(device.torch_device)
        set_attention(wrapper)
    return Tower(
        family,
        wrapper if is_first else None,
        wrapper,
        place_ids(own, family),
        device.torch_device,
        dtype,
        axes,
        num_bytes_of(wrapper, layers) if is_first else 0,
        config.parallel.stages > 1,
        cut_layers(wrapper),
    )


def num_bytes_of(wrapper: nn.Module, layers: Sequence[EncoderLayer]) -> int:
    """Bytes of a tower's weights. layers: whose modules are replaced."""
    own = sum(parameter.nbytes for parameter in wrapper.parameters() if parameter.device.type != "meta")
    return own + sum(layer.num_bytes for layer in layers)


def against_two_ways(config: Any, device: Device) -> str:
    """Why the parts of a picture cannot attend to each other both ways; empty if they can."""
    if device.torch_device.type != "cpu":
        return "the parts of a picture see each other, which the kernels of GPUs cannot do beside text yet"
    size = int(getattr(config, "mm_tokens_per_image", 0))
    windows = [width for _, width in filter(None, layer_windows(config))]
    if windows and min(windows) < size:
        return f"a picture of {size} tokens is longer than the attention window of {min(windows)} tokens"
    return ""


def set_attention(wrapper: Any) -> None:
    """Let the tower's attention be the fastest that its module has."""
    try:
        wrapper.set_attn_implementation("sdpa")
    except ValueError:
        wrapper.set_attn_implementation("eager")


def without_layers(causal: Any, path: str, wrapper: Any) -> None:
    """Drop the layers for text, and the output layer. path: of the base model for text."""
    text = causal.get_submodule(path)
    if text is wrapper:  # Chameleon's has no part of its own for text
        wrapper.layers, wrapper.norm = nn.ModuleList(), nn.Identity()
        return
    setattr(wrapper, path.rpartition(".")[2], nn.Identity())


def place_ids(config: Any, family: MediaFamily) -> dict[str, int]:
    """By kind, the token whose place takes an embedding."""
    return {kind: int(getattr(config, f"{kind}_token_id")) for kind in family.kinds}


def axes_of(base: Any) -> Tensor:
    """Which of a token's three positions turns each element of a head: int64 [rot_dim], 0 to 2.

    The rotary module says so: of a token whose positions differ, each element has the angle of one of them.

    Raises:
        LoadError: it has the angle of none.
    """
    rotary = base.rotary_emb
    like = torch.empty(1, 1, 1)
    alone = [rotary(like, torch.full((3, 1, 1), p)) for p in PROBED]
    mixed = rotary(like, torch.tensor(PROBED)[:, None, None])
    equal = torch.stack([(cos == mixed[0]) & (sin == mixed[1]) for cos, sin in alone])[:, 0, 0]
    if not bool(equal.any(0).all()):
        raise LoadError("its rotary angles are not those of a position of time, height or width")
    return equal.int().argmax(0)
