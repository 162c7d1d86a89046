"""Builds the module of a model, with the source of its weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from pagewire.ipc.gguf.file import is_gguf
from pagewire.ipc.worker_messages import WorkerConfig
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.model.checkpoint import Checkpoint
from pagewire.workers.model.conversion import check_report
from pagewire.workers.model.gguf import GgufCheckpoint
from pagewire.workers.model.headers import weight_files
from pagewire.workers.model.weights import CheckpointWeights, Weights

logger = logging.getLogger("pagewire.worker")

DUMMY_SEED = 0


def build_module(worker_config: WorkerConfig, config: Any, dtype: torch.dtype, device: Device) -> Weights:
    """The causal module of a configuration, and its weights: as a rule still in the checkpoint.

    Raises:
        LoadError: not a causal language model, weights missing or broken, or code that may not be run.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        if worker_config.load_format == "dummy":
            torch.manual_seed(DUMMY_SEED)
            with device.torch_device:  # random weights are made a hundred times faster on a GPU
                return Weights(_from_config(worker_config, config, dtype))
        reason = _read_by_transformers(worker_config, config)
        if reason is None:
            try:
                return _on_meta(worker_config, config, dtype)
            except (ImportError, AttributeError, TypeError) as error:
                reason = f"this version has other tables for converting checkpoints ({first_line(error)})"
        logger.info("transformers reads the whole checkpoint at once: %s", reason)
        return Weights(_from_pretrained(worker_config, config, dtype))
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"cannot load {worker_config.model_path}: {first_line(error)}") from error


def _read_by_transformers(worker_config: WorkerConfig, config: Any) -> str | None:
    """Why the weights are not read one by one; None if they are."""
    if worker_config.load_format == "pt":
        return "load_format is 'pt'"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if worker_config.trust_remote_code and getattr(config, "auto_map", None):
        return "the model runs the code of its repository"
    return None


def _options(worker_config: WorkerConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "trust_remote_code": worker_config.trust_remote_code,
    }


def _from_config(worker_config: WorkerConfig, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, **_options(worker_config, dtype)).eval()


def _on_meta(worker_config: WorkerConfig, config: Any, dtype: torch.dtype) -> Weights:
    """The module on the meta device, with only its buffers in memory.

    Raises:
        ImportError, AttributeError, TypeError: transformers' tables are not those of the versions tested.
    """
    path = worker_config.model_path
    checkpoint = GgufCheckpoint(path, config) if is_gguf(path) else Checkpoint(path)
    with torch.device("meta"):
        causal = _from_config(worker_config, config, dtype)
    return CheckpointWeights(causal, checkpoint, dtype)


def _from_pretrained(worker_config: WorkerConfig, config: Any, dtype: torch.dtype) -> Any:
    """The module with all its weights, by transformers' own loader."""
    from transformers import AutoModelForCausalLM

    if is_gguf(worker_config.model_path):
        raise LoadError("GGUF files need the tables for converting checkpoints of transformers 5 or later")
    pickles = worker_config.load_format == "pt"
    if not pickles:
        weight_files(Path(worker_config.model_path))
    module, report = AutoModelForCausalLM.from_pretrained(
        worker_config.model_path,
        config=config,
        use_safetensors=not pickles,
        local_files_only=True,
        output_loading_info=True,
        **_options(worker_config, dtype),
    )
    check_report(config.model_type, report["missing_keys"], report["unexpected_keys"])
    return module.eval()
