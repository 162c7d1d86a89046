"""How the memory of a GPU is shared out. Imports no torch.

One plan for the worker, which measures most parts of it, and for `pagewire inspect`, which reckons them
(`workers/estimate/gpu_fit.py`). What no part takes is for the KV cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.device.kv_size import GIB, in_gib

CONTEXT_BYTES = 512 << 20  # estimate of what the driver takes for a process; there is no API for it
GRAPH_BYTES = 256 << 20  # estimate of what graphs of a model take beside the memory of their steps
RECORDED_TOKENS = 1024
"""The most tokens of a recorded step. By reckoning, launches of longer ones take less time than their work."""
MOST_LIKELY = 20  # most likely tokens that a GPU's sampler finds per row; a row that needs more is slower
MOST_SAMPLED_TOKENS = 262_144  # the largest vocabulary of the sampling kernels
SPLIT_PARTS, SPLIT_PART_BYTES = 16, 16 * 256 * 4 + 16 * 2 * 4 + 4
"""Of the keys of decode attention: parts for each multiprocessor, and bytes of the results of one."""
SAMPLING_ROW_BYTES = 48 + 2 * 64 * 8 + 1152 * (4 + 8) + 4096 * 8
"""Of a row while it is sampled: its state, the sums of slices, bins, and candidates. Its results come on top."""
OPTIONS = {
    "reserve": "gpu_memory_utilization",
    "weights": "quantization, tensor_parallel_size",
    "tables": "max_model_len",
    "scratch": "max_num_seqs",
    "activations": "max_num_batched_tokens, max_num_seqs",
    "graphs": "enforce_eager",
}
"""The options that change a part."""


@dataclass(frozen=True)
class GpuMemory:
    """The parts of a GPU's memory, in bytes.

    Other processes may use the reserve. What they hold beyond it is taken from the KV cache.
    """

    total: int
    reserve: int
    """Left alone, by gpu_memory_utilization."""
    others: int
    """Held by other processes."""
    context: int
    """The driver's for this process, and that of libraries outside of torch."""
    weights: int
    """As they lie on the GPU: packed integers where a kernel multiplies them, else dense; tied ones once."""
    tables: int
    """Other tensors that stay: rotary angles, the last tokens of sequences."""
    scratch: int
    """Of kernels: results of parts of the keys, and the state of sampling."""
    activations: int
    """Of the largest step."""
    graphs: int
    kv_cache: int
    """KV blocks and states of sequences: what is left, or what `kv_cache_memory_bytes` says."""

    @classmethod
    def shared_out(
        cls,
        config: WorkerConfig,
        *,
        total: int,
        others: int,
        context: int,
        weights: int,
        tables: int,
        scratch: int,
        activations: int,
        records: bool,
    ) -> GpuMemory:
        """The plan of a worker, all but the KV cache given. records: its steps are recorded as graphs."""
        kinds = [config.lora, config.speculative]  # each makes two recordings of a step
        graphs = 0
        if records:
            longest = min(RECORDED_TOKENS, config.max_num_batched_tokens)
            steps = activations * longest // config.max_num_batched_tokens
            graphs = GRAPH_BYTES * 2 ** sum(kind is not None for kind in kinds) + steps
        reserve = total - int(config.gpu_memory_utilization * total)
        taken = max(reserve, others) + context + weights + tables + scratch + activations + graphs
        kv_cache = config.kv_cache_memory_bytes
        return cls(
            total=total,
            reserve=reserve,
            others=others,
            context=context,
            weights=weights,
            tables=tables,
            scratch=scratch,
            activations=activations,
            graphs=graphs,
            kv_cache=max(0, total - taken) if kv_cache is None else kv_cache,
        )

    @property
    def parts(self) -> dict[str, int]:
        """All parts, by name."""
        return {name: size for name, size in asdict(self).items() if name != "total"}

    @property
    def missing(self) -> int:
        """Bytes by which the parts, the KV cache included, are more than there is; 0 if they fit."""
        taken = sum(self.parts.values()) - min(self.reserve, self.others)
        return max(0, taken - self.total)

    def __str__(self) -> str:
        """The plan as a line for the log."""
        return in_gib(self.parts, self.total)

    def shortage(self, device: str) -> str:
        """What takes the memory of a device, by size, with the options that change it: for errors."""
        parts = {name: size for name, size in self.parts.items() if name != "kv_cache" and size}
        named = [
            f"{name} {size / GIB:.2f}" + (f" ({OPTIONS[name]})" if name in OPTIONS else "")
            for name, size in sorted(parts.items(), key=lambda part: -part[1])
        ]
        return (
            f"Of the {self.total / GIB:.2f} GiB of {device}, {self.kv_cache / GIB:.2f} are for the KV cache; the "
            f"rest in GiB, with the options that change it: {', '.join(named)}"
        )


def may_record(config: WorkerConfig) -> bool:
    """True if the options of a worker let its steps be recorded as graphs."""
    return not config.enforce_eager


def max_samples(config: WorkerConfig) -> int:
    """The most tokens that a step samples: one for each sequence, and one for each draft."""
    num_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    most = config.max_num_seqs * (1 + num_drafts)
    return max(config.max_num_seqs, min(most, config.max_num_batched_tokens))


def attention_scratch(multiprocessors: int) -> int:
    """Bytes of `kernels.cuda.attention.Workspace` on a device."""
    return SPLIT_PARTS * multiprocessors * SPLIT_PART_BYTES


def sampling_scratch(max_rows: int, vocab_size: int, max_most_likely: int = MOST_LIKELY) -> int:
    """Bytes of `kernels.cuda.sampling.Sampler`; 0 for a vocabulary that it does not take."""
    if vocab_size > MOST_SAMPLED_TOKENS:
        return 0
    return max_rows * (SAMPLING_ROW_BYTES + 28 + 8 * (1 + max_most_likely))
