"""The sizes of the KV cache and of the memory for states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.errors import LoadError

GIB = 1 << 30
DEFAULT_KV_GIB = 4.0
LOGIT_CHUNK = 1 << 24  # logits computed at a time for prompt log probabilities
OTHER_BYTES = 256 << 20  # memory of a step beside its logits
USES = ("context", "weights", "tables", "scratch", "kv_cache", "states", "activations", "graphs")
"""The uses of memory that a worker can tell apart, some of them on GPUs only."""
MIN_STATES = 3  # a running sequence's, a copy of it while drafts are verified, and a checkpoint


class CacheSize(NamedTuple):
    """The numbers of KV blocks, which take no memory if no layer attends, and of state slots."""

    num_blocks: int
    num_states: int


def step_bytes(config: WorkerConfig, vocab_size: int) -> int:
    """Bytes that the largest step may take on a CPU, beside weights and KV cache."""
    widest = min(config.max_num_batched_tokens, LOGIT_CHUNK // vocab_size + 1)
    return widest * vocab_size * 8 + OTHER_BYTES


def kv_budget(config: WorkerConfig, available: int, headroom: int) -> int:
    """Bytes for the KV cache on a CPU.

    `kv_cache_memory_bytes` if set. Else PAGEWIRE_CPU_KVCACHE_SPACE, but no more than the permitted fraction of the
    available memory minus `headroom` for a step.

    Raises:
        LoadError: PAGEWIRE_CPU_KVCACHE_SPACE is not a number.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    text = os.environ.get("PAGEWIRE_CPU_KVCACHE_SPACE") or str(DEFAULT_KV_GIB)
    try:
        space = float(text) * GIB
    except ValueError:
        raise LoadError(f"PAGEWIRE_CPU_KVCACHE_SPACE must be a number of GiB, got {text!r}") from None
    share = config.gpu_memory_utilization * available - headroom
    return max(0, int(min(space, share)))


def num_kv_blocks(config: WorkerConfig, max_model_len: int, block_bytes: int, budget: int) -> int:
    """Number of KV blocks: `num_gpu_blocks_override`, or what fits into `budget` bytes.

    Never more than `max_num_seqs` requests of `max_model_len` tokens need, unless overridden.

    Raises:
        LoadError: a single request of `max_model_len` does not fit.
    """
    per_request = -(-max_model_len // config.block_size)
    fitting = config.num_blocks if config.num_blocks is not None else budget // block_bytes
    if fitting < per_request:
        raise LoadError(
            f"a request of max_model_len {max_model_len} needs {per_request} KV blocks "
            f"({per_request * block_bytes / GIB:.2f} GiB), but only {fitting} fit; "
            f"max_model_len {fitting * config.block_size} would fit, or give more KV memory"
        )
    if config.num_blocks is not None:
        return config.num_blocks
    return min(fitting, per_request * config.max_num_seqs)


def cache_size(
    config: WorkerConfig, max_model_len: int, block_bytes: int, state_bytes: int, budget: int
) -> CacheSize:
    """How many KV blocks and state slots `budget` bytes hold: see `num_kv_blocks` for blocks alone.

    Each running sequence has a state slot, or two where tokens are proposed for it; together they take at most half
    of the memory. Of what is left, blocks and checkpoints of states take about equal halves: so a checkpoint costs
    what the keys and values of its span cost.

    block_bytes: 0 if no layer attends. state_bytes: of a slot; 0 if no layer keeps states.

    Raises:
        LoadError: they do not hold a single request of `max_model_len`.
    """
    if not state_bytes:
        return CacheSize(num_kv_blocks(config, max_model_len, block_bytes, budget), 0)
    per_request = -(-max_model_len // config.block_size)
    num_live = config.max_num_seqs * (1 if config.speculative is None else 2)
    if config.num_blocks is None and MIN_STATES * state_bytes > budget - per_request * block_bytes:
        raise LoadError(
            f"a request of max_model_len {max_model_len} needs {per_request * block_bytes / GIB:.2f} GiB of KV "
            f"memory and {MIN_STATES} state slots of {state_bytes / GIB:.3f} GiB, but there are "
            f"{budget / GIB:.2f} GiB: lower max_model_len, or give more KV memory"
        )
    if not block_bytes:  # blocks keep the names of prefixes: as many again as sequences can have at a time
        num_blocks = config.num_blocks or 2 * per_request * config.max_num_seqs
        return CacheSize(num_blocks, max(MIN_STATES, min(budget // state_bytes, num_live + num_blocks)))
    if config.num_blocks is None:
        num_live = min(num_live, budget // 2 // state_bytes)
    half = max((budget - num_live * state_bytes) // 2, per_request * block_bytes)
    num_blocks = num_kv_blocks(config, max_model_len, block_bytes, half)
    num_checkpoints = max(config.max_num_seqs, -(-num_blocks * block_bytes // state_bytes))
    num_states = num_live + min(num_blocks, num_checkpoints)
    if config.num_blocks is None:
        num_states = min(num_states, (budget - num_blocks * block_bytes) // state_bytes)
    return CacheSize(num_blocks, num_states)


def ledger(memory: Mapping[str, int]) -> str:
    """The use of memory by `Runner.memory`, as a line for the log."""
    parts = {name: memory.get(name, 0) for name in USES}
    parts["rest"] = max(0, memory["process"] - sum(parts.values()) + parts["activations"])
    return in_gib(parts, memory["total"])


def in_gib(parts: Mapping[str, int], total: int) -> str:
    """Parts of a memory for people, such as "weights 0.25, kv cache 4.00 of 16.00 GiB"; empty ones are left out."""
    taken = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in parts.items() if size)
    return f"{taken} of {total / GIB:.2f} GiB"
