"""What an engine says of its configuration (`get_model_config` and its kin), where programs written for vLLM look for it."""

from pagewire.frontend.api.configs import (
    DecodingConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerLimits as SchedulerConfig,
)
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.pooling import PoolerConfig

__all__ = ["DecodingConfig", "LoRAConfig", "ModelConfig", "ParallelConfig", "PoolerConfig", "SchedulerConfig"]
