"""Reads a model's configuration: its dtypes, its length, its main token, the settings of each layer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch

from pagewire.ipc.counts import check_counts
from pagewire.ipc.files.hub import read_json
from pagewire.ipc.files.model_configs import read_configs, read_foreign
from pagewire.ipc.gguf.file import is_gguf
from pagewire.ipc.positions import MAX_POSITIONS, too_long
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu.library import expected_isa
from pagewire.kernels.data.kv_codes import CODES, EIGHT_BITS, FOUR_BITS
from pagewire.workers.device.auto_dtype import auto_dtype
from pagewire.workers.device.interface import Device
from pagewire.workers.device.machine import runs_on_cpu
from pagewire.workers.errors import LoadError
from pagewire.workers.module.registered import registered_class
from pagewire.workers.module.structure import DEFAULT_POSITIONS, NUM_EXPERTS, WINDOWS
from pagewire.workers.versions import INDEXED_KINDS, check_model_type, runs_repository_code

logger = logging.getLogger("pagewire.worker")

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
KV_DTYPES = {
    "int8": EIGHT_BITS,
    "int4": FOUR_BITS,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

ATTENTION_LAYERS = {"full_attention", "attention", "hybrid", *WINDOWS}
"""Types of layers that attend."""
STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Types of layers that keep states."""
FEED_FORWARD_LAYERS = {"mlp", "moe"}


def load_config(worker_config: WorkerConfig) -> Any:
    """The model's transformers configuration, built with `hf_overrides` merged in.

    Raises:
        LoadError: no config.json or GGUF file, an unknown model type, or one that is not a causal language model.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import pagewire.workers.module.own_models  # noqa: F401 - makes models known to transformers

    is_file = is_gguf(worker_config.model_path)
    if not is_file and not (Path(worker_config.model_path) / "config.json").is_file():
        raise LoadError(f"{worker_config.model_path} holds no config.json: not a Hugging Face model folder")
    path, trusts = Path(worker_config.model_path), worker_config.trust_remote_code
    try:
        values = read_configs(path, trusts)[0] | worker_config.hf_overrides
        check_counts(values)
        if runs_repository_code(values, trusts):
            return AutoConfig.from_pretrained(path, trust_remote_code=True, **worker_config.hf_overrides)
        check_model_type(values)
        values.pop("auto_map", None)
        if (own := registered_class(values)) is not None:
            settings = {name: value for name, value in values.items() if name != "model_type"}
            return _with_rotary(own.config_class.from_dict(settings), worker_config)
        if is_file or read_foreign(path, trusts) is not None:
            return _with_rotary(CONFIG_MAPPING[values["model_type"]].from_dict(values), worker_config)
        quantised = {name: values[name] for name in ("quantization_config",) if name in values}
        values = PretrainedConfig.get_config_dict(path)[0] | worker_config.hf_overrides | quantised
        kind = values.get("model_type")
        if kind in CONFIG_MAPPING:
            values.pop("auto_map", None)
            return _with_rotary(CONFIG_MAPPING[kind].from_dict(values), worker_config)
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **worker_config.hf_overrides)
    except LoadError:
        raise
    except Exception as error:
        source = "the metadata" if is_file else "config.json"
        raise LoadError(f"{source} of {worker_config.model_path} cannot be used: {error}") from error


def log_code(worker_config: WorkerConfig, config: Any) -> None:
    """Write one line to the log of the group's first rank that says whose code runs, if the repository has its own.

    config: the model's.
    """
    path = Path(worker_config.model_path)
    if worker_config.parallel.rank or is_gguf(path) or "auto_map" not in read_json(path / "config.json"):
        return
    if getattr(config, "auto_map", None):
        logger.info("the model runs the code of its repository (trust_remote_code): nothing else serves it")
    else:
        logger.info(
            "the model runs as %s does here, without the code of its repository: that would run only where nothing "
            "else serves a model, and with trust_remote_code",
            config.model_type,
        )


def _with_rotary(config: Any, worker_config: WorkerConfig) -> Any:
    """The configuration, if it has the rotary embedding that overrides change.

    Raises:
        ValueError: it has none, so that the change would have no effect.
    """
    names = {"rope_parameters", "rope_scaling", "rope_theta"}
    text = config.get_text_config()
    changed = names & worker_config.hf_overrides.keys()
    without = text.model_type == "alibi_llama" or getattr(text, "alibi", False)
    if changed and (without or not any(hasattr(type(text)(), name) for name in names)):
        raise ValueError(
            f"{text.model_type} has no rotary embedding that {', '.join(sorted(changed))} changes"
        )
    return config


def checkpoint_dtype(config: Any) -> torch.dtype:
    """The dtype given in the checkpoint's configuration; float32 if there is none."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return DTYPES.get(str(dtype).removeprefix("torch."), torch.float32)


def resolve_dtype(worker_config: WorkerConfig, config: Any) -> torch.dtype:
    """The dtype of weights and activations. config: the model's.

    Raises:
        LoadError: an unknown name.
    """
    name = worker_config.dtype
    if name == "auto":
        own = str(checkpoint_dtype(config)).removeprefix("torch.")
        return DTYPES[auto_dtype(own, expected_isa() if runs_on_cpu(worker_config.device) else None)]
    if name not in DTYPES:
        raise LoadError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def log_dtype(worker_config: WorkerConfig, config: Any, dtype: torch.dtype) -> None:
    """Write one line to the log of the group's first rank if `dtype="auto"` means another than the checkpoint's."""
    own = checkpoint_dtype(config)
    if worker_config.dtype == "auto" and dtype != own and worker_config.parallel.rank == 0:
        before, after = (str(kind).removeprefix("torch.") for kind in (own, dtype))
        logger.info(
            "the checkpoint is in %s and runs in %s, which is faster here; --dtype %s keeps it",
            before,
            after,
            before,
        )


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: Device) -> torch.dtype:
    """The dtype of the KV cache of a model of `dtype`.

    Raises:
        LoadError: an unknown name, or a dtype that the device does not support.
    """
    if name != "auto" and name not in KV_DTYPES:
        raise LoadError(f"kv_cache_dtype must be one of auto, {', '.join(KV_DTYPES)}, got {name!r}")
    kv_dtype = KV_DTYPES.get(name, dtype)
    if kv_dtype in device.kv_dtypes(dtype):
        return kv_dtype
    if kv_dtype in CODES:
        raise LoadError(f"kv_cache_dtype {name!r} is for CPUs, not for {device.name}: 'fp8' has 8 bits there")
    instead = ": 'int8' has 8 bits there" if EIGHT_BITS in device.kv_dtypes(dtype) else ""
    raise LoadError(
        f"kv_cache_dtype {name!r} needs a model in bfloat16 or float16 on a GPU, "
        f"not {dtype} on {device.name}{instead}"
    )


def check_kv_heads(kv_dtype: torch.dtype, config: Any) -> None:
    """Refuse 4 bits for what has no kernels in them.

    Raises:
        LoadError: the model attends to latents, or two elements of its heads would not share a byte.
    """
    if kv_dtype != FOUR_BITS:
        return
    if latent_sizes(config):
        raise LoadError(
            f"kv_cache_dtype 'int4' is not for the latents of {config.model_type}: 'int8' keeps them in 8 bits"
        )
    if odd := sorted(size for size in head_dims(config) if size % 2):
        raise LoadError(
            f"kv_cache_dtype 'int4' needs attention heads of an even size, not {odd[0]} as in "
            f"{config.model_type}: 'int8' takes any"
        )


def resolve_max_model_len(worker_config: WorkerConfig, config: Any) -> int:
    """Maximum tokens of a request: as requested, or else the model's own limit (2048 if it has none).

    With `disable_sliding_window` it is at most the smallest window, so that none hides a key.

    Raises:
        LoadError: `max_model_len` exceeds that window, or the model's limit without
            `PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN=1`.
    """
    text, requested = config.get_text_config(), worker_config.max_model_len
    limits = (getattr(text, name, None) for name in MAX_POSITIONS)
    model_limit = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    windows = [size for _, size in filter(None, layer_windows(config))]
    if worker_config.disable_sliding_window and windows:
        model_limit = min(*windows, model_limit or windows[0])
        if requested is not None and requested > model_limit:
            raise LoadError(
                f"max_model_len {requested} exceeds the {model_limit} tokens up to which disable_sliding_window "
                "serves this model"
            )
    if requested is None:
        return model_limit or DEFAULT_POSITIONS
    if (why := too_long(requested, model_limit)) is not None:
        raise LoadError(why)
    return requested


def end_of_sequence(config: Any) -> int | None:
    """The main end-of-sequence token of a configuration; None if it has none."""
    eos = getattr(config.get_text_config(), "eos_token_id", None)
    return eos[0] if isinstance(eos, list) and eos else eos if isinstance(eos, int) else None


def layer_configs(config: Any) -> Sequence[Any]:
    """The configuration of each decoder layer, with its own heads, window and widths. config: of the model."""
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return text.per_layer_config  # type: ignore[no-any-return]
    if heads := getattr(text, "num_attention_heads_per_layer", None):  # Laguna's
        own = {count: copy(text) for count in set(heads)}
        for count, settings in own.items():
            settings.num_attention_heads = count
        return [own[count] for count in heads]
    return [text] * num_decoder_layers(config)


def num_decoder_layers(config: Any) -> int:
    """The number of layers that generate."""
    if getattr(config, "is_encoder_decoder", False):  # `num_hidden_layers` is the encoder's
        own = (getattr(config, name, None) for name in ("decoder_layers", "num_decoder_layers"))
        return next(number for number in own if isinstance(number, int))
    number: int = config.get_text_config().num_hidden_layers
    return number


def layer_windows(config: Any) -> list[tuple[str, int] | None]:
    """The name and the value of the setting that says how many keys a query of each layer sees; None: of all."""
    windows: list[tuple[str, int] | None] = []
    for layer, own in enumerate(layer_configs(config)):
        kinds = getattr(own, "layer_types", None) or getattr(own, "attention_layers", None)
        name = WINDOWS.get("sliding_attention" if kinds is None else kinds[layer])
        size = None if name is None else getattr(own, name, None)
        windows.append(None if name is None or size is None else (name, size))
    return windows


def head_dims(config: Any) -> set[int]:
    """The sizes of the attention heads in a model's layers without latents; empty if none has such a setting."""
    attending = [own for own in attending_configs(config) if not getattr(own, "kv_lora_rank", None)]
    sizes = [
        (own, getattr(own, "head_dim", None), getattr(own, "num_attention_heads", None)) for own in attending
    ]
    return {head_dim or own.hidden_size // heads for own, head_dim, heads in sizes if head_dim or heads}


def attending_configs(config: Any) -> list[Any]:
    """The configurations of the layers that attend."""
    layers = layer_configs(config)
    kinds = getattr(config.get_text_config(), "layer_types", None) or [None] * len(layers)
    others = (STATE_LAYERS | FEED_FORWARD_LAYERS) - ATTENTION_LAYERS  # their heads are other ones
    return [own for own, kind in zip(layers, kinds, strict=True) if kind not in others]


def latent_sizes(config: Any) -> dict[tuple[int, int], int]:
    """The elements of layers' latents as keys and as values, to those of the keys that they expand to."""
    sizes = {}
    for own in attending_configs(config):
        if rank := getattr(own, "kv_lora_rank", None):
            nope, rope = (getattr(own, f"qk_{part}_head_dim", None) or 0 for part in ("nope", "rope"))
            sizes[rank + rope, rank] = nope + rope
    return sizes


def indexed_latents(config: Any, max_len: int) -> set[tuple[int, int]]:
    """The sizes of latents, as in `latent_sizes`, among which an indexer chooses the keys that a token sees.

    max_len: tokens of a request; none of these has to choose if they are no more than it may see.
    """
    text = config.get_text_config()
    num_chosen = getattr(text, "index_topk", None)
    if num_chosen is None or max_len <= num_chosen:
        return set()
    layers = layer_configs(config)
    if kinds := getattr(text, "layer_types", None):  # else every layer chooses
        layers = [own for own, kind in zip(layers, kinds, strict=True) if kind in INDEXED_KINDS]
    return {(own.kv_lora_rank + own.qk_rope_head_dim, own.kv_lora_rank) for own in layers}


def has_experts(config: Any) -> bool:
    """True if a model's configuration says that some of its layers have experts."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in NUM_EXPERTS)


def state_layers(config: Any) -> list[str]:
    """The types of a model's layers that keep states."""
    return sorted(STATE_LAYERS & set(getattr(config.get_text_config(), "layer_types", None) or ()))
