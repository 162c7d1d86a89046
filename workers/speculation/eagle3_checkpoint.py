"""Reads the checkpoint of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import torch
from torch import Tensor

from pagewire.ipc.hub import read_json
from pagewire.kernels.decoder import Activation
from pagewire.kernels.joining import joined
from pagewire.kernels.weight import Linear, dense_weight
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.model.checkpoint import Checkpoint
from pagewire.workers.model.products import packed
from pagewire.workers.model.stack import ACTIVATION_NAMES
from pagewire.workers.model.weights import Quantise

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
        if settings.num_hidden_layers != 1 or settings.hidden_act not in ACTIVATION_NAMES:
            raise LoadError(
                f"the EAGLE-3 head {folder} has {settings.num_hidden_layers} layers and the activation "
                f"{settings.hidden_act!r}; served are one layer, and {', '.join(ACTIVATION_NAMES)}"
            )
        return settings

    @property
    def activation(self) -> Activation:
        """Of the feed-forward half."""
        return ACTIVATION_NAMES[self.hidden_act]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def size_of_head(self) -> int:
        """Numbers of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

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
    """The weights of a head, in the model's dtype. Norms are [H]; products are packed.

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


def read_layer(folder: str, dtype: torch.dtype, device: torch.device, quantise: Quantise) -> EagleLayer:
    """The weights of a head. dtype: of the model. quantise: applied to matrices before they are packed.

    Raises:
        LoadError: weights are missing, or do not fit each other.
    """
    checkpoint = Checkpoint(folder)
    names = {_own_name(name): name for name in checkpoint.names}

    def vector(name: str) -> Tensor:
        return checkpoint.read(names[f"{name}.weight"]).to(device, dtype)

    def product(*parts: str) -> Linear:
        matrices = [
            quantise(f"layers.0.{part}", dense_weight(checkpoint.read(names[f"{part}.weight"]), dtype))
            for part in parts
        ]
        biases = [checkpoint.read(names[f"{part}.bias"]) for part in parts if f"{part}.bias" in names]
        return packed(joined(matrices), torch.cat(biases) if biases else None, device)

    try:
        return _layer(vector, product, checkpoint, names, device)
    except KeyError as error:
        raise LoadError(f"the EAGLE-3 head {folder} lacks the weight {error.args[0]}") from error
    except (ValueError, RuntimeError) as error:
        raise LoadError(
            f"the weights of the EAGLE-3 head {folder} do not fit: {first_line(error)}"
        ) from error


def _own_name(name: str) -> str:
    """A weight's name without what only some checkpoints put before it."""
    for prefix in ("model.", *LAYER_NAMES):
        name = name.removeprefix(prefix)
    return name


def _layer(
    vector: Callable[[str], Tensor],
    product: Callable[..., Linear],
    checkpoint: Checkpoint,
    names: dict[str, str],
    device: torch.device,
) -> EagleLayer:
    target_ids = None
    if "d2t" in names:
        offsets = checkpoint.read(names["d2t"]).long()
        target_ids = (offsets + torch.arange(len(offsets))).to(device)
    return EagleLayer(
        fc=product("fc"),
        qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=product("self_attn.o_proj"),
        gate_up=product("mlp.gate_proj", "mlp.up_proj"),
        down=product("mlp.down_proj"),
        head=product("lm_head"),
        input_norm=vector("input_layernorm"),
        hidden_norm=vector("hidden_norm"),
        attention_norm=vector("post_attention_layernorm"),
        norm=vector("norm"),
        embedding=vector("embed_tokens") if "embed_tokens.weight" in names else None,
        target_ids=target_ids,
    )
