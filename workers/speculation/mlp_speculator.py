"""An MLP speculator: a few small layers that predict tokens from the model's last hidden state.

The n-th token is predicted from a state and the token before it:

    state = gelu(norm_n(project_n(state) + w * embed_n(token)))        token = draw(head_n(state))

The first state is the model's final hidden state from which the last token was sampled, the first token that one.
With p = 0.5 ** (0.5 / n_predict) the weight is w = sqrt((1 - p * p) * inner_dim / 2) / p, so that the state keeps
its size. A norm divides by the root mean square, then scales and shifts.

Over several ranks, each computes the logits of some tokens. Projections are small, and embeddings only looked up:
every rank has them as a whole.

Source: Wertheimer et al., "Accelerating Production LLMs with Combined Token/Embedding Speculators" (2024), and the
layout of its published checkpoints, `model_type` "mlp_speculator".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from pagewire.ipc.files.hub import read_json
from pagewire.ipc.wire.worker_messages import StepPlan
from pagewire.kernels.data.paging import Cache
from pagewire.kernels.data.weight import Linear, dense_weight
from pagewire.kernels.linear import multiplies_floats
from pagewire.kernels.ops import rms_norm
from pagewire.workers.batch.slots import Slots
from pagewire.workers.checkpoint.formats.online import online
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.device.interface import Device, TokenSampler
from pagewire.workers.errors import LoadError
from pagewire.workers.module.products import packed
from pagewire.workers.module.weights import keep
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.single import SingleRank
from pagewire.workers.speculation.interface import RowOver
from pagewire.workers.speculation.ranks import gathered_product
from pagewire.workers.speculation.sampling import Draft, extend_drafts

EPS = 1e-6
MODEL_TYPE = "mlp_speculator"


class Settings(msgspec.Struct):
    """The config.json of a speculator. n_predict: tokens that it predicts. inner_dim: of states; 0: emb_dim.

    emb_dim: of the model's hidden states. tie_weights: all tokens share layers, but for the first projection.
    scale_input: the model's hidden state is normed and divided by sqrt(2).
    """

    model_type: str
    vocab_size: int
    emb_dim: int
    n_predict: int
    inner_dim: int = 0
    tie_weights: bool = False
    scale_input: bool = False

    @property
    def size(self) -> int:
        """The size of states."""
        return self.inner_dim or self.emb_dim

    @classmethod
    def read(cls, folder: str) -> Settings:
        """Those of a checkpoint.

        Raises:
            LoadError: it is of another form, or has impossible sizes.
        """
        try:
            settings = msgspec.convert(read_json(Path(folder) / "config.json"), cls)
        except (OSError, ValueError) as error:
            raise LoadError(f"config.json of the MLP speculator {folder} cannot be used: {error}") from error
        if settings.model_type != MODEL_TYPE or min(settings.n_predict, settings.size) < 1:
            raise LoadError(
                f"{folder} is no MLP speculator: its model_type is {settings.model_type!r}, its n_predict "
                f"{settings.n_predict} and its size {settings.size}"
            )
        return settings


@dataclass(frozen=True)
class Step:
    """The layers that predict one token. embedding: [V, D] in the model's dtype. scale, shift: [D]."""

    embedding: Tensor
    projection: Linear
    scale: Tensor
    shift: Tensor
    head: Linear


class MlpSpeculator:
    """A drafter that is an MLP speculator; methods as in `interface.Drafter`. It has no KV cache."""

    name: str | None = "MLPSpeculator"
    follows = False
    block_bytes = spare_bytes = 0
    caches: Sequence[Cache] = ()

    def __init__(
        self,
        path: str,
        quantization: str | None,
        slots: Slots,
        target: LoadedModel,
        device: Device,
        sampler: TokenSampler,
        ranks: Collective,
    ) -> None:
        """Load it. target: the model. slots, sampler: the model's own. ranks: that divide its output layers.

        Raises:
            LoadError: it cannot be loaded, or has another vocabulary.
        """
        self._path, self._slots, self._dtype = path, slots, target.dtype
        self._device, self._sampler, self._ranks = device, sampler, ranks
        keeps_floats = multiplies_floats(target.dtype, device.torch_device)
        self._quantise = keep if quantization is None else online(quantization, keeps_floats)
        self.settings = Settings.read(path)
        if self.settings.vocab_size != slots.vocab_size:
            raise LoadError(
                f"the MLP speculator {path} has a vocabulary of {self.settings.vocab_size} tokens, and the model "
                f"one of {slots.vocab_size}: it was made for another model"
            )
        share = 0.5 ** (0.5 / self.settings.n_predict)
        self._weight = math.sqrt((1 - share**2) * self.settings.size / 2) / share
        self._steps: list[Step] = []
        self.weight_bytes = 0
        self.load(target)

    def features(self, hidden: Tensor) -> Tensor | None:
        """Nothing: `RowOver.hidden` is all that it starts from."""
        return None

    def load(self, target: LoadedModel) -> None:
        """See `Drafter.load`."""
        if self._steps:
            return
        checkpoint = Checkpoint(self._path)
        tensors = {name.removeprefix("speculator."): name for name in checkpoint.names}
        steps: list[Step] = []
        for index in range(self.settings.n_predict):
            # What is shared is stored once, under the name of the first step that has it.
            is_shared = self.settings.tie_weights and index > 0
            if is_shared and index > 1:
                projection = steps[1].projection
            else:
                projection = self._linear(checkpoint, tensors, f"proj.{index}", SingleRank())
            if is_shared:
                steps.append(replace(steps[0], projection=projection))
                continue
            scale, shift = (self._tensor(checkpoint, tensors, f"ln.{index}.{n}") for n in ("weight", "bias"))
            embedding = self._tensor(checkpoint, tensors, f"emb.{index}.weight")
            head = self._linear(checkpoint, tensors, f"head.{index}", self._ranks)
            steps.append(Step(embedding, projection, scale, shift, head))
        self._check(steps)
        self._steps = steps
        parts = {id(part): part for step in steps for part in vars(step).values()}.values()
        self.weight_bytes = sum(p.nbytes if isinstance(p, Tensor) else p.num_bytes for p in parts)

    def _tensor(self, checkpoint: Checkpoint, names: dict[str, str], name: str) -> Tensor:
        if name not in names:
            raise LoadError(f"the MLP speculator {self._path} lacks the weight {name}")
        return checkpoint.read(names[name]).to(self._device.torch_device, self._dtype)

    def _linear(self, checkpoint: Checkpoint, names: dict[str, str], name: str, ranks: Collective) -> Linear:
        """A product, of which each of `ranks` has some outputs."""
        if f"{name}.weight" not in names:
            raise LoadError(f"the MLP speculator {self._path} lacks the weight {name}.weight")
        matrix = dense_weight(checkpoint.read(names[f"{name}.weight"]), self._dtype)
        return gathered_product(
            matrix,
            ranks,
            lambda rows: packed(self._quantise(f"{name}.weight", rows), None, self._device.torch_device),
        )

    def _check(self, steps: Sequence[Step]) -> None:
        """Raises LoadError if the sizes of weights are not those of the configuration."""
        settings = self.settings
        for index, step in enumerate(steps):
            found = (
                *step.embedding.shape,
                step.projection.out_features,
                step.projection.in_features,
                *step.scale.shape,
                *step.shift.shape,
                step.head.out_features,
                step.head.in_features,
            )
            size, vocab = settings.size, settings.vocab_size
            wanted = (vocab, size, size, settings.emb_dim if index == 0 else size, size, size, vocab, size)
            if found != wanted:
                raise LoadError(
                    f"the weights of token {index} of the MLP speculator {self._path} have the sizes {found}, "
                    f"not {wanted}, as its config.json says"
                )

    def unload(self) -> None:
        """See `Drafter.unload`."""
        self._steps, self.weight_bytes = [], 0

    def allocate(self, num_blocks: int) -> None:
        """Nothing to do: there is no KV cache."""

    def free(self) -> None:
        """Nothing to do: there is no KV cache."""

    def apply(self, plan: StepPlan) -> None:
        """Nothing to do: nothing is kept from step to step."""

    def propose(self, rows: Sequence[RowOver], features: Tensor | None) -> list[list[int]]:
        """See `Drafter.propose`."""
        slots = self._slots
        if not self._steps:
            raise RuntimeError("the weights of the MLP speculator are dropped")
        drafts = [Draft(slots.sampling[row.slot], min(row.num_drafts, len(self._steps))) for row in rows]
        hidden = [row.hidden for row in rows if row.hidden is not None]
        state = torch.stack(hidden).to(self._dtype)
        if self.settings.scale_input:
            state = rms_norm(state, torch.ones_like(state[0]), EPS) / math.sqrt(2)
        ends = [int(slots.num_tokens[row.slot]) - 1 for row in rows]
        last = slots.in_vocabulary(slots.tokens[[row.slot for row in rows], ends]).tolist()
        active = drafts
        for step in self._steps:
            state = self._next(step, state, torch.tensor(last, device=state.device))
            extend_drafts(self._sampler, step.head(state), active)
            kept = [index for index, draft in enumerate(active) if draft.goes_on]
            if not kept:
                break
            state = state.index_select(0, torch.tensor(kept, device=state.device))
            active = [active[index] for index in kept]
            last = [draft.token_ids[-1] for draft in active]
        return [draft.token_ids for draft in drafts]

    def _next(self, step: Step, state: Tensor, token_ids: Tensor) -> Tensor:
        """The state [n, D] behind tokens int64 [n]."""
        mixed = step.projection(state) + self._weight * step.embedding.index_select(0, token_ids)
        return F.gelu(rms_norm(mixed.contiguous(), step.scale, EPS) + step.shift)
