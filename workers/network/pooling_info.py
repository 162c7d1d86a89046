"""What a model that pools says of itself, and what it may not be: its tasks, its length, its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.wire.pooling import PoolerConfig, PoolingInfo
from pagewire.ipc.wire.sources import SOUND, SourceInfo
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.workers.errors import LoadError
from pagewire.workers.module.configuration import resolve_max_model_len
from pagewire.workers.module.text_base import position_offset
from pagewire.workers.network.build_module import (
    BASE,
    CAUSAL,
    CLASSIFIER,
    SEQ2SEQ,
    SPEECH,
    TOKEN_CLASSIFIER,
    ModelClass,
)
from pagewire.workers.network.module_base import takes_token_types
from pagewire.workers.network.pooling_files import pools, read_spec
from pagewire.workers.network.pooling_spec import PoolingSpec

CLASSES: dict[str, ModelClass] = {
    "embed": BASE,
    "classify": CLASSIFIER,
    "token_classify": TOKEN_CLASSIFIER,
}


def spec_of(worker_config: WorkerConfig) -> PoolingSpec | None:
    """How the model of a configuration pools, by its options and its checkpoint; None if it generates.

    Raises:
        LoadError: the options contradict each other, or ask for ranks over which it cannot be divided.
    """
    try:
        values = (
            read_configs(Path(worker_config.model_path), worker_config.trust_remote_code)[0]
            | worker_config.hf_overrides
        )
    except ValueError:
        return None  # the file is broken, and loading says so
    if not pools(worker_config, values):
        return None
    spec = read_spec(worker_config, values)
    check_ranks(spec, worker_config.parallel)
    return spec


def module_class(spec: PoolingSpec | None, source: SourceInfo | None = None) -> ModelClass:
    """The class of transformers whose modules pool so; None: that of models which generate.

    source: of an encoder-decoder.
    """
    if source is not None:
        return SPEECH if source.kind == SOUND else SEQ2SEQ
    if spec is None:
        return CAUSAL
    return BASE if spec.head or spec.token_head else CLASSES[spec.kind]


def check_ranks(spec: PoolingSpec, parallel: Parallel) -> None:
    """Refuse ranks over which a model that pools cannot be divided.

    Raises:
        LoadError: stages of a pipeline, or an encoder over several ranks.
    """
    if parallel.stages > 1:
        raise LoadError(
            "a model that pools is not divided into stages, of which only the last has the states that are pooled: "
            "leave pipeline_parallel_size at 1 and use tensor_parallel_size"
        )
    if spec.encoder and parallel.num_shards > 1:
        raise LoadError(
            "an encoder runs in one worker, for there is no plan of how its layers are divided: leave "
            "tensor_parallel_size at 1, and start several engines behind `pagewire route`"
        )


def max_length(worker_config: WorkerConfig, config: Any, spec: PoolingSpec | None) -> int:
    """Maximum tokens of a request of a causal model.

    Raises:
        LoadError: `max_model_len` exceeds what the model has positions for.
    """
    if worker_config.max_model_len is None and spec is not None and spec.max_length is not None:
        return spec.max_length
    return resolve_max_model_len(worker_config, config)


def max_prompt(worker_config: WorkerConfig, config: Any, spec: PoolingSpec | None, base: Any) -> int:
    """Maximum tokens of a prompt of an encoder, or of a request of a decoder, whose base module has its positions.

    Raises:
        LoadError: `max_model_len` exceeds what the model has positions for.
    """
    limit, requested = max_positions(config, base), worker_config.max_model_len
    if limit is None:
        return max_length(worker_config, config, spec)
    if requested is not None and requested > limit:
        raise LoadError(f"max_model_len {requested} exceeds the model's limit of {limit} positions")
    if requested is None and spec is not None and spec.max_length is not None:
        return min(spec.max_length, limit)
    return requested or limit


def max_positions(config: Any, base: Any) -> int | None:
    """The tokens for which a module has positions; None where the configuration does not say."""
    value = getattr(config, "max_position_embeddings", None)
    return value - position_offset(base) if isinstance(value, int) and value > 0 else None


def pooling_info(
    spec: PoolingSpec, config: Any, settings: PoolerConfig | None, base: Any, size: int
) -> PoolingInfo:
    """What frontends and the core need to know of a model's pooling. size: of an embedding, or number of labels."""
    settings = settings or PoolerConfig()
    tasks = {
        "embed": ["token_embed"] if spec.per_token else ["embed", "token_embed"],
        "classify": ["classify", "token_classify"] if not spec.encoder else ["classify"],
        "token_classify": ["token_classify"],
    }[spec.kind]
    if spec.head:
        tasks = ["token_classify"]
    matryoshka = getattr(config, "matryoshka_dimensions", None) or []
    return PoolingInfo(
        tasks=tasks,
        pooling_type=spec.pooling_type,
        size=size,
        whole_prompts=spec.encoder,
        normalize=spec.normalize,
        activation=True if settings.activation is None else settings.activation,
        dimensions=settings.dimensions,
        matryoshka=bool(getattr(config, "is_matryoshka", False) or matryoshka),
        matryoshka_dimensions=list(matryoshka),
        labels=labels_of(spec, config, size),
        prompts=spec.prompts,
        default_prompt_name=spec.default_prompt_name,
        token_types=spec.encoder and takes_token_types(base),
        late_interaction=spec.per_token,
        lower_case=spec.lower_case,
        rewards_activated=spec.rewards_activated,
    )


def labels_of(spec: PoolingSpec, config: Any, size: int) -> list[str]:
    """The names of a classifier's classes."""
    if spec.kind == "embed":
        return []
    if spec.head or spec.token_head:
        return [f"LABEL_{i}" for i in range(size)]
    labels = getattr(config, "id2label", None) or {}
    return [str(labels[i]) for i in sorted(labels)]
