"""Parts of an engine's configuration, as `get_parallel_config` and the like return them."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.ipc.wire.messages import EngineInfo


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is split. world_size: number of workers."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    world_size: int


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of the scheduler, in tokens and sequences. policy: "fcfs" or "priority"."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: str


@dataclass(frozen=True)
class DecodingConfig:
    """How structured output is made."""

    guided_decoding_backend: str = "llguidance"


def parallel_config(info: EngineInfo) -> ParallelConfig:
    """How the engine's model is split."""
    shards, stages = info.tensor_parallel_size, info.pipeline_parallel_size
    return ParallelConfig(shards, stages, shards * stages)


def scheduler_config(info: EngineInfo) -> SchedulerLimits:
    """Limits of the engine's scheduler."""
    return SchedulerLimits(
        info.max_num_batched_tokens, info.max_num_seqs, info.max_model_len, info.scheduling_policy
    )
