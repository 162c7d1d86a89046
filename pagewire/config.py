"""Configurations, as `get_model_config` and its kin return them, where programs written for vLLM look for them."""

from pagewire.frontend.api.configs import (
    DecodingConfig,
    ModelConfig,
    ParallelConfig,
)
from pagewire.frontend.api.configs import (
    SchedulerLimits as SchedulerConfig,
)
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.pooling import PoolerConfig

__all__ = ["DecodingConfig", "LoRAConfig", "ModelConfig", "ParallelConfig", "PoolerConfig", "SchedulerConfig"]
