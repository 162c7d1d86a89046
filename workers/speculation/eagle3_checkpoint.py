"""Reads the checkpoint of an EAGLE-3 head.

Its layer is one of Llama's whose queries, keys and values are made of two states. So a Llama of that one layer is
built without memory, filled from the checkpoint's tensors, divided over ranks and packed as any model is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from pagewire.ipc.files.hub import read_json
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.layer import Norm
from pagewire.kernels.data.weight import Linear, Weight
from pagewire.workers.checkpoint.source import Checkpoint, WeightSource
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.families.structures import ACTIVATIONS, OtherStructureError, rms_norm_of
from pagewire.workers.module.shards import Shards
from pagewire.workers.module.transforms import pack_joined, tabulate_rotary
from pagewire.workers.module.weights import CheckpointWeights, Quantise
from pagewire.workers.network.build import build_network
from pagewire.workers.network.build_module import module_on_meta
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.network import Network
from pagewire.workers.ranks.interface import Collective

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
        if settings.num_hidden_layers != 1 or settings.hidden_act not in ACTIVATIONS:
            raise LoadError(
                f"the EAGLE-3 head {folder} has {settings.num_hidden_layers} layers and the activation "
                f"{settings.hidden_act!r}; served are one layer, and {', '.join(ACTIVATIONS)}"
            )
        return settings

    def as_llama(self) -> dict[str, Any]:
        """What its configuration as a Llama of one layer has to say, besides what the file says."""
        return {
            "vocab_size": self.draft_vocab_size or self.vocab_size,
            "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "tie_word_embeddings": False,
            "pad_token_id": None,
            "sliding_window": None,
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
    """A head, or the part of it that a rank has.

    network: the layer; it has an embedding if the head has one of its own, and its `input_norm` is of embeddings.
    hidden_norm: of states. target_ids: int64, the token of each logit; None: in order.
    """

    fc: Linear
    hidden_norm: Norm
    network: Network
    head: Linear
    target_ids: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        words, ids = self.network.words, self.target_ids
        parts = (self.fc, self.hidden_norm, self.network, self.head)
        tensors = [tensor for tensor in (None if words is None else words.weight, ids) if tensor is not None]
        return sum(part.num_bytes for part in parts) + sum(tensor.nbytes for tensor in tensors)


class HeadSource(WeightSource):
    """The tensors of a head by the names of its module's parameters."""

    def __init__(self, checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
        """stored: the checkpoint's names by those of parameters."""
        super().__init__()
        self._checkpoint, self._stored = checkpoint, stored

    @property
    def names(self) -> Iterable[str]:
        """See `WeightSource.names`."""
        return self._stored.keys()

    def on_meta(self, name: str) -> Tensor:
        """See `WeightSource.on_meta`."""
        return self._checkpoint.on_meta(self._stored[name])

    def read(self, name: str) -> Tensor:
        """See `WeightSource.read`."""
        return self._checkpoint.read(self._stored[name])

    def let_go(self) -> None:
        """See `WeightSource.let_go`."""
        self._checkpoint.let_go()


@torch.inference_mode()
def read_layer(
    config: WorkerConfig,
    folder: str,
    settings: EagleSettings,
    target: LoadedModel,
    hidden_size: int,
    device: torch.device,
    quantise: Quantise,
    ranks: Collective,
) -> EagleLayer:
    """The head in a folder, or a rank's part of it.

    config, target, hidden_size: of the model. quantise: applied to matrices before they are packed.

    Raises:
        LoadError: weights are missing, have another shape, or do not fit each other.
        IndivisibleError: it cannot be divided over these ranks.
    """
    try:
        checkpoint = Checkpoint(folder)
        stored = {_own_name(name): name for name in checkpoint.names}
        causal = head_on_meta(config, folder, settings, target.dtype, hidden_size, stored)
        shards = None if ranks.size == 1 else Shards(causal, ranks)
        if "embed_tokens.weight" not in stored:
            causal.model.embed_tokens = nn.Identity()
        names = {name: stored.get(_own_name(name), "") for name in causal.state_dict()}
        check_tensors(folder, causal, checkpoint, names)
        target_ids = None
        if "d2t" in stored:
            offsets = checkpoint.read(stored["d2t"]).long()
            target_ids = (offsets + torch.arange(len(offsets))).to(device)

        def quantised(name: str, matrix: Weight) -> Weight:
            """All of it but an embedding counts as a part of the layer."""
            return matrix if name.endswith("embed_tokens") else quantise(f"layers.0.{name}", matrix)

        weights = CheckpointWeights(causal, HeadSource(checkpoint, names), target.dtype, quantised)
        if shards is not None:
            shards.keep_only(("model.layers.", "lm_head."))
            weights.divide(shards)
        tabulate_rotary(causal.model, target.max_model_len)
        network = build_network(causal.model, weights, device)
        fc, head = (pack_joined([linear], weights, device) for linear in (causal.fc, causal.lm_head))
        return EagleLayer(fc, rms_norm_of(causal.hidden_norm, weights, device), network, head, target_ids)
    except LoadError:
        raise
    except OtherStructureError as error:
        raise LoadError(
            f"the layer of the EAGLE-3 head {folder} is not one of Llama's with wider inputs: {error}"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise LoadError(
            f"the weights of the EAGLE-3 head {folder} do not fit: {first_line(error)}"
        ) from error


def head_on_meta(
    worker_config: WorkerConfig,
    folder: str,
    settings: EagleSettings,
    dtype: torch.dtype,
    hidden_size: int,
    stored: Iterable[str],
) -> Any:
    """A head as a Llama of one layer, without memory, with the further parts `fc` and `hidden_norm`.

    hidden_size: of the model. stored: names of the checkpoint, which say where there are biases.
    """
    values = read_json(Path(folder) / "config.json") | settings.as_llama()
    causal = module_on_meta(worker_config, llama_config(values), dtype)
    size, layer = settings.hidden_size, causal.model.layers[0]
    with torch.device("meta"):
        for name in ("q_proj", "k_proj", "v_proj"):
            num_out = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * size, num_out, dtype=dtype))
        causal.fc = nn.Linear(3 * hidden_size, size, dtype=dtype)
        causal.hidden_norm = type(causal.model.norm)(size, eps=settings.rms_norm_eps).to(dtype)
        causal.model.embed_tokens = nn.Embedding(settings.vocab_size, size, dtype=dtype)
        for name, module in causal.named_modules():
            if type(module) is nn.Linear:
                has_bias = f"{_own_name(name)}.bias" in stored
                bias = nn.Parameter(torch.empty(module.out_features, dtype=dtype)) if has_bias else None
                module.register_parameter("bias", bias)
    return causal


def llama_config(values: dict[str, Any]) -> Any:
    """A configuration with Llama's names, as transformers has it."""
    from transformers import LlamaConfig

    return LlamaConfig.from_dict(values)


def check_tensors(folder: str, causal: Any, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
    """Refuse a checkpoint that lacks a parameter of a head's module, or has it in another shape.

    names: in the checkpoint, by those of parameters; empty: it is not there.

    Raises:
        LoadError: says which.
    """
    for name, wanted in sorted(causal.state_dict().items()):
        own = _own_name(name)
        if not names[name]:
            raise LoadError(f"the EAGLE-3 head {folder} lacks the weight {own}")
        if (found := tuple(checkpoint.header(names[name]).shape)) != (shape := tuple(wanted.shape)):
            raise LoadError(
                f"{own.removesuffix('.weight')} of the EAGLE-3 head {folder} has the shape {found}, not {shape}: "
                "it was made for another model"
            )


def _own_name(name: str) -> str:
    """A weight's name without what only some checkpoints put before it."""
    for prefix in ("model.", *LAYER_NAMES):
        name = name.removeprefix(prefix)
    return name
