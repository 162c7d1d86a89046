"""A loaded model that pools, as what a file keeps of it, and as what runs it again; see `stack.py`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor, nn

from pagewire.ipc.pooling import PoolingInfo
from pagewire.kernels.layer import Layer, LayerNorm, Norm
from pagewire.kernels.stack import Stack
from pagewire.workers.collective.interface import Collective
from pagewire.workers.model.dense import Dense
from pagewire.workers.model.encoder import EncoderModel
from pagewire.workers.model.encoder_stack import EncoderEmbeddings, EncoderStack
from pagewire.workers.model.loaded import LoadedModel
from pagewire.workers.model.pooler import Pooler
from pagewire.workers.model.pooling_model import PoolingModel
from pagewire.workers.model.pooling_spec import PoolingSpec, TokenHead
from pagewire.workers.model.stack import DecoderStack
from pagewire.workers.weight_cache.forms import BY_NAME, FORMS, Form, NotStoredError, add_form
from pagewire.workers.weight_cache.stack import (
    KeptModel,
    RestoredStack,
    kept,
    properties_of,
    vocabulary_of,
)


@dataclass(frozen=True)
class KeptEncoder:
    """An encoder's stack. offset: the position of a prompt's first token. angles: see `EncoderStack`."""

    norm: LayerNorm | None
    words: nn.Module
    positions: nn.Module | None
    token_types: nn.Module | None
    layers: list[Layer]
    input_norm: Norm | LayerNorm | None
    norm_first: bool
    angles: list[tuple[Tensor, Tensor]] | None
    offset: int


@dataclass(frozen=True)
class KeptPooling:
    """A proven model that pools."""

    properties: dict[str, Any]
    """All fields of `LoadedModel` but the model and its pooler."""
    base: KeptEncoder | KeptModel
    spec: PoolingSpec
    info: PoolingInfo
    dense: list[Dense]
    classifier: list[Dense] | None


for _kind in (KeptEncoder, KeptPooling, PoolingSpec, TokenHead, Dense):
    add_form(_kind)
FORMS[PoolingInfo] = BY_NAME[PoolingInfo.__name__] = Form(msgspec.structs.asdict, PoolingInfo)


class RestoredPooling(PoolingModel):
    """A causal stack whose hidden states are pooled, without transformers' module."""

    def __init__(self, kept: KeptModel, classifier: list[Dense] | None, ranks: Collective) -> None:
        restore(self, RestoredStack(kept, vocabulary_of(kept, ranks)), classifier)


class RestoredEncoder(EncoderModel):
    """An encoder, without transformers' module."""

    def __init__(self, kept: KeptEncoder, classifier: list[Dense] | None) -> None:
        embeddings = EncoderEmbeddings(kept.norm, kept.words, kept.positions, kept.token_types)
        stack = Stack(kept.input_norm, kept.layers, norm_first=kept.norm_first)
        base = EncoderStack(embeddings, stack, None)
        base.angles = kept.angles
        restore(self, base, classifier)
        self.use(kept.offset, packed=True)


def restore(model: PoolingModel, base: nn.Module, classifier: list[Dense] | None) -> None:
    """Set what `PoolingModel` has beside transformers' modules."""
    model.config = model.causal = None
    model.arithmetic = nullcontext
    model.guarded, model.head = False, None
    model.stage = model.cut = None
    model.base, model.classifier = base, classifier
    model.classifies = classifier is not None


def kept_pooling(loaded: LoadedModel) -> KeptPooling:
    """What a file keeps of a loaded model that pools.

    Raises:
        NotStoredError: it is more than a stack and linear layers on the CPU.
    """
    model, pooler = loaded.model, loaded.pooler
    assert isinstance(model, PoolingModel) and pooler is not None
    if model.classifies and model.classifier is None:
        raise NotStoredError("its scores are computed by transformers' code")
    if isinstance(model.base, DecoderStack):
        base: KeptEncoder | KeptModel = kept(loaded)
    elif isinstance(model, EncoderModel) and isinstance(model.base, EncoderStack):
        base = kept_encoder(model, model.base)
    else:
        raise NotStoredError("its layers are no stack")
    classifier = None if model.classifier is None else list(model.classifier)
    spec = replace(pooler.spec, dense=())
    return KeptPooling(properties_of(loaded), base, spec, pooler.info, list(pooler.dense), classifier)


def kept_encoder(model: EncoderModel, base: EncoderStack) -> KeptEncoder:
    """What a file keeps of an encoder.

    Raises:
        NotStoredError: its layers are not compiled as a whole.
    """
    if base.stack.compiled is None:
        raise NotStoredError("its layers are not compiled as a whole")
    tables = base.embeddings
    return KeptEncoder(
        norm=tables.norm,
        words=tables.word_embeddings,
        positions=tables.position_embeddings,
        token_types=tables.token_type_embeddings,
        layers=list(base.stack.layers),
        input_norm=base.stack.input_norm,
        norm_first=base.stack.norm_first,
        angles=base.angles,
        offset=model.offset,
    )


def pooling_loaded_again(kept: KeptPooling, ranks: Collective) -> LoadedModel:
    """The loaded model of which this was kept, by the same rank of a group of the same size.

    Raises:
        ValueError, TypeError: its parts do not fit each other.
    """
    model: PoolingModel
    if isinstance(kept.base, KeptEncoder):
        model = RestoredEncoder(kept.base, kept.classifier)
    else:
        model = RestoredPooling(kept.base, kept.classifier, ranks)
    pooler = Pooler(kept.spec, kept.info, model, kept.dense, kept.properties["dtype"])
    return LoadedModel(model=model, pooler=pooler, **kept.properties)
