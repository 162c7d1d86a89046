"""Loads a model that pools: base or classifier, transformed and proven like one that generates, and its pooler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.heap import release_spare_memory
from pagewire.ipc.hub import read_configs
from pagewire.ipc.pooling import PoolerConfig, PoolingInfo
from pagewire.ipc.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu.memory import forget_mapped_files
from pagewire.kernels.paging import AttentionBatch
from pagewire.kernels.weight import Scheme
from pagewire.workers.checkpoint.kv_scales import kv_scales
from pagewire.workers.collective.interface import Collective
from pagewire.workers.collective.turns import own_turn
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.model import attention
from pagewire.workers.model.attention import KVShape
from pagewire.workers.model.encoder import EncoderModel, in_pages, max_positions, takes_token_types
from pagewire.workers.model.encoder_stack import EncoderStack, build_encoder_stack
from pagewire.workers.model.layer_configs import head_dims
from pagewire.workers.model.loaded import LoadedModel, Phases
from pagewire.workers.model.loading import (
    end_of_sequence,
    own_shards,
    transform,
    transform_parts,
    weight_bytes,
)
from pagewire.workers.model.model import (
    load_config,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
)
from pagewire.workers.model.modules import BASE, CLASSIFIER, TOKEN_CLASSIFIER, ModelClass, build_module
from pagewire.workers.model.pooler import Pooler
from pagewire.workers.model.pooling_heads import load_dense, load_head
from pagewire.workers.model.pooling_model import PoolingModel, base_of, position_offset
from pagewire.workers.model.pooling_spec import PoolingSpec, pools, read_spec
from pagewire.workers.model.proof import (
    DryRun,
    check_config,
    permitted_difference,
    reference,
    refuse,
    relative_difference,
)
from pagewire.workers.model.shards import Shards
from pagewire.workers.model.transforms import short_length, tabulate_rotary
from pagewire.workers.model.weights import Weights

LENGTHS = (20, 9)  # tokens of the prompts by which an encoder is proven
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CLASSES: dict[str, ModelClass] = {
    "embed": BASE,
    "classify": CLASSIFIER,
    "token_classify": TOKEN_CLASSIFIER,
}


def is_pooling(worker_config: WorkerConfig) -> bool:
    """True if the model of a configuration is to pool, by its options and its checkpoint.

    Raises:
        LoadError: the options contradict each other.
    """
    try:
        values = settings_of(worker_config)
    except ValueError:
        return False  # the file is broken, and loading says so
    return pools(worker_config, values)


def settings_of(worker_config: WorkerConfig) -> dict[str, Any]:
    """The model's config.json with overrides."""
    return read_configs(Path(worker_config.model_path))[0] | worker_config.hf_overrides


@torch.inference_mode()
def load_pooling_model(
    worker_config: WorkerConfig, phases: Phases, device: Device, collective: Collective
) -> LoadedModel:
    """Load, transform and prove the model of `worker_config`, and make its pooler.

    Raises:
        LoadError: the model cannot be loaded or is not supported; the text says why.
    """
    import transformers.modeling_utils  # noqa: F401 - slow, so imported within this phase

    phases.end("import")
    spec = read_spec(worker_config, settings_of(worker_config))
    check_ranks(spec, worker_config.parallel)
    config = load_config(worker_config)
    check_config(config)
    dtype = resolve_dtype(worker_config.dtype, config)
    kv_dtype = resolve_kv_dtype(worker_config.kv_cache_dtype, dtype, device)
    device.prepare(dtype, kv_dtype, head_dims(config), encodes=spec.encoder)
    phases.end("config")
    kind = BASE if spec.head or spec.token_head else CLASSES[spec.kind]
    weights = build_module(worker_config, config, dtype, device, kind)
    module, base = weights.causal, base_of(weights.causal)
    shards = own_shards(module, collective, worker_config.parallel)
    phases.end("weights")
    max_len = max_length(worker_config, config, spec, base)
    run = None if spec.encoder else dry_run(module, max_len)
    if run is None:
        tabulate_rotary(module, max_len)
        model, shapes = load_encoder(weights, spec, device, max_len, adapted=worker_config.lora is not None)
    else:
        turn = partial(own_turn, collective, worker_config.parallel)
        model, shapes = load_causal(weights, spec, device, max_len, run, collective, shards, turn)
    if device.torch_device.type == "cpu":
        model.shorten_scores()
    phases.end("transform")
    forget_mapped_files(worker_config.model_path)
    release_spare_memory()
    text = config.get_text_config()
    dense = load_dense(spec, dtype, device) or load_head(spec, Path(worker_config.model_path), dtype, device)
    size = text.hidden_size if spec.kind == "embed" else config.num_labels
    if dense:
        size = dense[-1].product.out_features
    scales = [] if spec.encoder else kv_scales(worker_config, kv_dtype, text.num_hidden_layers)
    info = pooling_info(spec, config, worker_config.pooler_config, base, size)
    return LoadedModel(
        model=model,
        architecture=type(module).__name__,
        dtype=dtype,
        vocab_size=text.vocab_size,
        max_model_len=max_len,
        short_length=0 if run is None else run.short_length,
        eos_token_id=end_of_sequence(config),
        kv_shapes=[replace(shape, dtype=kv_dtype) for shape in shapes],
        kv_scales=scales,
        weight_bytes=weight_bytes(model),
        pooler=Pooler(spec, info, model, dense, dtype),
        cuts={} if shards is None else shards.cuts,
    )


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


def max_length(worker_config: WorkerConfig, config: Any, spec: PoolingSpec, base: Any) -> int:
    """Maximum tokens of a prompt.

    Raises:
        LoadError: `max_model_len` exceeds what the model has positions for.
    """
    limit = max_positions(config, base) if spec.encoder else None
    requested = worker_config.max_model_len
    if limit is not None and requested is not None and requested > limit:
        raise LoadError(f"max_model_len {requested} exceeds the model's limit of {limit} positions")
    if requested is None and spec.max_length is not None:
        return min(spec.max_length, limit or spec.max_length)
    return resolve_max_model_len(requested, config) if limit is None else requested or limit


def dry_run(module: Any, max_len: int) -> DryRun:
    """The requests by which a causal model is proven."""
    run = DryRun.make(module.config.get_text_config().vocab_size, max_len)
    return replace(run, short_length=short_length(module, max(max_len, run.end)))


def load_causal(
    weights: Weights,
    spec: PoolingSpec,
    device: Device,
    max_len: int,
    run: DryRun,
    collective: Collective,
    shards: Shards | None,
    turn: Callable[[], AbstractContextManager[None]],
) -> tuple[PoolingModel, list[KVShape]]:
    """A causal model that is transformed and proven, and the shapes of its KV cache.

    run: see `dry_run`. shards: what this rank has of it; None: all. turn: see `transform`.

    Raises:
        LoadError: it is not served; the text says why.
    """
    expected, scores = reference_states(weights, run) if collective.rank == 0 else ([], [])
    expected, scores = (from_first(tensors, collective, device) for tensors in (expected, scores))
    tabulate_rotary(weights.causal, max(max_len, run.end), run.short_length)
    if shards is not None:
        weights.divide(shards)
    model, shapes = transform(weights, run, expected, max_len, device, collective, turn, PoolingModel)
    assert isinstance(model, PoolingModel)
    check_scores(model, spec, expected, scores, weights.schemes, device)
    return model, shapes


def from_first(tensors: list[Tensor], collective: Collective, device: Device) -> list[Tensor]:
    """The matrices that rank 0 has, on all ranks: on the host, and of rank 0's dtypes."""
    if collective.size == 1:
        return tensors
    is_first, own = collective.rank == 0, device.torch_device
    count = collective.broadcast(torch.tensor([len(tensors)], device=own), 0).item()
    shared = []
    for index in range(int(count)):
        form = [*tensors[index].shape, FLOATS.index(tensors[index].dtype)] if is_first else [0, 0, 0]
        rows, columns, dtype = collective.broadcast(torch.tensor(form, device=own), 0).tolist()
        values = tensors[index].float() if is_first else torch.zeros(rows, columns)
        shared.append(collective.broadcast(values.to(own).contiguous(), 0).cpu().to(FLOATS[dtype]))
    return shared


def reference_states(weights: Weights, run: DryRun) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states [n, H] of each request of a dry run by the untouched module; and logits, if it classifies.

    Raises:
        LoadError: the module's forward pass fails.
    """
    module, base = weights.causal, base_of(weights.causal)
    scores: list[Tensor] = []
    states: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        states.append(output[0][0].cpu())

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        output = module(input_ids=ids, position_ids=positions)
        if base is not module:
            scores.append(output.logits.reshape(-1, output.logits.shape[-1]).float().cpu())
        return states[-1]

    hook = base.register_forward_hook(keep)
    try:
        hidden = reference(weights, run, forward)
    finally:
        hook.remove()
    return hidden, scores[-len(hidden) :]


def check_scores(
    model: PoolingModel,
    spec: PoolingSpec,
    hidden: list[Tensor],
    scores: list[Tensor],
    schemes: Iterable[Scheme],
    device: Device,
) -> None:
    """Compare the classifier's logits with those of the untouched module, given its hidden states on the host.

    schemes: of the weights, see `prove`.

    Raises:
        LoadError: they differ.
    """
    if not scores:
        return
    found = []
    for states in hidden:
        if spec.kind != "token_classify":
            pooled = {"LAST": states[-1], "CLS": states[0], "MEAN": states.float().mean(0)}[spec.pooling_type]
            states = pooled.to(states.dtype)[None]
        found.append(model.scores(states.to(device.torch_device)).cpu())
    difference = relative_difference(found, scores)
    if difference > permitted_difference(hidden[0].dtype, schemes):
        raise refuse(model.config, f"its scores are wrong (by {difference:.1%})")


def load_encoder(
    weights: Weights, spec: PoolingSpec, device: Device, max_len: int, *, adapted: bool = False
) -> tuple[PoolingModel, list[KVShape]]:
    """An encoder that is transformed and proven; it has no KV cache.

    adapted: its linear layers stay apart, for adapters to change them.

    Raises:
        LoadError: it is not served; the text says why.
    """
    module = weights.causal
    if getattr(module.config, "is_decoder", False):
        raise refuse(module.config, "is_decoder is set: as a decoder it is not served")
    base, offset = base_of(module), position_offset(base_of(module))
    vocab_size = module.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, max_len) for length in LENGTHS]
    ids = [torch.randint(min(5, vocab_size - 1), vocab_size, (n,), generator=generator) for n in lengths]
    run = DryRun(ids, [offset] * len(ids))
    expected, scores = reference_states(weights, run)
    attention.register()
    own_attention = not replaces_attention(base)
    if not own_attention:
        module.set_attn_implementation(attention.NAME)

    def proven(used: Any) -> EncoderModel:
        """The model with `used` in place of its base, which is packed already."""
        whole = module
        if base is module:
            whole = used
        else:
            setattr(module, module.base_model_prefix, used)
        packed = isinstance(used, EncoderStack) or not own_attention
        model = EncoderModel(whole, device.batch_invariant, offset, packed)
        transform_parts(model.causal, weights, device.torch_device)
        prove_encoder(model, run, expected, weights, device)
        check_scores(model, spec, expected, scores, weights.schemes, device)
        return model

    stack = None if adapted else build_encoder_stack(base, weights, device.torch_device)
    if stack is not None:
        with suppress(LoadError):
            return proven(stack), []
        if base is not module:
            setattr(module, module.base_model_prefix, base)
    transform_parts(base, weights, device.torch_device)  # finds its weights by names, as long as it is whole
    return proven(base), []


def prove_encoder(
    model: EncoderModel, run: DryRun, expected: list[Tensor], weights: Weights, device: Device
) -> None:
    """Compare the hidden states of packed prompts with those of the untouched module.

    Raises:
        LoadError: they differ, or the model fails.
    """
    try:
        actual = encoded(model, run, device)
    except Exception as error:
        raise refuse(model.config, f"packed prompts do not fit it: {first_line(error)}") from error
    difference = relative_difference(actual, expected)
    if difference > permitted_difference(expected[0].dtype, weights.schemes):
        raise refuse(model.config, f"its hidden states are wrong (by {difference:.1%})")


def replaces_attention(base: Any) -> bool:
    """True if transformers lets the attention of a base be replaced."""
    return bool(getattr(base, "_supports_sdpa", False) or getattr(base, "_supports_attention_backend", False))


def encoded(model: EncoderModel, run: DryRun, device: Device) -> list[Tensor]:
    """Hidden states [n, H] of each request of a dry run on the host; all have run in one step."""
    lengths = [len(ids) for ids in run.token_ids]
    longest, starts = max(lengths), torch.tensor([0, *lengths]).cumsum(0).int()
    none = torch.zeros(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    batch = in_pages(AttentionBatch(starts, none, none, none, longest, longest), positions)
    about_attention = (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping)
    uploaded = device.upload([torch.cat(run.token_ids), positions, *about_attention])
    ids, positions, query_start_loc, seq_lens, block_table, slot_mapping = uploaded
    placed = AttentionBatch(query_start_loc, seq_lens, block_table, slot_mapping, longest, longest)
    step = model.context(placed, positions, starts[:-1].tolist())
    return list(torch.split(model.hidden_states(ids, step).cpu(), lengths))


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
