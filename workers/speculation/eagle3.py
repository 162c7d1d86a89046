"""An EAGLE-3 head: one decoder layer that continues from states within the model.

At each position p of a sequence, the layer gets a state, and the embedding of the token at p + 1:

    state_p = fc(states of the model at p, after three of its layers, side by side)
    x = [norm(embedding of token p + 1), norm(state_p)]            twice as wide as the model's hidden states
    y = state_p + attention(x)
    out = y + feed_forward(norm(y))        logits of token p + 2 = lm_head(norm(out))

For the draft after that, `out` takes the place of state_{p + 1}, which the model has not computed. Logits are over
a smaller vocabulary: entry i stands for token i + d2t[i].

The layer has a KV cache in the blocks of the model's, so it must see every token of every step. The entry of a
position depends on the next token as well, which in the last position of a shared block may be another one: drafts
after a shared prefix start from one entry that is slightly off.

Source: Li, Wei, Zhang, Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (2025), and the layout of its published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.hub import read_json
from pagewire.ipc.worker_messages import StepPlan, WorkerConfig
from pagewire.kernels.attention import UNSCALED, AttentionBatch, paged_attention
from pagewire.kernels.dispatch import implementation_for
from pagewire.kernels.experts import ACTIVATIONS
from pagewire.kernels.layers import add_rms_norm, rms_norm
from pagewire.workers.device.interface import Device, TokenSampler
from pagewire.workers.errors import LoadError
from pagewire.workers.model.attention import KVShape
from pagewire.workers.model.loading import LoadedModel
from pagewire.workers.model.online import online
from pagewire.workers.model.stack import DecoderStack
from pagewire.workers.model.weights import keep
from pagewire.workers.slots import Slots
from pagewire.workers.speculation.eagle3_checkpoint import EagleLayer, EagleSettings, read_layer
from pagewire.workers.speculation.interface import RowOver
from pagewire.workers.speculation.places import Places
from pagewire.workers.speculation.sampling import Draft, extend_drafts
from pagewire.workers.speculation.taps import TappedStack, features_of


class Parts(NamedTuple):
    """What is dropped and loaded with the weights. embed: the model's embedding. angles: cosines and sines."""

    layer: EagleLayer
    stack: TappedStack
    embed: Callable[[Tensor], Tensor]
    angles: tuple[Tensor, Tensor]


class Eagle3:
    """A drafter that is an EAGLE-3 head; methods as in `interface.Drafter`."""

    name: str | None = "Eagle3"
    follows = True

    def __init__(
        self,
        config: WorkerConfig,
        target: LoadedModel,
        path: str,
        num_drafts: int,
        quantization: str | None,
        slots: Slots,
        device: Device,
        sampler: TokenSampler,
    ) -> None:
        """Load it.

        config, target, slots, sampler: of the model. num_drafts: that are wanted at most.

        Raises:
            LoadError: it cannot be loaded, or has another vocabulary.
        """
        self._path, self._num_drafts, self._slots = path, num_drafts, slots
        self._config, self._device, self._sampler = config, device, sampler
        self._quantise = keep if quantization is None else online(quantization)
        self.settings = EagleSettings.read(path)
        if self.settings.vocab_size != slots.vocab_size:
            raise LoadError(
                f"the EAGLE-3 head {path} is for a vocabulary of {self.settings.vocab_size} tokens, and the model "
                f"has {slots.vocab_size}: it was made for another model"
            )
        if device.asynchronous and not config.enforce_eager:
            raise LoadError(
                "an EAGLE-3 head takes states from within the model, so it needs --enforce-eager on a GPU"
            )
        self._parts: Parts | None = None
        self._num_blocks, self._num_spare = 0, -(-num_drafts // config.block_size)
        self.caches: list[tuple[Tensor, Tensor]] = []
        self.load(target)
        settings = self.settings
        self._shape = KVShape(
            settings.num_kv_heads, settings.size_of_head, settings.size_of_head, target.dtype
        )
        self.block_bytes = self._shape.block_bytes(config.block_size)
        self.spare_bytes = config.max_num_seqs * self._num_spare * self.block_bytes

    @property
    def weight_bytes(self) -> int:
        """See `Drafter.weight_bytes`."""
        return 0 if self._parts is None else self._parts.layer.num_bytes

    @property
    def features(self) -> Tensor | None:
        """See `Drafter.features`: states after three layers, side by side."""
        return None if self._parts is None else features_of(self._parts.stack)

    def load(self, target: LoadedModel) -> None:
        """See `Drafter.load`. The model's stack is divided where states are taken."""
        if self._parts is not None:
            return
        base, settings = target.model.base, self.settings
        if not isinstance(base, DecoderStack):
            raise LoadError(
                f"an EAGLE-3 head needs a model whose layers run in one call, and those of {target.architecture} "
                "run one by one: take a draft model (method 'draft_model')"
            )
        layer = read_layer(self._path, target.dtype, self._device.torch_device, self._quantise)
        hidden_size = len(base.stack.input_norm.weight)
        check_sizes(self._path, layer, settings, hidden_size)
        stack = TappedStack(base.stack, settings.places(len(base.stack.layers)))
        angles = rotary_angles(self._path, target.max_model_len, base.stack.input_norm.weight)
        base.stack = stack
        assert base.embed_tokens is not None, "it is there on the first stage"
        self._parts = Parts(layer, stack, base.embed_tokens, angles)

    def unload(self) -> None:
        """See `Drafter.unload`."""
        self._parts = None

    def allocate(self, num_blocks: int) -> None:
        """See `Drafter.allocate`."""
        count = num_blocks + self._config.max_num_seqs * self._num_spare
        self.caches = [self._shape.allocate(count, self._config.block_size, self._device)]
        self._num_blocks = num_blocks

    def free(self) -> None:
        """See `Drafter.free`."""
        self.caches = []

    def apply(self, plan: StepPlan) -> None:
        """Nothing to do: what the cache holds is what the model's own holds."""

    def propose(self, rows: Sequence[RowOver], features: Tensor | None) -> list[list[int]]:
        """See `Drafter.propose`: runs the layer over all tokens of the step, then over one draft after another."""
        assert features is not None and self._parts is not None, "the weights are loaded"
        drafts = [
            Draft(self._slots.sampling[row.slot], min(row.num_drafts, self._num_drafts)) for row in rows
        ]
        ends = [row.start + row.num_tokens for row in rows]
        num_positions = max(end + max(draft.limit, 1) for end, draft in zip(ends, drafts, strict=True)) - 1
        slot_ids = [row.slot for row in rows]
        places = Places(
            *(self._slots, slot_ids, num_positions, self._num_blocks, self._num_spare, self._device)
        )
        state, normed = self._follow(rows, features, places)
        active = [i for i, draft in enumerate(drafts) if draft.goes_on]
        lasts = np.cumsum([row.num_tokens for row in rows])[active] - 1
        state, normed = self._take(state, lasts), self._take(normed, lasts)
        while active:
            self._draw(normed, [drafts[i] for i in active])
            kept = [place for place, i in enumerate(active) if drafts[i].goes_on]
            active, state = [active[place] for place in kept], self._take(state, kept)
            if active:
                starts = [ends[i] + len(drafts[i].token_ids) - 1 for i in active]
                ids = np.array([drafts[i].token_ids[-1] for i in active], np.int64)
                state, normed = self._forward(places, active, state, ids, starts, [1] * len(active))
        return [draft.token_ids for draft in drafts]

    def _follow(self, rows: Sequence[RowOver], features: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Run the layer over the tokens of a step that count, each with the token after it."""
        assert self._parts is not None
        tokens, lengths = self._slots.tokens, [row.num_tokens for row in rows]
        ids = [tokens[row.slot, row.start + 1 : row.start + 1 + row.num_tokens] for row in rows]
        index = [np.arange(row.first, row.first + row.num_tokens) for row in rows]
        state = self._parts.layer.fc(self._take(features, np.concatenate(index)))
        starts = [row.start for row in rows]
        return self._forward(places, range(len(rows)), state, np.concatenate(ids), starts, lengths)

    def _take(self, x: Tensor, index: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """These rows of x."""
        (at,) = self._device.upload([torch.from_numpy(np.asarray(index, np.int64))])
        return x.index_select(0, at)

    def _draw(self, normed: Tensor, drafts: Sequence[Draft]) -> None:
        """Draw the next draft of each from states [n, H]."""
        assert self._parts is not None
        layer = self._parts.layer
        logits = layer.head(normed)
        if layer.target_ids is not None:
            some = logits
            logits = some.new_full((len(some), self._slots.vocab_size), -torch.inf)
            logits.index_copy_(1, layer.target_ids, some)
        extend_drafts(self._sampler, logits, drafts)

    def _forward(
        self,
        places: Places,
        rows: Sequence[int],
        state: Tensor,
        token_ids: NDArray[np.int64],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """The layer at positions [start, start + length) of rows: its output [T, H], and the same normed.

        state: [T, H] at each position. token_ids: int64 [T], of the token after it.
        """
        assert self._parts is not None
        layer, eps = self._parts.layer, self.settings.rms_norm_eps
        positions, batch = places.tensors(rows, starts, lengths)
        (ids,) = self._device.upload([torch.from_numpy(token_ids)])
        embed = self._parts.embed
        embedded = embed(ids) if layer.embedding is None else layer.embedding.index_select(0, ids)
        normed = rms_norm(state, layer.hidden_norm, eps)
        x = torch.cat([rms_norm(embedded, layer.input_norm, eps), normed], -1)
        residual = normed if self.settings.norm_before_residual else state.clone()
        x = add_rms_norm(self._attend(layer.qkv(x), positions, batch), residual, layer.attention_norm, eps)
        x = layer.down(ACTIVATIONS[self.settings.activation](layer.gate_up(x)))
        normed = add_rms_norm(x, residual, layer.norm, eps)
        return residual, normed

    def _attend(self, qkv: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Attention over the layer's own KV cache, and the product behind it."""
        assert self._parts is not None
        settings, (cos, sin) = self.settings, self._parts.angles
        head_dim, num_heads = settings.size_of_head, settings.num_attention_heads
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = torch.split(heads, [num_heads, settings.num_kv_heads, settings.num_kv_heads], 1)
        kernels, cache = implementation_for(q, k, v), self.caches[0]
        angles = cos.index_select(0, positions), sin.index_select(0, positions)
        q = kernels.rotate_and_store(q, k, v, *angles, None, *cache, batch.slot_mapping, UNSCALED)
        out = paged_attention(q, *cache, batch, head_dim**-0.5)
        return self._parts.layer.out(out.view(len(qkv), -1))


def check_sizes(path: str, layer: EagleLayer, settings: EagleSettings, hidden_size: int) -> None:
    """Refuse a head of another model, or whose weights are not of the sizes of its configuration.

    Raises:
        LoadError: says which.
    """
    size = settings.hidden_size
    num_logits = settings.draft_vocab_size or settings.vocab_size
    num_heads = settings.num_attention_heads + 2 * settings.num_kv_heads
    wanted = {
        "fc": (size, 3 * hidden_size),
        "qkv": (num_heads * settings.size_of_head, 2 * size),
        "out": (size, settings.num_attention_heads * settings.size_of_head),
        "head": (num_logits, size),
    }
    for name, shape in wanted.items():
        product = getattr(layer, name)
        if (found := (product.out_features, product.in_features)) != shape:
            raise LoadError(
                f"{name} of the EAGLE-3 head {path} has the shape {found}, not {shape}: it was made for another "
                "model"
            )
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
