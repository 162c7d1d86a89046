"""Whether a model fits into this machine's memory, known before its weights are read. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from pagewire.ipc.wire.model_figures import ModelFigures
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.checkpoint.headers import Headers, read_headers
from pagewire.workers.checkpoint.mtp_layers import divided
from pagewire.workers.device.kv_size import GIB, MIN_STATES, CacheSize, cache_size, kv_budget, step_bytes
from pagewire.workers.errors import MemoryShortageError
from pagewire.workers.estimate.figures import Footprint, footprint, of_rank
from pagewire.workers.estimate.inventory import Part
from pagewire.workers.weight_cache import folder
from pagewire.workers.weight_cache.key import key_of

BASE_BYTES = 380 << 20
"""Resident memory of a worker beside its model: interpreter, PyTorch (a build for CPUs), transformers, sockets."""
KEPT_BASE_BYTES = 235 << 20
"""The same where packed weights are read: without transformers, and without what proving a model leaves."""


@dataclass(frozen=True)
class Fit:
    """What a model takes of this machine's memory, in bytes, and what that leaves for the KV cache."""

    total_bytes: int
    available_bytes: int
    is_kept: bool
    """Its packed weights are in the cache, and will be read rather than the checkpoint."""
    base_bytes: int
    weight_bytes: int
    """With all else that is read with them, where they are kept."""
    table_bytes: int
    """Rotary angles of all positions; 0 where they are kept with the weights."""
    loading_bytes: int
    """Beside the weights, until the model is ready."""
    step_bytes: int
    """The most that a step takes for activations and logits."""
    max_model_len: int
    kv_request_bytes: int
    """KV cache of a request of max_model_len tokens, with its states."""
    kv_bytes: int
    """The size of the KV cache; what would fit, if that is too little for a request."""
    kv_tokens: int
    num_states: int
    """State slots; 0 if no layer keeps states."""
    state_bytes: int
    """Of all of them."""
    problem: str | None
    """Why the model cannot run here."""

    @property
    def resident_bytes(self) -> int:
        """Of the worker's process when the KV cache is full, between steps."""
        return self.base_bytes + self.weight_bytes + self.table_bytes + self.kv_bytes + self.state_bytes


def kept_bytes(config: WorkerConfig, isa: str) -> int | None:
    """Bytes of the packed weights that a start with these options reads; None if it loads the checkpoint.

    isa: the instruction set of the kernels.
    """
    try:
        key = key_of(config, isa)
    except (OSError, ValueError):
        return None  # loading will fail, with a better message
    return None if key is None else folder.size_of(key)


def fit(sizes: Footprint, config: WorkerConfig, total: int, available: int, kept: int | None = None) -> Fit:
    """Whether a footprint fits, given the bytes of memory that this machine has, and has available now.

    kept: `kept_bytes` of these options.

    Raises:
        LoadError: an option about memory is malformed.
    """
    dimensions, drafter, speculative = sizes.dimensions, sizes.drafter, config.speculative
    max_model_len = config.max_model_len or dimensions.max_positions
    base, weights, loading = BASE_BYTES, sizes.weight_bytes, sizes.loading_bytes
    tables = max_model_len * sizes.position_bytes
    if kept is not None:
        base, weights, loading, tables = KEPT_BASE_BYTES, kept, 0, 0
    if drafter is not None and speculative is not None:
        base, weights, loading = (
            BASE_BYTES,
            weights + drafter.weight_bytes,
            max(loading, drafter.loading_bytes),
        )
        tables += max_model_len * drafter.position_bytes
    steps = step_bytes(config, max(1, dimensions.vocab_size))
    left = available - base - weights - tables
    needs = cache_needs(sizes, config, max_model_len)
    block_bytes, state_bytes, request_bytes = needs.block_bytes, sizes.state_bytes, needs.request_bytes
    budget = max(0, kv_budget(config, max(0, left), steps) - needs.spare_bytes)
    room = needs.room(config, budget)
    size = CacheSize(room // max(1, block_bytes), 0)
    problem = None
    if left < loading:
        whose = "its weights" if drafter is None else "its weights and the drafter's"
        problem = (
            f"{whose} take {amount(weights)} of memory, loading them {amount(loading)} "
            f"more, and the worker itself {amount(base)}"
        )
    elif room < request_bytes or left < request_bytes:
        problem = (
            f"a request of max_model_len {max_model_len} takes {amount(request_bytes)} of KV cache, for which "
            f"{amount(min(budget, left))} are left beside {amount(weights)} of weights"
        )
    else:
        size = cache_size(config, max_model_len, block_bytes, state_bytes, budget)
    return Fit(
        total_bytes=total,
        available_bytes=available,
        is_kept=kept is not None,
        base_bytes=base,
        weight_bytes=weights,
        table_bytes=tables,
        loading_bytes=loading,
        step_bytes=steps,
        max_model_len=max_model_len,
        kv_request_bytes=request_bytes,
        kv_bytes=size.num_blocks * block_bytes,
        kv_tokens=size.num_blocks * config.block_size,
        num_states=size.num_states,
        state_bytes=size.num_states * state_bytes,
        problem=problem,
    )


class CacheNeeds(NamedTuple):
    """Bytes that the KV cache of a model is made of."""

    block_bytes: int
    """At least 1, also of a model that keeps nothing at all."""
    least_state_bytes: int
    """Of the fewest state slots."""
    request_bytes: int
    """Of a request of max_model_len tokens, with its states."""
    spare_bytes: int
    """For drafts whose places belong to no block yet."""

    def room(self, config: WorkerConfig, budget: int) -> int:
        """The bytes of the cache: a budget, or that of `num_blocks`."""
        if config.num_blocks is None:
            return budget
        return config.num_blocks * self.block_bytes + self.least_state_bytes


def cache_needs(sizes: Footprint, config: WorkerConfig, max_model_len: int) -> CacheNeeds:
    """The needs of a model, with those of its drafter."""
    drafter, speculative, spare = sizes.drafter, config.speculative, 0
    token_bytes = sizes.kv_token_bytes
    if drafter is not None and speculative is not None:
        token_bytes += drafter.kv_token_bytes
        num_spare = config.max_num_seqs * -(-speculative.num_speculative_tokens // config.block_size)
        spare = num_spare * config.block_size * drafter.kv_token_bytes
    block_bytes = token_bytes * config.block_size or int(not sizes.state_bytes)
    states = MIN_STATES * sizes.state_bytes
    request = -(-max_model_len // config.block_size) * block_bytes + states
    return CacheNeeds(block_bytes, states, request, spare)


@dataclass(frozen=True)
class Remedy:
    """A change of options with which a model fits."""

    options: str
    """As on the command line."""
    fit: Fit

    def __str__(self) -> str:
        """The options, and what they leave."""
        fit = self.fit
        return (
            f"{self.options} ({amount(fit.weight_bytes)} of weights, "
            f"{amount(fit.kv_bytes)} for {fit.kv_tokens:,} tokens of KV cache)"
        )


def remedies(headers: Headers, config: WorkerConfig, isa: str, total: int, available: int) -> list[Remedy]:
    """Single changes of the options with which a model fits that does not fit as it is."""
    sizes, found = sizes_of(headers, config, isa), []
    for name, value in _changes(sizes, fit(sizes, config, total, available), config):
        changed = msgspec.structs.replace(config, **{name: value})
        result = fit(sizes_of(headers, changed, isa), changed, total, available)
        if result.problem is None:
            found.append(Remedy(f"--{name.replace('_', '-')} {value}", result))
    return found


def _changes(sizes: Footprint, now: Fit, config: WorkerConfig) -> Iterator[tuple[str, Any]]:
    """Options to try, and their values."""
    if 0 < now.kv_tokens < now.max_model_len:
        yield "max_model_len", now.kv_tokens
    yield "kv_cache_memory_bytes", now.kv_request_bytes
    if config.kv_cache_dtype == "auto":
        yield "kv_cache_dtype", "int8"
    if sizes.quantization is None:
        yield from (("quantization", "int8"), ("quantization", "int4"))
        if sizes.dtype == "float32":
            yield "dtype", "bfloat16"


def sizes_of(headers: Headers, config: WorkerConfig, isa: str) -> Footprint:
    """The footprint of a checkpoint with the options of a worker; for a rank of a group, the footprint of its part.

    Raises:
        LoadError: see `footprint`, and `read_headers` for the model that proposes tokens.
    """
    speculative = config.speculative
    layers, quantization = None, config.quantization  # of the drafter
    if speculative is not None and speculative.method == "mtp":
        headers, layers = divided(headers)
    elif speculative is not None and speculative.model is not None:
        layers = read_headers(speculative.model, trust_remote_code=config.trust_remote_code)
        quantization = speculative.quantization
    whole = footprint(headers, isa, config.dtype, config.quantization, config.kv_cache_dtype)
    own = of_rank(whole, config.parallel)
    if layers is None:
        return own
    drafter = footprint(layers, isa, own.dtype, quantization, config.kv_cache_dtype)
    return replace(own, drafter=drafter_of_rank(drafter, config))


def largest_stage(headers: Headers, config: WorkerConfig, isa: str) -> WorkerConfig:
    """The options of the first rank of the stage whose weights take most."""
    parallel = config.parallel
    ranks = range(0, parallel.size, parallel.num_shards)
    stages = [
        msgspec.structs.replace(config, parallel=msgspec.structs.replace(parallel, rank=rank))
        for rank in ranks
    ]
    return max(stages, key=lambda stage: sizes_of(headers, stage, isa).weight_bytes)


def drafter_of_rank(whole: Footprint, config: WorkerConfig) -> Footprint:
    """The footprint of the drafter in a rank of a group: of its part, or of the whole where that is what it has."""
    size, speculative = config.parallel.num_shards, config.speculative
    assert speculative is not None
    divisible = size <= whole.kv_heads or size % whole.kv_heads == 0
    if speculative.draft_tensor_parallel_size == 1 or not divisible:
        return whole
    # An EAGLE-3 head may have an embedding of its own, which every rank has as a whole (`eagle3_checkpoint.py`).
    return of_rank(whole, config.parallel, (Part.EMBEDDING,) if speculative.method == "eagle3" else ())


def check_fit(headers: Headers, config: WorkerConfig, isa: str, total: int, available: int) -> Footprint:
    """The footprint of a model that fits into memory.

    Raises:
        MemoryShortageError: it does not fit; the text says what is needed, what there is, and what would help.
        LoadError: see `footprint`.
    """
    sizes = sizes_of(headers, config, isa)
    if (problem := fit(sizes, config, total, available, kept_bytes(config, isa)).problem) is not None:
        changes = "; or with ".join(map(str, remedies(headers, config, isa, total, available)))
        advice = f"It would fit with {changes}" if changes else "Free memory, or take a smaller model"
        room = f"{amount(available)} of {amount(total)} are available"
        raise MemoryShortageError(f"the model does not fit into memory: {problem}; {room}. {advice}.")
    return sizes


def model_figures(sizes: Footprint) -> ModelFigures:
    """The figures that `Ready` carries; but for `memory_bytes`, of the model without a drafter."""
    drafter = sizes.drafter
    return ModelFigures(
        form=sizes.form,
        quantization=sizes.quantization,
        parameters=sizes.parameters,
        bits=8 * sizes.file_bytes / max(1, sizes.parameters),
        file_bytes=sizes.file_bytes,
        weight_bytes=sizes.weight_bytes,
        memory_bytes=BASE_BYTES + sizes.weight_bytes + (drafter.weight_bytes if drafter else 0),
        token_read_bytes=sizes.read_bytes,
        kv_token_bytes=sizes.kv_token_bytes,
        is_stack=sizes.is_stack,
        isa=sizes.isa,
    )


def summary(sizes: Footprint) -> str:
    """A footprint in a line, for the log."""
    dimensions, figures = sizes.dimensions, model_figures(sizes)
    return (
        f"{dimensions.architecture}, {sizes.form}, {figures.parameters / 1e6:,.0f} million parameters of "
        f"{figures.bits:.1f} bits ({sizes.quantization or 'not quantised'}); {amount(figures.weight_bytes)} "
        f"packed for {sizes.isa}; a token reads {amount(figures.token_read_bytes)} and adds "
        f"{figures.kv_token_bytes / 1024:.1f} KiB to the KV cache"
        + (f"; a sequence has {amount(sizes.state_bytes)} of states" if sizes.state_bytes else "")
    )


def amount(num_bytes: float) -> str:
    """Bytes for people, such as "1.25 GiB"."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / (1 << 20):.1f} MiB"
