"""Builds the module of a model, with the source of its weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pagewire.ipc.files.model_configs import read_foreign
from pagewire.ipc.gguf.file import is_gguf
from pagewire.ipc.quantization import DEQUANTIZE, GGUF, resolve_quantization, settings_of
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.linear import multiplies_floats
from pagewire.workers.adapters.merge import Merge
from pagewire.workers.checkpoint.conversion import check_report
from pagewire.workers.checkpoint.formats.format import Format
from pagewire.workers.checkpoint.formats.online import online
from pagewire.workers.checkpoint.formats.quantised import QuantisedCheckpoint
from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.checkpoint.gguf.reader import GgufCheckpoint
from pagewire.workers.checkpoint.headers import weight_files
from pagewire.workers.checkpoint.mapped import MappedCheckpoint
from pagewire.workers.checkpoint.replaced import files_of
from pagewire.workers.checkpoint.source import Checkpoint, WeightSource
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.module.configuration import resolve_max_model_len
from pagewire.workers.module.refusals import refuse
from pagewire.workers.module.registered import registered_class
from pagewire.workers.module.replaced_methods import replace_methods
from pagewire.workers.module.text_base import takes_more_than_text
from pagewire.workers.module.weights import CheckpointWeights, Quantise, Weights, dequantised, keep
from pagewire.workers.network.rehearsal import rehearse
from pagewire.workers.seq2seq.methods import replace_coders

logger = logging.getLogger("pagewire.worker")

DUMMY_SEED = 0
APART = {"llama4"}
"""Types of models with pictures whose language model is a causal one within, and is loaded without the rest."""


class ModelClass(NamedTuple):
    """The class of transformers that makes a model's module: its name, and whether it has a head."""

    name: str
    has_head: bool = True

    def load(self, config: Any) -> Any:
        """The class for a model of this configuration.

        A language model that takes pictures or sound as well is made as a whole, for so its checkpoint names its
        parts, unless it is `APART`.

        Raises:
            LoadError: transformers has no language model of this type, or the registered class cannot be used.
        """
        import transformers

        registered = registered_class({"architectures": config.architectures})
        if registered is not None and self._is_own(config.architectures[0]):
            return OwnClass(registered, self.has_head)
        own = getattr(transformers, self.name)
        if self.name != CAUSAL.name or getattr(config, "auto_map", None):
            return own
        if takes_more_than_text(config) and config.model_type not in APART and not config.is_encoder_decoder:
            for wider in (transformers.AutoModelForImageTextToText, transformers.AutoModelForSeq2SeqLM):
                if type(config) in wider._model_mapping:  # the second has those that hear
                    return wider
        if type(config) in own._model_mapping:
            return own
        raise refuse(config, f"transformers has no language model of the type {config.model_type!r}")

    def _is_own(self, architecture: str) -> bool:
        """True if a class that is registered under this name makes modules of this kind.

        Those of the other kinds are made by transformers, where it has a class for the configuration.
        """
        return self in (CAUSAL, BASE) or architecture.endswith(self.name.removeprefix("AutoModel"))


@dataclass(frozen=True)
class OwnClass:
    """A class that is registered for an architecture, with the methods of transformers' `AutoModel` classes.

    has_head: modules of the class are made as they are; otherwise the base models in them.
    """

    own: Any
    has_head: bool

    def from_config(self, config: Any, *, trust_remote_code: bool, **options: Any) -> Any:
        """A module of a configuration, with random weights."""
        return self._part(self.own._from_config(config, **options))

    def from_pretrained(self, path: str, *, trust_remote_code: bool, **options: Any) -> Any:
        """A module with the weights of a checkpoint, and a report of missing ones."""
        module, report = self.own.from_pretrained(path, **options)
        return self._part(module), report

    def _part(self, module: Any) -> Any:
        return module if self.has_head else module.base_model


CAUSAL = ModelClass("AutoModelForCausalLM")
SEQ2SEQ = ModelClass("AutoModelForSeq2SeqLM")
SPEECH = ModelClass("AutoModelForSpeechSeq2Seq")
BASE = ModelClass("AutoModel", has_head=False)
CLASSIFIER = ModelClass("AutoModelForSequenceClassification")
TOKEN_CLASSIFIER = ModelClass("AutoModelForTokenClassification")


def build_module(
    worker_config: WorkerConfig,
    config: Any,
    dtype: torch.dtype,
    device: Device,
    kind: ModelClass = CAUSAL,
    *,
    integers_only: bool = False,
) -> Weights:
    """The module of a configuration, and its weights: as a rule still in the checkpoint.

    integers_only: 8-bit floats are held as integers also where the device multiplies with them.

    Raises:
        LoadError: not a model of this kind, weights missing or broken, a quantisation that is not served or is
            not the checkpoint's, or code that may not be run.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    keeps_floats = not integers_only and multiplies_floats(dtype, device.torch_device)
    try:
        form, quantise = quantisation(worker_config, config, keeps_floats)
        if worker_config.merged_adapter:
            check_merges(worker_config, config, form)
            merge = Merge.of(worker_config.merged_adapter)
            weights = _on_meta(worker_config, config, dtype, None, merge.before(quantise), kind)
            merge.check(weights.causal)
            return weights
        if worker_config.load_format == "dummy":
            return _random(worker_config, config, dtype, device, quantise, kind)
        reason = read_by_transformers(worker_config, config)
        if reason is None:
            try:
                return _on_meta(worker_config, config, dtype, form, quantise, kind, keeps_floats)
            except (ImportError, AttributeError, TypeError) as error:
                reason = f"this version has other tables for converting checkpoints ({first_line(error)})"
        if form is not None:
            raise LoadError(f"a checkpoint quantised with {form.name} cannot be read as a whole: {reason}")
        logger.info("transformers reads the whole checkpoint at once: %s", reason)
        return Weights(_from_pretrained(worker_config, config, dtype, kind), quantise)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"cannot load {worker_config.model_path}: {first_line(error)}") from error


def check_merges(worker_config: WorkerConfig, config: Any, form: Format | None) -> None:
    """Refuse weights to which no adapter can be added. form: of a quantised checkpoint.

    Raises:
        LoadError: they are quantised, random, or not read one by one.
    """
    if form is not None or is_gguf(worker_config.model_path):
        raise LoadError(
            "an adapter cannot be merged into quantised weights, whose numbers would be rounded anew; serve it "
            "with enable_lora instead"
        )
    reason = read_by_transformers(worker_config, config)
    if reason is not None or worker_config.load_format == "dummy":
        raise LoadError(f"an adapter cannot be merged: {reason or 'the weights are random'}")


def quantisation(
    worker_config: WorkerConfig, config: Any, keeps_floats: bool = False
) -> tuple[Format | None, Quantise]:
    """The format of a quantised checkpoint, and what becomes of matrices while they are read.

    Dense ones may be quantised, and quantised ones made dense.

    keeps_floats: matrices that are quantised to 8-bit floats while they are read are held as such.

    Transformers' own readers of quantised checkpoints are never used: the settings are removed from `config`.

    Raises:
        LoadError, ValueError: a format that is not served, or another one than `WorkerConfig.quantization` names.
    """
    own = vars(config).pop("quantization_config", None)
    own = own.to_dict() if hasattr(own, "to_dict") else own
    settings = settings_of(worker_config.model_path, {"quantization_config": own})
    chosen = resolve_quantization(worker_config.quantization, worker_config.load_format, settings)
    if settings is None:
        return None, keep if chosen is None else online(chosen, keeps_floats)
    becomes = dequantised if chosen == DEQUANTIZE else keep
    if settings is GGUF:
        return None, becomes  # a source of weights of its own
    if worker_config.load_format == "dummy":
        logger.info("load_format is 'dummy': random weights are plain numbers, not quantised with %s", chosen)
        return None, keep
    return format_of(settings), becomes


def _random(
    worker_config: WorkerConfig,
    config: Any,
    dtype: torch.dtype,
    device: Device,
    quantise: Quantise,
    kind: ModelClass,
) -> Weights:
    torch.manual_seed(DUMMY_SEED)
    with device.torch_device:  # random weights are made a hundred times faster on a GPU
        return Weights(_from_config(worker_config, config, dtype, kind), quantise)


def read_by_transformers(worker_config: WorkerConfig, config: Any) -> str | None:
    """Why the weights are not read one by one; None if they are."""
    if worker_config.load_format == "pt":
        return "load_format is 'pt'"
    if getattr(config, "auto_map", None):
        return "the model runs the code of its repository"
    return None


def _options(worker_config: WorkerConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "trust_remote_code": worker_config.trust_remote_code,
    }


def _from_config(worker_config: WorkerConfig, config: Any, dtype: torch.dtype, kind: ModelClass) -> Any:
    return _changed(kind.load(config).from_config(config, **_options(worker_config, dtype)).eval(), kind)


def _changed(module: Any, kind: ModelClass) -> Any:
    """transformers' module as the worker runs it: with our methods, without what no checkpoint needs to have."""
    if not kind.has_head and getattr(module, "pooler", None) is not None:
        module.pooler = None  # of BERT: made for its classifier, and not in every checkpoint
    if not hasattr(module, module.base_model_prefix) and isinstance(
        getattr(module, "model", None), nn.Module
    ):
        module.base_model_prefix = (
            "model"  # Llama 4's class names the part of a checkpoint that has all of it
        )
    replace_methods(module)
    replace_coders(module)
    return module


def _on_meta(
    worker_config: WorkerConfig,
    config: Any,
    dtype: torch.dtype,
    form: Format | None,
    quantise: Quantise,
    kind: ModelClass,
    keeps_floats: bool = False,
) -> Weights:
    """The module on the meta device, with only its buffers in memory.

    Raises:
        ImportError, AttributeError, TypeError: transformers' tables are not those of the versions tested.
    """
    source = weight_source(worker_config, config, form, keeps_floats)
    causal = module_on_meta(worker_config, config, dtype, kind)
    if kind is CAUSAL:
        rehearse(causal, resolve_max_model_len(worker_config, config))
    is_part = not kind.has_head or config.model_type in APART
    return CheckpointWeights(causal, source, dtype, quantise, with_heads=is_part)


def weight_source(
    worker_config: WorkerConfig, config: Any, form: Format | None, keeps_floats: bool = False
) -> WeightSource:
    """The weights of the checkpoint that a configuration names, and of the files that replace some of them.

    form: in which it is quantised. keeps_floats: see `QuantisedCheckpoint`.

    Raises:
        LoadError: a file is missing or broken, or the format refuses the checkpoint.
    """
    path = worker_config.model_path
    if is_gguf(path):
        return GgufCheckpoint(path, config)
    checkpoint = Checkpoint(path, files_of(worker_config))
    source = checkpoint if form is None else QuantisedCheckpoint(checkpoint, form, keeps_floats)
    foreign = read_foreign(Path(path), worker_config.trust_remote_code)
    return source if foreign is None else MappedCheckpoint(source, foreign)


def module_on_meta(
    worker_config: WorkerConfig, config: Any, dtype: torch.dtype, kind: ModelClass = CAUSAL
) -> Any:
    """The module of a configuration without memory for its weights."""
    with torch.device("meta"):
        module = _from_config(worker_config, config, dtype, kind)
    for child in module.modules():
        for name, own in child._parameters.items():
            if (
                own is not None and own.device.type != "meta"
            ):  # torch.normal has made it, on the CPU in any context
                child._parameters[name] = nn.Parameter(own.detach().to("meta"), requires_grad=False)
    return module


def _from_pretrained(worker_config: WorkerConfig, config: Any, dtype: torch.dtype, kind: ModelClass) -> Any:
    """The module with all its weights, by transformers' own loader."""
    if is_gguf(worker_config.model_path):
        raise LoadError("GGUF files need the tables for converting checkpoints of transformers 5 or later")
    if worker_config.weights:
        raise LoadError("weights that replace others are read one by one, and transformers reads all at once")
    pickles = worker_config.load_format == "pt"
    if read_foreign(Path(worker_config.model_path), worker_config.trust_remote_code) is not None:
        raise LoadError(
            "a file of pickles has no weights that are read one by one, as those of this family must be, for they "
            "have names of their own: save them as safetensors"
        )
    if not pickles:
        weight_files(Path(worker_config.model_path))
    module, report = kind.load(config).from_pretrained(
        worker_config.model_path,
        config=config,
        use_safetensors=not pickles,
        local_files_only=True,
        output_loading_info=True,
        **_options(worker_config, dtype),
    )
    unexpected = report["unexpected_keys"] if kind.has_head else ()
    check_report(config.model_type, report["missing_keys"], unexpected)
    return _changed(module.eval(), kind)
