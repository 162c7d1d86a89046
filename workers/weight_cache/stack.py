"""A loaded model whose layers are a decoder stack, as what a file keeps of it, and as what runs it again.

The stack was proven against transformers' module when it was first loaded (`model/proof.py`), by the process that
wrote the file. All that it is made of is here, so running it again needs neither transformers nor the checkpoint.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pagewire.ipc.worker_messages import Parallel
from pagewire.kernels.adapted import Adapted
from pagewire.kernels.layer import Layer, LayerNorm, Norm
from pagewire.kernels.linear import Linear
from pagewire.kernels.stack import Stack
from pagewire.workers.adapters.embedding import embedding_of
from pagewire.workers.collective.interface import Collective
from pagewire.workers.collective.parts import shards_of
from pagewire.workers.model.attention import KVShape
from pagewire.workers.model.loaded import LoadedModel
from pagewire.workers.model.model import Model
from pagewire.workers.model.parallel_layers import DividedEmbedding, Gather, GatheredLinear
from pagewire.workers.model.shards import Axis, Cut
from pagewire.workers.model.shares import width_spans
from pagewire.workers.model.stack import DecoderStack
from pagewire.workers.model.stages import Stage
from pagewire.workers.weight_cache.forms import BY_NAME, FORMS, Form, NotStoredError, add_form, fields_of


@dataclass(frozen=True)
class KeptLayer:
    """A layer of a stack, and its place in the KV cache."""

    index: int
    kv_shape: KVShape
    window: int | None
    layer: Layer


@dataclass(frozen=True)
class KeptModel:
    """A proven model: what its stack is made of. Of a rank of a group it holds what that rank has, and no more."""

    properties: dict[str, Any]
    """All fields of `LoadedModel` but the model itself."""
    embedding: nn.Module | None
    """Of token ids int64 [T] to states [T, H]; None if an earlier stage has it."""
    angles: list[Tensor]
    """Cosines and sines by position."""
    input_norm: Norm | LayerNorm | None
    layers: list[KeptLayer]
    head: Linear | None
    """None if a later stage has it, or the model pools (see `pooling.py`)."""


for _kind in (KeptLayer, KeptModel, Cut):
    add_form(_kind)
FORMS[Axis] = BY_NAME[Axis.__name__] = Form(lambda axis: {"value": axis.value}, Axis)
FORMS[range] = BY_NAME[range.__name__] = Form(
    lambda span: {"start": span.start, "stop": span.stop}, lambda start, stop: range(start, stop)
)


class RestoredStack(DecoderStack):
    """A stack made of what was kept of it."""

    def __init__(self, kept: KeptModel, vocabulary: Gather | None = None, *, is_last: bool = True) -> None:
        nn.Module.__init__(self)
        self.is_last = is_last
        layers: Any = kept.layers  # with all attributes of a `StackLayer` that are used once it is packed
        self.embed_tokens = kept.embedding
        self._angles = kept.angles
        self.stack_layers = layers
        parts = [place.layer for place in kept.layers]
        if vocabulary is not None:
            if kept.embedding is not None:
                self.embed_tokens = DividedEmbedding(kept.embedding, vocabulary.own, vocabulary.collective)
            parts = [replace(layer, ranks=vocabulary.collective) for layer in parts]
        self.stack = Stack(kept.input_norm, parts)


class RestoredModel(Model):
    """A stack and an output layer, without transformers' module."""

    def __init__(self, kept: KeptModel, shards: Collective, stage: Stage | None) -> None:
        vocabulary = vocabulary_of(kept, shards)
        self.config = self.causal = None
        self.arithmetic = nullcontext
        self.guarded = False
        self.stage, self.cut = stage, None
        self.base = RestoredStack(kept, vocabulary, is_last=stage is None or stage.is_last)
        self.head = kept.head
        if kept.head is not None and vocabulary is not None:
            self.head = GatheredLinear(kept.head, vocabulary)


def vocabulary_of(kept: KeptModel, shards: Collective) -> Gather | None:
    """How the embedding and the output layer are divided over the ranks of a stage; None if they are whole."""
    if shards.size == 1:
        return None
    return Gather(width_spans(kept.properties["vocab_size"], shards.size), shards)


def own_part(linear: Linear | None) -> Linear | None:
    """A linear layer without what adapters add to it; of one over several ranks, this rank's part."""
    while isinstance(linear, GatheredLinear | Adapted):
        linear = linear.linear
    return linear


def kept(loaded: LoadedModel) -> KeptModel:
    """What a file keeps of a loaded model.

    Raises:
        NotStoredError: it is more than a decoder stack and an output layer on the CPU.
    """
    base: Any = loaded.model.base
    if not isinstance(base, DecoderStack):
        raise NotStoredError("its layers are no decoder stack")
    if loaded.pooler is None and loaded.model.head is None and loaded.model.makes_logits:
        raise NotStoredError("its logits are computed by transformers' code")
    if base.stack.compiled is None or base._angles is None:
        raise NotStoredError("its layers are not compiled as a whole")
    places = zip(base.stack_layers, base.stack.layers, strict=True)
    head, embedding = loaded.model.head, base.embed_tokens
    rows = embedding.rows if isinstance(embedding, DividedEmbedding) else embedding
    return KeptModel(
        properties=properties_of(loaded),
        embedding=embedding_of(rows),
        angles=base._angles,
        input_norm=base.stack.input_norm,
        layers=[
            KeptLayer(place.index, place.kv_shape, place.window, replace(layer, ranks=None))
            for place, layer in places
        ],
        head=None if head is None else own_part(head),  # type: ignore[arg-type] # see `Model.shorten_logits`
    )


def properties_of(loaded: LoadedModel) -> dict[str, Any]:
    """All fields of a loaded model but what computes."""
    return {name: value for name, value in fields_of(loaded).items() if name not in ("model", "pooler")}


def loaded_again(kept: KeptModel, ranks: Collective, parallel: Parallel) -> LoadedModel:
    """The loaded model of which this was kept, by the same rank of a group of the same size.

    ranks: all ranks of the group.

    Raises:
        ValueError, TypeError: its parts do not fit each other.
    """
    stage, norm = None, kept.layers[0].layer.attention_norm.weight
    if parallel.stages > 1:
        first = kept.layers[0].index
        layers = range(first, first + len(kept.layers))
        place = parallel.stage, parallel.stages
        stage = Stage(layers, *place, ranks, len(norm), norm.dtype, norm.device)
    model = RestoredModel(kept, shards_of(ranks, parallel), stage)
    return LoadedModel(model=model, **kept.properties)
