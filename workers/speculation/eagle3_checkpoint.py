"""Reads the checkpoint of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import torch
from torch import Tensor

from pagewire.ipc.files.hub import read_json
from pagewire.kernels.data.joining import joined
from pagewire.kernels.data.layer import Activation
from pagewire.kernels.data.weight import Linear, dense_weight
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.module.products import packed
from pagewire.workers.module.shards import Cut, own_part
from pagewire.workers.module.weights import Quantise
from pagewire.workers.network.structures import SWIGLU
from pagewire.workers.ranks.shares import Heads
from pagewire.workers.speculation.eagle3_division import (
    KEY_VALUE,
    LOGITS,
    NARROW,
    OUT,
    QUERY,
    WIDE,
    EagleDivision,
)

LAYER_NAMES = ("midlayer.", "layers.0.")
"""How checkpoints call the layer."""


Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class EagleConfig(msgspec.Struct):
    """The part `eagle_config` of a config.json.

    eagle_aux_hidden_state_layer_ids: the layers after which states of the model are taken, counted from 0.
    """

    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class EagleSettings(msgspec.Struct):
    """The config.json of an EAGLE-3 head. draft_vocab_size: entries of its logits; None: as many as tokens.

    norm_before_residual: the layer adds to the normed state.
    """

    hidden_size: Size
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    draft_vocab_size: Size | None = None
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    norm_before_residual: bool = False
    eagle_config: EagleConfig = msgspec.field(default_factory=EagleConfig)

    @classmethod
    def read(cls, folder: str) -> EagleSettings:
        """Those of a checkpoint.

        Raises:
            LoadError: it is of another form, or of a head that is not served.
        """
        try:
            settings = msgspec.convert(read_json(Path(folder) / "config.json"), cls)
        except (OSError, ValueError) as error:
            raise LoadError(f"config.json of the EAGLE-3 head {folder} cannot be used: {error}") from error
        if settings.num_hidden_layers != 1 or settings.hidden_act not in SWIGLU:
            raise LoadError(
                f"the EAGLE-3 head {folder} has {settings.num_hidden_layers} layers and the activation "
                f"{settings.hidden_act!r}; served are one layer, and {', '.join(SWIGLU)}"
            )
        return settings

    @property
    def activation(self) -> Activation:
        """Of the feed-forward half."""
        return SWIGLU[self.hidden_act]

    @property
    def heads(self) -> Heads:
        """Its attention heads."""
        return Heads(self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads)

    @property
    def size_of_head(self) -> int:
        """Numbers of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """The shapes [N, K] of the products, by name. hidden_size: of the model."""
        size, width = self.hidden_size, self.num_attention_heads * self.size_of_head
        return {
            "fc": (size, 3 * hidden_size),
            "qkv": (width + 2 * self.heads.num_kv * self.size_of_head, 2 * size),
            "out": (size, width),
            "head": (self.draft_vocab_size or self.vocab_size, size),
        }

    def places(self, num_layers: int) -> list[int]:
        """The numbers of the model's layers after which its states are taken.

        Raises:
            LoadError: the model has too few layers, or the checkpoint names other ones than it has.
        """
        named = self.eagle_config.eagle_aux_hidden_state_layer_ids
        found = [2, num_layers // 2, num_layers - 3] if named is None else [i + 1 for i in named]
        if len(found) != 3 or not all(0 < place < num_layers for place in found):
            raise LoadError(
                f"an EAGLE-3 head takes states after the layers {', '.join(map(str, found))}, and the model has "
                f"{num_layers}: it was made for another model"
            )
        return found


@dataclass(frozen=True)
class EagleLayer:
    """The weights of a head, in the model's dtype, or the part of them that a rank has.

    Norms are [H]; products are packed.

    embedding: [V, H]; None: the model's own. target_ids: int64, the token of each logit; None: in order.
    """

    fc: Linear
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    head: Linear
    input_norm: Tensor
    hidden_norm: Tensor
    attention_norm: Tensor
    norm: Tensor
    embedding: Tensor | None
    target_ids: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        parts = [part for part in vars(self).values() if part is not None]
        return sum(part.nbytes if isinstance(part, Tensor) else part.num_bytes for part in parts)


def read_layer(
    folder: str,
    dtype: torch.dtype,
    device: torch.device,
    quantise: Quantise,
    shapes: Mapping[str, tuple[int, int]],
    division: EagleDivision,
) -> EagleLayer:
    """The weights of a head, or a rank's part of them.

    dtype: of the model. quantise: applied to matrices before they are packed. shapes: of products, by name.

    Raises:
        LoadError: weights are missing, have another shape, or do not fit each other.
    """
    reader = _Reader(folder, Checkpoint(folder), dtype, device, quantise, shapes, division)
    try:
        return reader.layer()
    except LoadError:
        raise
    except KeyError as error:
        raise LoadError(f"the EAGLE-3 head {folder} lacks the weight {error.args[0]}") from error
    except (ValueError, RuntimeError) as error:
        raise LoadError(
            f"the weights of the EAGLE-3 head {folder} do not fit: {first_line(error)}"
        ) from error


class _Reader:
    """Reads the parts of a layer; `KeyError` names one that is missing."""

    def __init__(
        self,
        folder: str,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quantise: Quantise,
        shapes: Mapping[str, tuple[int, int]],
        division: EagleDivision,
    ) -> None:
        self._folder, self._checkpoint, self._dtype, self._device = folder, checkpoint, dtype, device
        self._quantise, self._shapes, self._division = quantise, shapes, division
        self._names = {_own_name(name): name for name in checkpoint.names}

    def layer(self) -> EagleLayer:
        """All of them."""
        embedding = self._vector("embed_tokens") if "embed_tokens.weight" in self._names else None
        target_ids = None
        if "d2t" in self._names:
            offsets = self._tensor("d2t").long()
            target_ids = (offsets + torch.arange(len(offsets))).to(self._device)
        return EagleLayer(
            fc=self._product("fc", "fc"),
            qkv=self._product("qkv", QUERY, *KEY_VALUE),
            out=self._product("out", OUT),
            gate_up=self._product("gate_up", *WIDE),
            down=self._product("down", NARROW),
            head=self._product("head", LOGITS),
            input_norm=self._vector("input_layernorm"),
            hidden_norm=self._vector("hidden_norm"),
            attention_norm=self._vector("post_attention_layernorm"),
            norm=self._vector("norm"),
            embedding=embedding,
            target_ids=target_ids,
        )

    def _tensor(self, name: str) -> Tensor:
        return self._checkpoint.read(self._names[name])

    def _vector(self, name: str) -> Tensor:
        return self._tensor(f"{name}.weight").to(self._device, self._dtype)

    def _product(self, name: str, *parts: str) -> Linear:
        """The product with matrices one below the other, or this rank's part of it."""
        whole = [dense_weight(self._tensor(f"{part}.weight"), self._dtype) for part in parts]
        found = sum(matrix.shape[0] for matrix in whole), whole[0].shape[1]
        if found != (shape := self._shapes.get(name, found)):
            raise LoadError(
                f"{name} of the EAGLE-3 head {self._folder} has the shape {found}, not {shape}: it was made for "
                "another model"
            )
        cuts = [self._division.cut(part, matrix.shape) for part, matrix in zip(parts, whole, strict=True)]
        own = [
            own_part(matrix, cut, partial(self._quantise, f"layers.0.{part}"))
            for part, matrix, cut in zip(parts, whole, cuts, strict=True)
        ]
        biases = [
            bias
            for part, cut in zip(parts, cuts, strict=True)
            if f"{part}.bias" in self._names and (bias := self._bias(part, cut)) is not None
        ]
        product = packed(joined(own), torch.cat(biases) if biases else None, self._device)
        return self._division.over_ranks(product, parts[0], cuts[0])

    def _bias(self, part: str, cut: Cut | None) -> Tensor | None:
        """This rank's part of a bias; None if another rank adds it."""
        bias = self._tensor(f"{part}.bias")
        return bias if cut is None else cut.vector(bias)


def _own_name(name: str) -> str:
    """A weight's name without what only some checkpoints put before it."""
    for prefix in ("model.", *LAYER_NAMES):
        name = name.removeprefix(prefix)
    return name
