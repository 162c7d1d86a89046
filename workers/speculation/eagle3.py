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

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.kernels.linear import multiplies_floats
from pagewire.kernels.stack import normed_by
from pagewire.workers.checkpoint.formats.online import online
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.module.weights import keep
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.network import Network
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.speculation.eagle3_checkpoint import EagleLayer, EagleSettings, read_layer
from pagewire.workers.speculation.state_drafter import Caches


class Parts(NamedTuple):
    """What is dropped and loaded with the weights.

    network: the model's. embed: token ids int64 [T] to embeddings [T, H], the head's own or the model's.
    """

    layer: EagleLayer
    network: Network
    places: Sequence[int]
    embed: Callable[[Tensor], Tensor]


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
            LoadError: it cannot be loaded, or has another vocabulary. IndivisibleError: see `read_layer`.
        """
        self._config, self._path, self._vocab_size = config, path, target.vocab_size
        self._device, self._ranks = device, ranks
        keeps_floats = multiplies_floats(target.dtype, device.torch_device)
        self._quantise = keep if quantization is None else online(quantization, keeps_floats)
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
        self._parts: Parts | None = None
        self.load(target)
        self.shapes = [place.shape for place in self._loaded.layer.network.places if place is not None]

    @property
    def weight_bytes(self) -> int:
        """See `Drafter.weight_bytes`."""
        return 0 if self._parts is None else self._parts.layer.num_bytes

    @property
    def _loaded(self) -> Parts:
        assert self._parts is not None, "the weights are loaded"
        return self._parts

    def load(self, target: LoadedModel) -> None:
        """See `Drafter.load`. The model's network keeps the states that the head takes from then on."""
        if self._parts is not None:
            return
        base = target.model.network
        assert base is not None, "drafters of the worker are for networks"
        size = base.stack.hidden_size
        layer = read_layer(
            self._config,
            self._path,
            self.settings,
            target,
            size,
            self._device.torch_device,
            self._quantise,
            self._ranks,
        )
        check_sizes(self._path, layer, self.settings, size)
        base.taps = places = self.settings.places(len(base.stack.layers))
        words = layer.network.words or base.words
        assert words is not None, "it is there on the first stage"
        self._parts = Parts(layer, base, places, words)

    def unload(self) -> None:
        """See `Drafter.unload`."""
        self._parts = None

    def features(self, hidden: Tensor) -> Tensor:
        """See `Drafter.features`: states after three layers, side by side."""
        tapped = self._loaded.network.tapped
        return torch.cat([tapped[place] for place in self._loaded.places], -1)

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
        layer, embed = self._loaded.layer, self._loaded.embed
        stack, angles = layer.network.stack, layer.network.angles_at(positions)
        normed = normed_by(layer.hidden_norm, state)
        x = torch.cat([normed_by(stack.input_norm, embed(token_ids)), normed], -1)
        out = normed if self.settings.norm_before_residual else state.clone()
        normed = stack(out, batch, caches, angles, x)
        return out, normed


def check_sizes(path: str, layer: EagleLayer, settings: EagleSettings, hidden_size: int) -> None:
    """Refuse a head of another model, or whose logits stand for no tokens.

    Raises:
        LoadError: says which.
    """
    size, num_logits = settings.hidden_size, settings.draft_vocab_size or settings.vocab_size
    if size != hidden_size:
        raise LoadError(
            f"the EAGLE-3 head {path} has states of {size} numbers, and the model of {hidden_size}"
        )
    ids = torch.arange(num_logits) if layer.target_ids is None else layer.target_ids
    if len(ids) != num_logits or int(ids.min()) < 0 or int(ids.max()) >= settings.vocab_size:
        raise LoadError(
            f"d2t of the EAGLE-3 head {path} does not name a token for each of {num_logits} logits"
        )
