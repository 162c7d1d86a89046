"""The size of the KV cache."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.errors import LoadError

GIB = 1 << 30
DEFAULT_KV_GIB = 4.0
LOGIT_CHUNK = 1 << 24  # logits computed at a time for prompt log probabilities
OTHER_BYTES = 256 << 20  # memory of a step beside its logits


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


def ledger(memory: Mapping[str, int]) -> str:
    """The use of memory by `Runner.memory`, as a line for the log."""
    parts = {name: memory.get(name, 0) for name in ("weights", "kv_cache", "activations", "graphs")}
    parts["rest"] = max(0, memory["process"] - parts["weights"] - parts["kv_cache"] - parts["graphs"])
    taken = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in parts.items() if size)
    return f"{taken} of {memory['total'] / GIB:.2f} GiB"
