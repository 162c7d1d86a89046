"""Whether a model fits into a GPU's memory, known before there is a GPU. Imports no torch.

The plan is that of the worker (`device/gpu_memory.py`), which measures activations and tables; here they
are reckoned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu.panels import ITEM_BYTES
from pagewire.workers.checkpoint.headers import Headers
from pagewire.workers.device.gpu_memory import (
    CONTEXT_BYTES,
    GpuMemory,
    attention_scratch,
    max_samples,
    may_record,
    sampling_scratch,
)
from pagewire.workers.device.kv_size import CacheSize, cache_size
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.figures import Footprint
from pagewire.workers.estimate.fit import amount, cache_needs, sizes_of
from pagewire.workers.estimate.gpu_layout import GPU

MULTIPROCESSORS = 132  # of a GPU that is not there: those of an H100 and an H200
TOKEN_BYTES = 64  # of a token in a step beside its states: its id, its position, its places; rounded up
LENGTHS = (1024, 4096, 16_384, 65_536, 262_144)
"""In tokens: for each, `inspect` says how many requests of this length may run at a time."""


class Gpu(NamedTuple):
    """A GPU, of which each worker has one.

    total_bytes: of its memory. other_bytes: held by other processes.
    """

    total_bytes: int
    other_bytes: int = 0
    multiprocessors: int = MULTIPROCESSORS


@dataclass(frozen=True)
class GpuFit:
    """How a model's memory is shared out on a GPU, and what fits into its KV cache."""

    memory: GpuMemory
    max_model_len: int
    kv_token_bytes: int
    kv_request_bytes: int
    """Of a request of max_model_len tokens, with its states."""
    kv_tokens: int
    num_states: int
    """State slots; 0 if no layer keeps states."""
    requests: dict[int, int]
    """How many requests of a length may run at a time, by length."""
    problem: str | None
    """Why the model cannot run there."""


def gpu_fit(sizes: Footprint, config: WorkerConfig, gpu: Gpu) -> GpuFit:
    """Whether a footprint fits into a GPU. sizes: made for `GPU`."""
    max_model_len = config.max_model_len or sizes.dimensions.max_positions
    memory = expected_memory(sizes, config, gpu, max_model_len)
    needs = cache_needs(sizes, config, max_model_len)
    budget = max(0, memory.kv_cache - needs.spare_bytes)
    size, problem = CacheSize(budget // needs.block_bytes, 0), None
    taken = memory.missing
    if config.num_blocks is not None:
        taken += max(0, needs.room(config, budget) - memory.kv_cache)
    if taken:
        problem = f"the parts take {amount(taken)} more than there is"
    elif needs.room(config, budget) < needs.request_bytes:
        problem = (
            f"a request of max_model_len {max_model_len} takes {amount(needs.request_bytes)} of KV cache, for "
            f"which {amount(budget)} are left"
        )
    else:
        try:
            size = cache_size(config, max_model_len, needs.block_bytes, sizes.state_bytes, budget)
        except LoadError as error:
            problem = str(error)
    lengths = sorted({*(length for length in LENGTHS if length < max_model_len), max_model_len})
    return GpuFit(
        memory=memory,
        max_model_len=max_model_len,
        kv_token_bytes=needs.block_bytes // config.block_size,
        kv_request_bytes=needs.request_bytes,
        kv_tokens=size.num_blocks * config.block_size,
        num_states=size.num_states,
        requests={length: num_requests(size, config, length) for length in lengths}
        if problem is None
        else {},
        problem=problem,
    )


def num_requests(size: CacheSize, config: WorkerConfig, length: int) -> int:
    """How many requests of a length may run at a time: by blocks, by states, by `max_num_seqs`."""
    fitting = min(config.max_num_seqs, size.num_blocks // -(-length // config.block_size))
    return min(fitting, size.num_states // 2) if size.num_states else fitting


def expected_memory(sizes: Footprint, config: WorkerConfig, gpu: Gpu, max_model_len: int) -> GpuMemory:
    """The plan of a worker with this model on a GPU."""
    dimensions, drafter = sizes.dimensions, sizes.drafter
    models = [sizes] if drafter is None else [sizes, drafter]
    rows = max_samples(config)
    return GpuMemory.shared_out(
        config,
        total=gpu.total_bytes,
        others=gpu.other_bytes,
        context=CONTEXT_BYTES,
        weights=sum(model.weight_bytes for model in models),
        tables=max_model_len * sum(model.position_bytes for model in models),
        scratch=attention_scratch(gpu.multiprocessors) + sampling_scratch(rows, dimensions.vocab_size),
        activations=max(activation_bytes(model, config, max_model_len) for model in models),
        records=may_record(config) and is_recordable(sizes, config),
    )


def is_recordable(sizes: Footprint, config: WorkerConfig) -> bool:
    """True if a worker may record steps of the model, as far as headers say; its trial may show that it waits.

    It waits where experts have no kernel, which headers do not say: then room for graphs is left for nothing. With
    adapters they have none.
    """
    if sizes.dtype == "float32":
        return False
    return config.lora is None or not sizes.dimensions.num_experts


def activation_bytes(sizes: Footprint, config: WorkerConfig, max_model_len: int) -> int:
    """Bytes of the largest step, beside what stays: of its layers, or of its logits.

    In a layer the sum and its norm live beside what attention or the feed-forward half makes of them: queries,
    keys, values and the result; or two inputs of an activation and its output. The rows of experts are reckoned as
    where these run one by one, which takes more than one call: rows are gathered, and results are put together.
    """
    dimensions, size = sizes.dimensions, config.parallel.num_shards
    item, hidden = ITEM_BYTES[sizes.dtype], dimensions.hidden_size
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
    keys = sizes.kv_token_bytes // item // max(1, dimensions.num_layers)
    attention = 2 * dimensions.attention_size // size + keys
    experts = 0
    if dimensions.num_experts:  # logits of the router, places of rows as int64, and rows
        routed = hidden + 4 * dimensions.expert_size // size + 32 // item
        experts = dimensions.num_experts + dimensions.experts_per_token * routed
    widest = max(attention + hidden, 3 * dimensions.inner_size // size, experts)
    layers = num_tokens * (item * (2 * hidden + widest) + sizes.position_bytes + TOKEN_BYTES)
    if not sizes.is_stack:  # norms of modules are float32
        layers += num_tokens * 4 * hidden
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    logits = num_tokens * TOKEN_BYTES + item * (
        (num_tokens + num_rows) * hidden + num_rows * dimensions.vocab_size
    )
    return max(layers, logits)


class GpuRemedy(NamedTuple):
    """A change of options with which a model fits. options: as on the command line."""

    options: str
    fit: GpuFit

    def __str__(self) -> str:
        """The options, and what they leave."""
        return (
            f"{self.options} ({amount(self.fit.memory.weights)} of weights, {amount(self.fit.memory.kv_cache)} for "
            "the KV cache)"
        )


def gpu_remedies(headers: Headers, config: WorkerConfig, gpu: Gpu) -> list[GpuRemedy]:
    """Single changes of the options with which a model fits that does not fit as it is."""
    sizes, result = sizes_of(headers, config, GPU), []
    for options, fields in _changes(sizes, gpu_fit(sizes, config, gpu), config):
        changed = msgspec.structs.replace(config, **fields)
        fit = gpu_fit(sizes_of(headers, changed, GPU), changed, gpu)
        if fit.problem is None:
            result.append(GpuRemedy(options, fit))
            if "parallel" in fields:  # a larger group fits, too
                break
    return result


def _changes(sizes: Footprint, now: GpuFit, config: WorkerConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options to try, as on the command line, and the fields of the configuration."""
    if 0 < now.kv_tokens < now.max_model_len:
        yield f"--max-model-len {now.kv_tokens}", {"max_model_len": now.kv_tokens}
    if config.kv_cache_dtype == "auto" and sizes.dtype != "float32":
        yield "--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}
    if sizes.quantization is None:
        for name in ("int8", "int4"):
            yield f"--quantization {name}", {"quantization": name}
    if config.parallel.size == 1:
        for size in (2, 4, 8):
            if sizes.kv_heads % size == 0:
                parallel = msgspec.structs.replace(config.parallel, size=size)
                yield f"--tensor-parallel-size {size}", {"parallel": parallel}
