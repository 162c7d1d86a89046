"""A loaded network as plain data: what looks tokens up, a stack of layers, and where their keys and values lie.

    token ids -> Embeddings -> Stack -> hidden states

Decoders and encoders are the same object with other parts, as `build.py` finds them in a module of transformers, or
`workers/weight_cache/forms.py` in a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.data.layer import Angles, LayerNorm, Norm
from pagewire.kernels.data.weight import Linear
from pagewire.kernels.stack import Additions, Stack, normed_by
from pagewire.workers.caches.kv import KVShape
from pagewire.workers.network.road import Road
from pagewire.workers.step.context import Axes, StepContext


@dataclass
class Embeddings:
    """The sum of a token's embeddings: of the word, and where there are any, of its type and its position."""

    words: Any
    """A module of token ids int64 [T] to [T, H]; it has `embedding_dim`."""
    positions: Any = None
    token_types: Any = None
    norm: Norm | LayerNorm | None = None
    """Of the sum; None: it is not normed."""
    scale: float = 1.0
    """The words' embeddings, or what was laid over them, are multiplied by it."""

    def __call__(self, ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """States [T, H] of tokens int64 [T] at positions int64 [T], or of what takes the place of their words."""
        x: Tensor = self.words(ids)
        x = x if step.overlay is None else step.overlay.over(x)
        x = x if self.scale == 1.0 else x * self.scale
        if self.token_types is not None:
            types = step.token_types
            x = x + self.token_types(torch.zeros_like(ids[:1]) if types is None else types)
        if self.positions is not None:
            x = x + self.positions(positions)
        return normed_by(self.norm, x)


@dataclass
class LayerInputs:
    """What each layer gets of a token beside states: rows of a table, and a product of its embedding, normed."""

    words: Any
    """A module of token ids int64 [T] to [T, L P]."""
    projection: Linear
    """[T, H] to [T, L P]."""
    norm: Norm | LayerNorm
    """Over the P numbers of a layer."""
    projection_scale: float
    """Of the product, before it is normed."""
    scale: float
    """Of the sum of both."""
    projection_name: str
    """That of the projection in transformers' base."""

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """The layers' inputs [T, L, P] of tokens int64 [T] and their embeddings [T, H]."""
        shape = len(ids), -1, len(self.norm.weight)
        projected = (self.projection(embedded) * self.projection_scale).view(shape)
        looked_up: Tensor = self.words(ids)
        return (normed_by(self.norm, projected) + looked_up.view(shape)) * self.scale


@dataclass(frozen=True)
class KVPlace:
    """Where the keys and values of a layer lie: as those of this layer in the KV cache, or in pages.

    window: keys that a query sees; None: all.
    """

    layer: int
    shape: KVShape
    window: int | None = None


@dataclass(frozen=True)
class ModuleRows:
    """The rows that a module of transformers has in a linear layer, one below the other; or a number of experts."""

    count: int
    order: Tensor | None = None
    """int64 [count], which of the module's rows each one is; None: they are the same."""
    factor: Tensor | None = None
    """float32 [count]: what the module gives is multiplied by it, in the order here; None: it is not."""


@dataclass
class Network:
    """An embedding and a stack of layers, or a pipeline stage's part of both.

    Between stages goes what is added up in all layers, which each norms for its first layer; where norms come last,
    it is normed already.
    """

    embedding: Embeddings | None
    """None in a stage after the first, and where another network looks the tokens up."""
    angles: list[Angles]
    """Cosines and sines [P, rot_dim] by position, of each kind that the layers number."""
    stack: Stack
    places: list[KVPlace | None]
    """Of each layer; None: a mixer takes the place of attention."""
    modules: list[dict[str, dict[str, ModuleRows]]] = field(default_factory=list)
    """Of each layer, by the field of a linear layer: its parts by their names in transformers' base.

    By "experts": the module of all of them.
    """
    is_last: bool = True
    """It ends with the final norm; otherwise it gives the sum itself."""
    words_name: str = "embed_tokens"
    """That of the table of tokens in transformers' base."""
    by_place: bool = False
    """The last of the angles are by a token's place in its sequence, which its position may not be in a dry run."""
    layer_inputs: LayerInputs | None = None
    """None: layers get states alone."""
    why: str = ""
    """Why the first half that runs as a module does; empty: none does."""
    taps: Sequence[int] = field(default=(), init=False)
    """The numbers of layers, from 1 on, whose results before their norm are kept."""
    tapped: dict[int, Tensor] = field(default_factory=dict, init=False)
    """These results [T, H] for the tokens of the last call, by layer."""

    name = "Network"

    @property
    def network(self) -> Network:
        """See `ModelBase`."""
        return self

    @property
    def road(self) -> Road:
        """See `ModelBase`."""
        return Road(sum(half is not None for layer in self.stack.layers for half in layer.halves), self.why)

    @property
    def tables(self) -> list[Any]:
        """See `ModelBase`."""
        own, inputs = self.embedding, self.layer_inputs
        found = [] if own is None else [own.words, own.positions, own.token_types]
        found += [] if inputs is None else [inputs.words]
        return [table for table in found if table is not None]

    @property
    def embedding_size(self) -> int:
        """See `ModelBase`."""
        if self.layer_inputs is not None:  # which are looked up by tokens, too
            return 0
        size: Any = getattr(self.words, "embedding_dim", 0)
        return size if isinstance(size, int) else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers' weights, and of the norms of sums."""
        norm = None if self.embedding is None else self.embedding.norm
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.projection.num_bytes
        return self.stack.num_bytes + inputs + (0 if norm is None else norm.num_bytes)

    @property
    def words(self) -> Any:
        """The module that looks tokens up; None where there is none."""
        return None if self.embedding is None else self.embedding.words

    def angles_at(self, positions: Tensor, axes: Axes | None = None) -> list[Angles]:
        """Cosines and sines [T, rot_dim] at positions int64 [T], of each kind. axes: where tokens have three."""
        if axes is not None:
            axes = axes.halved if any(layer.interleaved for layer in self.stack.layers) else axes
            return [(axes.rows(cos), axes.rows(sin)) for cos, sin in self.angles]
        return [(cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in self.angles]

    def __call__(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Hidden states [T, H] of the tokens int64 [T] of a step at positions int64 [T]."""
        states = step.received
        if states is None:
            assert self.embedding is not None, "a stage that has no embedding is behind another one"
            states = self.embedding(input_ids, positions, step)
        inputs = None if self.layer_inputs is None else self.layer_inputs(input_ids, states)
        angles = self.angles_at(positions, step.axes)
        if self.by_place:
            cos, sin = (table.index_select(0, step.places) for table in self.angles[-1])
            angles[-1] = cos, sin
        caches = [
            None if place is None else step.cache(place.layer, place.shape, place.window)
            for place in self.places
        ]
        self.tapped = {number: torch.empty_like(states) for number in self.taps}
        memory = None if step.states is None else step.states.of_layers(self.stack.states)
        overlay = step.overlay
        if overlay is None or not overlay.deep or step.received is not None:
            normed = self.stack(
                states, step.batch, caches, angles, taps=self.tapped, memory=memory, inputs=inputs
            )
        else:
            deep = Additions(overlay.places, [layer.to(states.dtype) for layer in overlay.deep])
            normed = self.stack.with_additions(states, step.batch, caches, angles, self.tapped, deep, memory)
        return normed if self.is_last or not self.stack.norm_first else states
