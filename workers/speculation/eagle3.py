"""An EAGLE-3 head: one decoder layer that continues from states within the model.

At each position p of a sequence, the layer gets a state, and the embedding of the token at p + 1:

    state_p = fc(states of the model at p, after three of its layers, side by side)
    x = [norm(embedding of token p + 1), norm(state_p)]            twice as wide as the model's hidden states
    y = state_p + attention(x)
    out = y + feed_forward(norm(y))        logits of token p + 2 = lm_head(norm(out))

For the draft after that, `out` takes the place of state_{p + 1}, which the model has not computed. Logits are over
a smaller vocabulary: entry i stands for token i + d2t[i]. How the layer runs over a step is in `state_drafter.py`.

Source: Li, Wei, Zhang, Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (2025), and the layout of its published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.ipc.files.hub import read_json
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.ops import (
    activate_and_mul,
    add_rms_norm,
    paged_attention,
    rms_norm,
    rotate_and_store,
)
from pagewire.workers.checkpoint.formats.online import online
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.module.caches import KVShape
from pagewire.workers.module.weights import keep
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.network import Network
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.speculation.eagle3_checkpoint import EagleLayer, EagleSettings, read_layer
from pagewire.workers.speculation.eagle3_division import EagleDivision
from pagewire.workers.speculation.state_drafter import Caches
from pagewire.workers.speculation.taps import TappedStack, features_of


class Parts(NamedTuple):
    """What is dropped and loaded with the weights. embed: the model's embedding. angles: cosines and sines."""

    layer: EagleLayer
    stack: TappedStack
    embed: Callable[[Tensor], Tensor]
    angles: tuple[Tensor, Tensor]


class Eagle3:
    """An EAGLE-3 head as `StateLayers`."""

    name = "Eagle3"

    def __init__(
        self,
        config: WorkerConfig,
        target: LoadedModel,
        path: str,
        quantization: str | None,
        device: Device,
        ranks: Collective,
    ) -> None:
        """Load it. config, target: of the model. ranks: that divide it.

        Raises:
            LoadError: it cannot be loaded, or has another vocabulary. IndivisibleError: see `EagleDivision.of`.
        """
        self._path, self._vocab_size, self._device = path, target.vocab_size, device
        self._quantise = keep if quantization is None else online(quantization)
        self.settings = EagleSettings.read(path)
        if self.settings.vocab_size != target.vocab_size:
            raise LoadError(
                f"the EAGLE-3 head {path} is for a vocabulary of {self.settings.vocab_size} tokens, and the model "
                f"has {target.vocab_size}: it was made for another model"
            )
        if device.asynchronous and not config.enforce_eager:
            raise LoadError(
                "an EAGLE-3 head takes states from within the model, so it needs --enforce-eager on a GPU"
            )
        size = self.settings.size_of_head
        self._division = EagleDivision.of(path, self.settings.heads, size, ranks)
        self._heads = self._division.own_heads
        self._parts: Parts | None = None
        self.load(target)
        self.shapes = [KVShape(self._heads.num_kv, size, size, target.dtype)]

    @property
    def weight_bytes(self) -> int:
        """See `Drafter.weight_bytes`."""
        return 0 if self._parts is None else self._parts.layer.num_bytes

    @property
    def _loaded(self) -> Parts:
        assert self._parts is not None, "the weights are loaded"
        return self._parts

    def load(self, target: LoadedModel) -> None:
        """See `Drafter.load`. The model's stack is divided where states are taken."""
        if self._parts is not None:
            return
        base, settings = target.model.base, self.settings
        if not isinstance(base, Network):
            raise LoadError(
                f"an EAGLE-3 head needs a model whose layers run in one call, and those of {target.architecture} "
                "run one by one: take a draft model (method 'draft_model')"
            )
        norm = base.stack.layers[0].attention_norm.weight
        hidden_size = len(norm)
        layer = read_layer(
            self._path,
            target.dtype,
            self._device.torch_device,
            self._quantise,
            settings.shapes(hidden_size),
            self._division,
        )
        check_sizes(self._path, layer, settings, hidden_size)
        stack = TappedStack(base.stack, settings.places(len(base.stack.layers)))
        angles = rotary_angles(self._path, target.max_model_len, norm)
        base.stack = stack
        assert base.words is not None, "it is there on the first stage"
        self._parts = Parts(layer, stack, base.words, angles)

    def unload(self) -> None:
        """See `Drafter.unload`."""
        self._parts = None

    def features(self, hidden: Tensor) -> Tensor:
        """See `Drafter.features`: states after three layers, side by side."""
        return features_of(self._loaded.stack)

    def begin(self, features: Tensor) -> Tensor:
        """See `StateLayers.begin`."""
        return self._loaded.layer.fc(features)

    def logits(self, index: int, normed: Tensor) -> Tensor:
        """See `StateLayers.logits`."""
        layer = self._loaded.layer
        some = layer.head(normed)
        if layer.target_ids is None:
            return some
        logits = some.new_full((len(some), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, layer.target_ids, some)

    def forward(
        self,
        index: int,
        state: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        caches: Caches,
    ) -> tuple[Tensor, Tensor]:
        """See `StateLayers.forward`: the layer's output [T, H], and the same normed."""
        layer, embed, eps = self._loaded.layer, self._loaded.embed, self.settings.rms_norm_eps
        embedded = embed(token_ids) if layer.embedding is None else layer.embedding.index_select(0, token_ids)
        normed = rms_norm(state, layer.hidden_norm, eps)
        x = torch.cat([rms_norm(embedded, layer.input_norm, eps), normed], -1)
        residual = normed if self.settings.norm_before_residual else state.clone()
        attended = self._attend(layer.qkv(x), positions, batch, caches[index])
        x = add_rms_norm(attended, residual, layer.attention_norm, eps)
        x = layer.down(activate_and_mul(layer.gate_up(x), self.settings.activation))
        normed = add_rms_norm(x, residual, layer.norm, eps)
        return residual, normed

    def _attend(self, qkv: Tensor, positions: Tensor, batch: AttentionBatch, cache: Cache) -> Tensor:
        """Attention over the layer's own KV cache, and the product behind it."""
        head_dim, own, (cos, sin) = self.settings.size_of_head, self._heads, self._loaded.angles
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = torch.split(heads, [own.num, own.num_kv, own.num_kv], 1)
        angles = cos.index_select(0, positions), sin.index_select(0, positions)
        q = rotate_and_store(q, k, v, angles, None, cache, batch.slot_mapping)
        out = paged_attention(q, cache, batch, head_dim**-0.5)
        return self._loaded.layer.out(out.view(len(qkv), -1))


def check_sizes(path: str, layer: EagleLayer, settings: EagleSettings, hidden_size: int) -> None:
    """Refuse a head of another model, or whose logits stand for no tokens.

    Raises:
        LoadError: says which.
    """
    size, (num_logits, _) = settings.hidden_size, settings.shapes(hidden_size)["head"]
    if size != hidden_size:
        raise LoadError(
            f"the EAGLE-3 head {path} has states of {size} numbers, and the model of {hidden_size}"
        )
    ids = torch.arange(num_logits) if layer.target_ids is None else layer.target_ids
    if len(ids) != num_logits or int(ids.min()) < 0 or int(ids.max()) >= settings.vocab_size:
        raise LoadError(
            f"d2t of the EAGLE-3 head {path} does not name a token for each of {num_logits} logits"
        )


def rotary_angles(path: str, num_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, D] by the configuration of a head, which has Llama's names."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = read_json(Path(path) / "config.json")
    rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(values))
    cos, sin = rotary(like[None, None], torch.arange(num_positions)[None])
    return cos[0].to(like.device), sin[0].to(like.device)
