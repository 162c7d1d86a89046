"""Multi-token prediction (MTP): the layers behind a model's own in its checkpoint, trained to draft its tokens.

The first layer gets, at each position p, the model's final hidden state and the embedding of the token at p + 1:

    x = eh_proj([enorm(embedding of token p + 1), hnorm(state_p)])
    out_p = shared_head.norm(decoder_layer(x))        logits of token p + 2 = lm_head(out_p)

`state_p` is what the model's output layer gets, behind the final norm; embedding and output layer are the model's.
The second layer gets out_p and the token at p + 2, and so on. For drafts beyond, the last layer gets its own out_p
in place of the next state. How the layers run over a step is in `state_drafter.py`.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2, and README_WEIGHTS.md of its checkpoint,
which has the layout and says what is shared. The order of the two halves is that of `deepseek_mtp.py` and
`glm4_moe_mtp.py` in vLLM, of `deepseek_nextn.py` in SGLang, and of `MtpLayer` in transformers 5
(`modeling_layers.py`). All of them take the model's state behind its norm, as the code that comes with checkpoints
does (ROCm/ATOM pull request 1764), and out_p behind `shared_head.norm`: vLLM since pull request 47448. vLLM hides
the token at position 1 from the layers; transformers and SGLang do not, nor is it hidden here.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.workers.device.interface import Device
from pagewire.workers.module.invariant import Invariant
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.model import Model
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.speculation.mtp_checkpoint import MtpLayers, read_layers
from pagewire.workers.speculation.state_drafter import Caches
from pagewire.workers.step.context import StepContext


class Mtp:
    """The MTP layers of the model that is served, as `StateLayers`."""

    name = "MTP"

    def __init__(
        self, config: WorkerConfig, target: LoadedModel, device: Device, collective: Collective
    ) -> None:
        """Load them. config, target: of the model. collective: of the ranks that divide it, and these layers.

        Raises:
            LoadError: see `read_layers`.
        """
        self._config, self._device, self._collective = config, device, collective
        self._arithmetic = Invariant if device.batch_invariant else nullcontext
        self._parts: tuple[MtpLayers, Model] | None = None
        self.load(target)
        # They are layers of the model's kind, so their keys and values have the shape of its own.
        self.shapes = [target.kv_shapes[-1] for _ in self._loaded[0].layers]

    @property
    def weight_bytes(self) -> int:
        """See `Drafter.weight_bytes`."""
        return 0 if self._parts is None else self._parts[0].num_bytes

    @property
    def _loaded(self) -> tuple[MtpLayers, Model]:
        """The layers, and the model whose embedding and output layer they share."""
        assert self._parts is not None, "the weights are loaded"
        return self._parts

    def load(self, target: LoadedModel) -> None:
        """See `Drafter.load`."""
        if self._parts is None:
            layers = read_layers(self._config, target, self._device, self._collective)
            self._parts = layers, target.model

    def unload(self) -> None:
        """See `Drafter.unload`."""
        self._parts = None

    def features(self, hidden: Tensor) -> Tensor:
        """See `Drafter.features`: the hidden states, copied where the next step may overwrite them."""
        return hidden.clone() if self._device.asynchronous else hidden

    def begin(self, features: Tensor) -> Tensor:
        """See `StateLayers.begin`."""
        return features

    def forward(
        self,
        index: int,
        state: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        caches: Caches,
    ) -> tuple[Tensor, Tensor]:
        """See `StateLayers.forward`; both results are the same."""
        parts, model = self._loaded
        layer = parts.layers[index]
        own = getattr(layer, "embed_tokens", None)
        embed = model.base.words if own is None else own
        with StepContext(batch, positions, caches, first_layer=parts.first), self._arithmetic():
            x = layer.eh_proj(torch.cat([layer.enorm(embed(token_ids)), layer.hnorm(state)], -1))[None]
            at = positions[None]
            out = layer(x, attention_mask=None, position_ids=at, position_embeddings=parts.rotary(x, at))
            out = out[0] if isinstance(out, tuple) else out  # of transformers before 5
            normed = layer.shared_head.norm(out[0])
        return normed, normed

    def logits(self, index: int, normed: Tensor) -> Tensor:
        """See `StateLayers.logits`."""
        parts, model = self._loaded
        head = getattr(parts.layers[index].shared_head, "head", None)
        return model.logits(normed) if head is None else head(normed)
