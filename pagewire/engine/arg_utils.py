"""`EngineArgs`, where programs written for vLLM look for it."""

from pagewire.ipc.options.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
