"""Loads a model: reads the checkpoint, replaces modules by faster ones, and checks the resulting logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pagewire.ipc.heap import release_spare_memory
from pagewire.ipc.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu.memory import forget_mapped_files
from pagewire.kernels.experts import GroupedExperts
from pagewire.workers.checkpoint.kv_scales import kv_scales
from pagewire.workers.collective.agreement import all_have
from pagewire.workers.collective.interface import Collective
from pagewire.workers.collective.parts import shards_of
from pagewire.workers.collective.turns import own_turn
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import DisprovenError, LoadError
from pagewire.workers.model import attention
from pagewire.workers.model.attention import KVShape
from pagewire.workers.model.encoder_stack import EncoderStack
from pagewire.workers.model.experts import pack_experts
from pagewire.workers.model.layer_configs import head_dims
from pagewire.workers.model.loaded import LoadedModel, Phases
from pagewire.workers.model.model import (
    Model,
    load_config,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
)
from pagewire.workers.model.modules import build_module
from pagewire.workers.model.parallel_layers import fit_modules
from pagewire.workers.model.proof import DryRun, check_config, expected_logits, prove
from pagewire.workers.model.sharded_state import ShardedState
from pagewire.workers.model.shards import Shards
from pagewire.workers.model.shares import stage_layers
from pagewire.workers.model.stack import DecoderStack, build_stack
from pagewire.workers.model.stage_cut import CutBase, check_cuts
from pagewire.workers.model.stages import Stage
from pagewire.workers.model.text_base import takes_more_than_text
from pagewire.workers.model.transforms import (
    LinearModule,
    QuantisedEmbedding,
    pack_embeddings,
    pack_linears,
    replace_norms,
    short_length,
    tabulate_rotary,
)
from pagewire.workers.model.weights import Weights

logger = logging.getLogger("pagewire.worker")


@torch.inference_mode()
def load_model(
    worker_config: WorkerConfig, phases: Phases, device: Device, collective: Collective
) -> LoadedModel:
    """Load, transform and prove the model of `worker_config`, or the part of it that a rank of a group has.

    All ranks call this together, since the proof needs their parts.

    Raises:
        LoadError: the model cannot be loaded or is not supported; the text says why.
    """
    import transformers.modeling_utils  # noqa: F401 - slow, so imported within this phase

    phases.end("import")
    config = load_config(worker_config)
    check_config(config)
    dtype = resolve_dtype(worker_config.dtype, config)
    kv_dtype = resolve_kv_dtype(worker_config.kv_cache_dtype, dtype, device)
    scales = kv_scales(worker_config, kv_dtype, config.get_text_config().num_hidden_layers)
    max_model_len = resolve_max_model_len(worker_config.max_model_len, config)
    phases.end("config")
    if takes_more_than_text(config):
        logger.info("%s is served for text only: pictures, videos and sound are not taken", config.model_type)
    is_saved = worker_config.load_format == "sharded_state"
    stage = own_stage(worker_config.parallel, collective, config, dtype, device)
    saved = ShardedState(worker_config, config, collective, stage) if is_saved else None
    weights = build_module(worker_config, config, dtype, device) if saved is None else saved.weights(dtype)
    device.prepare(dtype, kv_dtype, head_dims(config))
    causal = weights.causal
    architecture = type(causal).__name__
    shards = weights.shards or own_shards(causal, collective, worker_config.parallel)
    phases.end("weights")
    vocab_size = causal.get_output_embeddings().weight.shape[0] if causal.get_output_embeddings() else 0
    run, expected = DryRun.make(config.get_text_config().vocab_size, max_model_len), None
    if saved is not None:
        run, expected = saved.reference()
    num_positions = max(max_model_len, run.end)
    run = replace(run, short_length=short_length(causal, num_positions))
    if expected is None:
        expected = expected_logits(weights, run, dtype, device, collective)
    tabulate_rotary(causal, num_positions, run.short_length)
    forget_mapped_files(worker_config.model_path)  # packing reads them again
    phases.end("reference")
    if shards is not None:
        weights.divide(shards)
    turn = partial(own_turn, collective, worker_config.parallel)
    make = partial(Model, stage=stage)
    model, shapes = transform(weights, run, expected, max_model_len, device, collective, turn, make)
    forget_mapped_files(worker_config.model_path)
    release_spare_memory()
    for note, count in weights.notes.items():
        logger.info("weights of %d products: %s", count, note)
    phases.end("transform")
    return LoadedModel(
        model=model,
        architecture=architecture,
        dtype=dtype,
        vocab_size=vocab_size or expected[0].shape[-1],
        max_model_len=max_model_len,
        short_length=run.short_length,
        eos_token_id=end_of_sequence(config),
        kv_shapes=[replace(shape, dtype=kv_dtype) for shape in shapes],
        kv_scales=scales,
        weight_bytes=weight_bytes(model),
        cuts={} if shards is None else shards.cuts,
    )


def own_stage(
    parallel: Parallel, collective: Collective, config: Any, dtype: torch.dtype, device: Device
) -> Stage | None:
    """The stage of a rank in a pipeline; None if there is one stage only.

    Raises:
        LoadError: the layers cannot be divided so.
    """
    if parallel.stages == 1:
        return None
    text = config.get_text_config()
    check_cuts(config)
    layers = stage_layers(text.num_hidden_layers, parallel)
    return Stage(
        *(layers, parallel.stage, parallel.stages, collective, text.hidden_size, dtype, device.torch_device)
    )


def own_shards(causal: Any, collective: Collective, parallel: Parallel) -> Shards | None:
    """What a rank has of each layer of its stage; None if that is all.

    Raises:
        LoadError: the layers cannot be divided so.
    """
    return None if parallel.num_shards == 1 else Shards(causal, shards_of(collective, parallel))


def end_of_sequence(config: Any) -> int | None:
    """The main end-of-sequence token of a configuration; None if it has none."""
    eos = getattr(config.get_text_config(), "eos_token_id", None)
    return eos[0] if isinstance(eos, list) and eos else eos if isinstance(eos, int) else None


def transform(
    weights: Weights,
    run: DryRun,
    expected: list[torch.Tensor],
    max_model_len: int,
    device: Device,
    collective: Collective,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    make: Callable[[Any, bool], Model] = Model,
) -> tuple[Model, list[KVShape]]:
    """Replace the module by a `DecoderStack` if that is possible, else part by part, and prove the result.

    turn: a context for packing, which takes memory. make: the model of a module whose attention is replaced.

    Raises:
        LoadError: the proof fails.
    """
    attention.register()
    causal = weights.causal
    causal.set_attn_implementation(attention.NAME)
    model = make(causal, device.batch_invariant)

    def proven() -> tuple[Model, list[KVShape]]:
        if model.makes_logits:
            model.shorten_logits()  # from here on the ranks of a group wait for each other
        return model, prove(model, run, expected, weights.schemes, max_model_len, device, collective)

    base, others = model.base, dict(causal.named_children())

    def pack_stack() -> bool:
        stack = build_stack(base, weights, device.torch_device, model.stage)
        if stack is None:
            return False
        model.base = stack.to(device.torch_device)
        transform_head(model, weights, device.torch_device)
        return True

    try:
        with turn():
            is_stack = pack_stack()
    except LoadError:
        is_stack = False
    # What one rank cannot pack, such as groups of columns that only its part cuts, none runs as a stack.
    if all_have(is_stack, collective, device.torch_device):
        # An error of one rank alone ends the group, for others wait for what this one would send.
        with suppress(LoadError if collective.size == 1 else DisprovenError):
            return proven()
    model.base, model.head = base, None
    for name, child in others.items():
        setattr(causal, name, child)
    with turn():
        transform_base(model, weights, device.torch_device)
        transform_head(model, weights, device.torch_device)
    return proven()


def transform_base(model: Model, weights: Weights, device: torch.device) -> None:
    """Transform the base of a model part by part, or what a rank has of it."""
    base: Any = model.base
    model.guarded = True
    if weights.shards is not None:
        fit_modules(base, model.base_path, weights.shards)
    if model.stage is not None:
        model.cut = CutBase(base, base.get_input_embeddings(), model.stage)
    transform_parts(base, weights, device)


def transform_head(model: Model, weights: Weights, device: torch.device) -> None:
    """Transform what makes logits of hidden states; a stage before the last drops it."""
    causal = model.causal  # without its base
    if model.makes_logits:
        transform_parts(causal, weights, device)
        return
    for name, _ in list(causal.named_children()):
        setattr(causal, name, nn.Identity())


def transform_parts(module: torch.nn.Module, weights: Weights, device: torch.device) -> None:
    """Replace linears, experts and norms, and keep the module's own forward; the result is on a device."""
    pack_experts(module, weights, device)
    pack_embeddings(module, weights, device)
    pack_linears(module, weights, device)
    weights.fill(module)
    module.to(device)
    replace_norms(module)


def weight_bytes(model: Model) -> int:
    """Bytes of all weights, including packed ones."""
    return module_bytes([model.base, model.causal])


def module_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all weights of modules, including packed ones."""
    total, seen = 0, set()
    for module in modules:
        if isinstance(module, DecoderStack | EncoderStack):
            total += module.num_bytes
        for child in module.modules():
            if isinstance(child, LinearModule):
                total += child.product.num_bytes
            if isinstance(grouped := getattr(child, "grouped", None), GroupedExperts):
                total += grouped.num_bytes
            if isinstance(child, QuantisedEmbedding):
                total += child.num_bytes
        for parameter in module.parameters():
            if parameter.device.type != "meta" and parameter.data_ptr() not in seen:
                seen.add(parameter.data_ptr())
                total += parameter.nbytes
    return total
