"""How many KV blocks to take."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pagewire.ipc.messages import WorkerConfig
from pagewire.workers.errors import LoadError

GIB = 1 << 30
DEFAULT_KV_GIB = 4.0
LOGIT_CHUNK = 1 << 24  # logits computed at a time for prompt log probabilities


def kv_budget(config: WorkerConfig, available: int, headroom: int) -> int:
    """Bytes for the KV cache: as asked for, or within the share of memory that may be used.

    Raises:
        LoadError: PAGEWIRE_CPU_KVCACHE_SPACE is no number of GiB.
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
    """Blocks to take: the override, or what `budget` bytes hold and `max_num_seqs` longest requests need.

    Raises:
        LoadError: not one request of `max_model_len` fits.
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
    """Where the memory of `Runner.memory` has gone, in a line."""
    parts = {name: memory.get(name, 0) for name in ("weights", "kv_cache", "activations", "graphs")}
    parts["rest"] = max(0, memory["process"] - parts["weights"] - parts["kv_cache"] - parts["graphs"])
    taken = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in parts.items() if size)
    return f"{taken} of {memory['total'] / GIB:.2f} GiB"
